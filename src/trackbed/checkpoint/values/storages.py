"""Memory of plain tensors as it is written: the elements that are used, and not the storages that they lie in.

`torch.save` writes whole storages, of which a parameter of a sharded model, or a slice, is a small part. Tensors that
share memory still share it when they are loaded. Offsets, sizes and strides are in bytes where they are not a tensor's.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from math import prod
from typing import Any, Final

import torch

_DEVICES: Final = ("cpu", "cuda")

View = tuple[int, tuple[int, ...], tuple[int, ...], int]
"""Offset, shape and strides of a tensor in elements, and the size of an element."""
Key = tuple[int, View]
"""Identity of a storage, and a view of it."""
Copies = Mapping[Key, tuple[torch.Tensor, View]]
"""Memory of each view that has memory of its own, and the view of that."""


def has_plain_storage(tensor: torch.Tensor) -> bool:
    """True for a tensor that is a view of one storage, or has no values; its pickle has no tensors in it."""
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested


def own_memory(tensors: Iterable[torch.Tensor], storages: Iterable[Any]) -> Copies:
    """Copies the elements of tensors that use only a part of their storages.

    Args:
        tensors: tensors for which `has_plain_storage` is true, which must live as long as the result is used.
        storages: storages that are written whole.

    Returns:
        Memory of views of storages that are not used as a whole, with the same values, and shared where they are.
    """
    whole = {getattr(storage, "_untyped_storage", storage)._cdata for storage in storages}
    groups: dict[int, dict[View, torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.device.type in _DEVICES:
            storage, view = _key(tensor)
            if storage not in whole:
                groups.setdefault(storage, {})[view] = tensor
    copies: dict[Key, tuple[torch.Tensor, View]] = {}
    for storage, group in groups.items():
        copies |= {(storage, view): copy for view, copy in _copies(list(group), next(iter(group.values()))).items()}
    return copies


def copy_of(tensor: torch.Tensor, copies: Copies) -> torch.Tensor | None:
    """A tensor with the class, the values and the attributes of another one; None if that uses all of its storage."""
    if not copies or not has_plain_storage(tensor) or tensor.device.type not in _DEVICES:
        return None
    found = copies.get(_key(tensor))
    return None if found is None else _like(tensor, *found)


def _copies(views: Sequence[View], example: torch.Tensor) -> dict[View, tuple[torch.Tensor, View]]:
    """Memory of the views of one storage, which a tensor has."""
    num_bytes = example.untyped_storage().nbytes()
    if any(_is_row_major(view) and _num_bytes(view) == num_bytes for view in views):
        return {}
    copies: dict[View, tuple[torch.Tensor, View]] = {}
    # Views whose ranges of bytes do not overlap share nothing.
    ordered = sorted(views, key=_range)
    end, numbers = 0, list[int]()
    for view in ordered:
        start, stop = _range(view)
        numbers.append(numbers[-1] + (start >= end) if numbers else 0)
        end = max(end, stop)
    for _, part in groupby(zip(numbers, ordered, strict=True), key=lambda pair: pair[0]):
        copies |= _copies_of_range([view for _, view in part], example, num_bytes)
    return copies


def _copies_of_range(
    views: Sequence[View], example: torch.Tensor, num_bytes: int
) -> dict[View, tuple[torch.Tensor, View]]:
    """Memory of views whose ranges overlap; none if they use the whole storage."""
    unit = max(view[3] for view in views)
    start = min(_range(view)[0] for view in views) // unit * unit
    stop = max(_range(view)[1] for view in views)
    source = _bytes_of_storage(example)
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
    return {view: (memory, place) for view, place in zip(views, places, strict=True)}


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
    size = views[0][3]
    if any(view[3] != size for view in views) or all(_is_dense(view) for view in views):
        return None
    first, count = start // size, (stop - start) // size
    is_used = torch.zeros(count, dtype=torch.bool, device="cpu")
    for offset, shape, strides, _ in views:
        is_used.as_strided(_without_repeats(shape, strides), strides, offset - first).fill_(True)  # noqa: FBT003
    if bool(is_used.all()):
        return None
    place_of = is_used.cumsum(0) - 1
    places = []
    for view in views:
        place = _place_in(place_of, view, first)
        if place is None:
            return None
        places.append(place)
    return is_used, places


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


def _key(tensor: torch.Tensor) -> Key:
    offset = int(tensor.storage_offset()) if tensor.numel() else 0
    view = offset, tuple(tensor.shape), tuple(tensor.stride()), tensor.element_size()
    return tensor.untyped_storage()._cdata, view


def _num_bytes(view: View) -> int:
    return prod(view[1]) * view[3]


def _is_row_major(view: View) -> bool:
    """True if the elements lie one after the other, in order."""
    _, shape, strides, _ = view
    expected = 1
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length > 1 and stride != expected:
            return False
        expected *= length
    return True


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
    copy = torch.empty(0, dtype=tensor.dtype, device=memory.device)
    copy.set_(memory.untyped_storage(), offset, shape, strides)
    copy = torch._neg_view(copy) if tensor.is_neg() else copy
    copy = copy.conj() if tensor.is_conj() else copy
    if isinstance(tensor, torch.nn.Parameter):
        copy = torch.nn.Parameter(copy, requires_grad=tensor.requires_grad)
    else:
        copy.requires_grad_(tensor.requires_grad)
    vars(copy).update(vars(tensor))
    return copy
