"""Store that counts its requests, and their bytes."""

from collections import Counter

from trackbed.comm.store import MemoryStore

REQUESTS = ("set", "set_first", "get", "get_all", "has", "add", "delete", "watch")


class CountingStore:
    """One rank's connection to a store in memory, which counts its requests and the bytes of values either way."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self.requests = Counter()
        self.bytes = Counter()

    def below(self, name):
        below = CountingStore(self._store.below(name))
        below.requests, below.bytes = self.requests, self.bytes
        return below

    def __getattr__(self, name):
        if name not in REQUESTS:
            raise AttributeError(name)

        def request(*arguments):
            self.requests[name] += 1
            result = getattr(self._store, name)(*arguments)
            values = [*arguments, *(result if isinstance(result, list) else [result])]
            self.bytes[name] += sum(len(value) for value in values if isinstance(value, bytes))
            return result

        return request
