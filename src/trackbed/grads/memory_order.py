"""Order in which the elements of a tensor lie in memory: fused kernels pair tensors as they lie, not by index."""

import torch

__all__ = ["arranged_like", "dims_in_memory", "fills_memory", "turned_like"]


def dims_in_memory(tensor: torch.Tensor) -> list[int]:
    """Dimensions of a tensor with more than one element each, from the one with the largest stride on.

    >>> dims_in_memory(torch.empty(4, 3, 2, 2, 1).transpose(0, 3))
    [3, 1, 2, 0]
    """
    strides = tensor.stride()
    dims = [dim for dim, size in enumerate(tensor.shape) if size != 1]
    return sorted(dims, key=lambda dim: (-strides[dim], dim))


def fills_memory(tensor: torch.Tensor) -> bool:
    """True if the elements of a tensor lie without gaps and overlaps, in any order of its dimensions."""
    if tensor.is_contiguous():
        return True
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim))
    return tensor.permute(order).is_contiguous()


def turned_like(param: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
    """Views a contiguous vector in the shape of a tensor, with the tensor's strides if it fills its memory.

    Args:
        param: tensor, of any strides.
        vector: `[param.numel()]` vector.
    """
    if fills_memory(param):
        return vector.as_strided(param.shape, param.stride())
    return vector.view(param.shape)


def arranged_like(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Returns a tensor with the strides of another one of its shape: itself, or a copy where they differ.

    A tensor that does not fill its memory is followed by none.
    """
    if tensor.stride() == like.stride() or not fills_memory(like):
        return tensor
    return torch.empty_strided(like.shape, like.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)
