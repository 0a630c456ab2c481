"""Store that counts its requests."""

from collections import Counter

from trackbed.comm.store import MemoryStore

REQUESTS = ("set", "set_first", "get", "get_all", "has", "add", "delete", "watch")


class CountingStore:
    """One rank's connection to a store in memory, which counts its requests."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self.requests = Counter()

    def below(self, name):
        below = CountingStore(self._store.below(name))
        below.requests = self.requests
        return below

    def __getattr__(self, name):
        if name not in REQUESTS:
            raise AttributeError(name)

        def request(*arguments):
            self.requests[name] += 1
            return getattr(self._store, name)(*arguments)

        return request
