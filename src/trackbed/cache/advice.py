"""Advice for files of the cache that the system refuses."""

import errno
from typing import Final

_ADVICE: Final = {
    errno.EACCES: "path_to_cache must name a folder that you may read from and write to",
    errno.EPERM: "path_to_cache must name a folder that you may read from and write to",
    errno.EROFS: "path_to_cache must name a folder that can be written to, or one where every index is built",
    errno.ENOSPC: "path_to_cache must name a folder with room: `trackbed cache gc` makes some",
    errno.EDQUOT: "your quota on path_to_cache must have room: `trackbed cache gc` makes some",
    errno.EMFILE: "the limit on open files (ulimit -n) must be higher",
    errno.ENOMEM: "the system must have room for one more map: see vm.max_map_count, and ulimit -v",
    errno.ELOOP: "a link must lead to a file: remove it and start again",
    errno.ENOENT: "it was there at the start and has been removed since: start again, and it is built again",
    errno.ESTALE: "another host removed or replaced it meanwhile: start again",
    errno.EIO: "the disk or the file server reports an error of its own: see its log",
}
_OTHERS: Final = "path_to_cache must name a folder with room that you may write to"


_NO_FOLDER: Final = (errno.ENOENT, errno.EEXIST, errno.ENOTDIR)
"""Errors of a folder that cannot be made."""


def advice_on(error: OSError, *, is_writing: bool = False) -> str:
    """Returns the condition under which the system would accept the file.

    >>> advice_on(OSError(errno.ESTALE, "Stale file handle"))
    'another host removed or replaced it meanwhile: start again'
    """
    if is_writing and error.errno in _NO_FOLDER:
        return _OTHERS
    return _ADVICE.get(error.errno or 0, _OTHERS)
