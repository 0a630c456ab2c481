"""State of one start: what its datasets request and share, and how their indices are found.

Constructors of datasets have fixed signatures, which third parties extend; a start reaches them through one context
variable. Without a start, an index is looked up or built when its dataset is made.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, Final, TypeVar

from trackbed.cache import Arrays, LazyArrays, LookupResult, Request, State, build_batch, flush_later, look_up, note_use
from trackbed.errors import CacheError
from trackbed.files.stores import is_address
from trackbed.tokens.format import PairHeader
from trackbed.tokens.read_headers import read_headers

_Made = TypeVar("_Made")


class Start:
    """A start.

    Args:
        open_only: if not empty, an index that is missing is an error that ends with this advice, and none is built.
        leave_notes: False to leave no notes in the cache.
        headers: headers of pairs in object stores that were read already.
    """

    def __init__(
        self,
        *,
        open_only: str = "",
        leave_notes: bool = True,
        headers: Mapping[str, PairHeader] | None = None,
    ) -> None:
        self.open_only = open_only
        self.leave_notes = leave_notes
        self.requested: list[LazyArrays] = []
        """Indices that are wanted, in the order in which they were requested."""
        self.made: dict[tuple[object, ...], tuple[tuple[object, ...], Any]] = {}
        """Values that datasets share, see `shared`, with the objects that they depend on, whose ids stay taken so."""
        self._headers: dict[str, PairHeader] = {}
        self.stored_headers: dict[str, PairHeader] = dict(headers or {})
        """Headers of pairs in object stores, each of which is asked for once in a start."""

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Makes this the start of the calling context. At the end, records that its entries are in use."""
        token = _START.set(self)
        try:
            yield
        finally:
            _START.reset(token)
        if self.leave_notes:
            note_use(one.entry for one in self.requested)

    def read_headers(self, prefixes: Iterable[str], *, idx_cache: str | None = None) -> None:
        """Reads the headers of many pairs at once, for datasets that are about to open them; see `read_headers`."""
        missing = [prefix for prefix in prefixes if prefix not in self.stored_headers]
        for prefix, header in read_headers(missing, idx_cache=idx_cache).items():
            (self.stored_headers if is_address(prefix) else self._headers)[prefix] = header

    def header(self, prefix: str) -> PairHeader | None:
        """Returns the header of a pair that was read ahead; of files once, as later the pair may be another one."""
        return self.stored_headers.get(prefix) or self._headers.pop(prefix, None)


_START: Final[ContextVar[Start | None]] = ContextVar("start", default=None)


def current_start() -> Start | None:
    """Returns the start of the calling context, if there is one."""
    return _START.get()


def shared(what: str, make: Callable[[], _Made], *about: object) -> _Made:
    """Returns `make()`, called once in a start for each `what` and the objects `about`, on which alone it depends."""
    start = _START.get()
    if start is None:
        return make()
    key = (what, *map(id, about))
    if key not in start.made:
        start.made[key] = about, make()
    made: _Made = start.made[key][1]
    return made


def open_index(request: Request, *, advice: str = "") -> Arrays:
    """Returns the arrays of an index, which are mapped when they are first read.

    During a start that builds, they are looked up and built later, together with all others.

    Args:
        request: the index.
        advice: if not empty, a missing index is not built but an error that ends with this text.

    Raises:
        CacheError: the index is missing and must not be built, or it cannot be written.
    """
    start = None if advice else _START.get()
    arrays = LazyArrays(request, _find_or_build)
    if start is not None:
        start.requested.append(arrays)
        advice = start.open_only
    if advice:
        arrays.note(_must_be_there(request, advice))
    if start is None and not arrays.resolve().is_built:
        note_use([request.entry])
    return arrays


def _must_be_there(request: Request, advice: str) -> LookupResult:
    (found,) = look_up([request])
    if found.state is not State.whole:
        what = f"found it damaged: {found.why}" if found.why else "found nothing"
        where = request.entry.shared.array("*")
        raise CacheError(f"{where}: the index must be there, {what}; {advice}")
    return found


def _find_or_build(request: Request, found: LookupResult | None) -> LookupResult:
    """Finds or builds one index now."""
    ((_, built),) = build_batch([request], [found])
    if built.is_built:
        flush_later([(request.entry.own_folder, built.stamps)])
    return built
