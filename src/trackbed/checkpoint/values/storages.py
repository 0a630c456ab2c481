"""Memory of plain tensors as it is written: the elements that are used, and not the storages that they lie in.

`torch.save` writes whole storages, of which a parameter of a sharded model, or a slice, is a small part. Tensors that
share memory still share it when they are loaded. Offsets, sizes and strides are in bytes where they are not a tensor's.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, Final

import torch

__all__ = ["own_memory"]

_DEVICES: Final = ("cpu", "cuda")

View = tuple[int, tuple[int, ...], tuple[int, ...], int]
"""Offset, shape and strides of a tensor in elements, and the size of an element."""


def own_memory(tensors: Iterable[torch.Tensor], storages: Iterable[Any]) -> dict[int, torch.Tensor]:
    """Copies tensors that use only a part of their storages.

    Args:
        tensors: plain tensors and parameters, which must live as long as the result is used.
        storages: storages that are written whole.

    Returns:
        Copies by the identity of the tensors, with the same values, attributes and common memory. Those that use all
        of their storage are not among them.
    """
    whole = {getattr(storage, "_untyped_storage", storage)._cdata for storage in storages}  # noqa: SLF001  its identity
    groups: dict[int, dict[int, torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.layout is torch.strided and tensor.device.type in _DEVICES and not tensor.is_quantized:
            key = tensor.untyped_storage()._cdata  # noqa: SLF001
            if key not in whole:
                groups.setdefault(key, {})[id(tensor)] = tensor
    copies: dict[int, torch.Tensor] = {}
    for group in groups.values():
        copies |= _copies(list(group.values()))
    return copies


def _copies(tensors: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Copies of the tensors of one storage."""
    num_bytes = tensors[0].untyped_storage().nbytes()
    if any(tensor.nbytes == num_bytes and tensor.is_contiguous() for tensor in tensors):
        return {}
    found: dict[int, torch.Tensor] = {}
    # Tensors whose ranges of bytes do not overlap share nothing.
    ordered = sorted(tensors, key=lambda tensor: _range(_view(tensor)))
    ends, numbers = 0, list[int]()
    for tensor in ordered:
        start, stop = _range(_view(tensor))
        numbers.append(numbers[-1] + (start >= ends) if numbers else 0)
        ends = max(ends, stop)
    for _, part in groupby(zip(numbers, ordered, strict=True), key=lambda pair: pair[0]):
        found |= _copies_of_range([tensor for _, tensor in part], num_bytes)
    return found


def _copies_of_range(tensors: Sequence[torch.Tensor], num_bytes: int) -> dict[int, torch.Tensor]:
    """Copies of tensors whose ranges overlap; none if they use the whole storage."""
    views = [_view(tensor) for tensor in tensors]
    unit = max(view[3] for view in views)
    start = min(_range(view)[0] for view in views) // unit * unit
    stop = max(_range(view)[1] for view in views)
    source = _bytes_of_storage(tensors[0])
    packed = _packed(views, start, stop)
    if packed is not None:
        is_used, places = packed
        units = source[start:stop].view(_unit_dtype(unit))
        memory = units[is_used.to(source.device)].view(torch.uint8)
    elif (start, stop) == (0, num_bytes):
        return {}
    else:
        memory = source[start:stop].clone()
        places = [(offset - start // size, shape, strides, size) for offset, shape, strides, size in views]
    return {id(tensor): _like(tensor, memory, place) for tensor, place in zip(tensors, places, strict=True)}


def _packed(views: Sequence[View], start: int, stop: int) -> tuple[torch.Tensor, list[View]] | None:
    """Places of views in memory that has the elements that any of them uses, one after the other, and no others.

    Args:
        views: views whose ranges overlap.
        start: first byte of their ranges.
        stop: end of their ranges.

    Returns:
        Which elements of the range are used, and the views in their own memory. None if all are, or if a view of the
        rest is no view any more.
    """
    distinct = set(views)
    size = views[0][3]
    if any(view[3] != size for view in distinct) or all(_is_dense(view) for view in distinct):
        return None
    first, count = start // size, (stop - start) // size
    is_used = torch.zeros(count, dtype=torch.bool, device="cpu")
    for offset, shape, strides, _ in distinct:
        is_used.as_strided(_without_repeats(shape, strides), strides, offset - first).fill_(True)  # noqa: FBT003
    if bool(is_used.all()):
        return None
    place_of = is_used.cumsum(0) - 1
    moved: dict[View, View] = {}
    for view in distinct:
        place = _place_in(place_of, view, first)
        if place is None:
            return None
        moved[view] = place
    return is_used, [moved[view] for view in views]


def _place_in(place_of: torch.Tensor, view: View, first: int) -> View | None:
    """A view in packed memory; None if its elements are at no regular distances there.

    Args:
        place_of: place in packed memory of each element of a range.
        view: view of elements that are used.
        first: first element of the range.
    """
    offset, shape, strides, size = view
    sizes, at = _without_repeats(shape, strides), offset - first
    begin = int(place_of[at])
    pairs = list(zip(sizes, strides, strict=True))
    steps = tuple(int(place_of[at + stride]) - begin if length > 1 else 0 for length, stride in pairs)
    expected = torch.full((), begin, dtype=torch.int64, device="cpu")
    for axis, (length, step) in enumerate(zip(sizes, steps, strict=True)):
        along = torch.arange(length, dtype=torch.int64, device="cpu") * step
        expected = expected + along.view((-1, *[1] * (len(sizes) - axis - 1)))
    is_regular = torch.equal(place_of.as_strided(sizes, strides, at), expected.expand(sizes))
    return (begin, shape, steps, size) if is_regular else None


def _view(tensor: torch.Tensor) -> View:
    offset = int(tensor.storage_offset()) if tensor.numel() else 0
    return offset, tuple(tensor.shape), tuple(tensor.stride()), tensor.element_size()


def _range(view: View) -> tuple[int, int]:
    """First byte and end of a view."""
    offset, shape, strides, size = view
    if 0 in shape:
        return 0, 0
    last = sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
    return offset * size, (offset + last + 1) * size


def _is_dense(view: View) -> bool:
    """True if a view uses every element of its range, in rows of memory, once."""
    _, shape, strides, _ = view
    expected = 1
    for stride, length in sorted((stride, length) for length, stride in zip(shape, strides, strict=True) if length > 1):
        if stride != expected:
            return False
        expected *= length
    return True


def _without_repeats(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Shape with one element along each axis of stride 0, along which all elements are the same."""
    return tuple(min(length, 1) if stride == 0 else length for length, stride in zip(shape, strides, strict=True))


def _unit_dtype(size: int) -> torch.dtype:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
    return kinds[size]


def _bytes_of_storage(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _like(tensor: torch.Tensor, memory: torch.Tensor, view: View) -> torch.Tensor:
    """A tensor in other memory, with the class and the attributes of another one."""
    offset, shape, strides, _ = view
    found = torch.empty(0, dtype=tensor.dtype, device=memory.device)
    found.set_(memory.untyped_storage(), offset, shape, strides)
    found = torch._neg_view(found) if tensor.is_neg() else found  # noqa: SLF001  there is no public one
    found = found.conj() if tensor.is_conj() else found
    if isinstance(tensor, torch.nn.Parameter):
        found = torch.nn.Parameter(found, requires_grad=tensor.requires_grad)
    else:
        found.requires_grad_(tensor.requires_grad)
    vars(found).update(vars(tensor))
    return found
