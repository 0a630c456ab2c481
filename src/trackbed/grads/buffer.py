"""Buffers of parameters and gradients, cut into buckets. Names and attributes are Megatron Core 0.16.1's."""

import logging
import mmap
from collections.abc import Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import Any, Final

import torch

from trackbed.comm.shared_memory import SharedMemory
from trackbed.errors import GradientError
from trackbed.grads.config import ReductionOptions
from trackbed.grads.layout import Layout, ParameterSpec, plan_layout

_CPU: Final = torch.device("cpu")


class BufferMemory:
    """Zeros in memory that other ranks of the host can map, where the device is the CPU; otherwise a plain tensor.

    Args:
        numel: number of elements.
        dtype: type of the elements.
        device: device of the memory.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.shared: SharedMemory | None = None
        """The memory as other processes can map it; None for other devices, for no elements, and with a problem."""
        self.problem: str | None = None
        """Reason why the system refuses memory that processes can share; None if it has not."""
        if device.type == _CPU.type and numel > 0:
            num_bytes = numel * dtype.itemsize
            try:
                self.shared = SharedMemory.create(-(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)
            except OSError as error:  # a sandbox without memfd, for one
                self.problem = f"{type(error).__name__}: {error}"
        if self.shared is not None:
            self.tensor = torch.frombuffer(self.shared.mapping, dtype=dtype, count=numel)
        else:
            self.tensor = torch.zeros(numel, dtype=dtype, device=device)
        self._released_bytes = 0

    @property
    def is_released(self) -> bool:
        """True between `release` and `restore`."""
        return self._released_bytes > 0

    def release(self) -> None:
        """Gives the memory back to the system. Views stay valid, but must not be used before `restore`."""
        if self.is_released or self.tensor.numel() == 0:
            return
        self._released_bytes = self.tensor.untyped_storage().nbytes()
        if self.shared is not None:
            self.shared.release_pages()
        else:
            self.tensor.untyped_storage().resize_(0)

    def restore(self) -> None:
        """Takes the memory again; it holds zeros."""
        if not self.is_released:
            return
        if self.shared is None:
            self.tensor.untyped_storage().resize_(self._released_bytes)
            self.tensor.zero_()
        self._released_bytes = 0


logger = logging.getLogger(__name__)

Parameter = torch.nn.Parameter


class BufferType(Enum):
    """Kind of a buffer."""

    PARAM = 1
    GRAD = 2


def shard_buffer(buffer: torch.Tensor, data_parallel_world_size: int) -> list[torch.Tensor]:
    """Cuts a vector into equal views, one for each rank.

    Raises:
        GradientError: the number of elements is no multiple of the number of ranks.
    """
    count, rest = divmod(buffer.numel(), data_parallel_world_size)
    if rest:
        raise GradientError(
            f"buffer must have a multiple of {data_parallel_world_size} elements, but has {buffer.numel()}"
        )
    return [buffer[rank * count : (rank + 1) * count] for rank in range(data_parallel_world_size)]


class _ParamAndGradBucket:
    """Consecutive parameters of a buffer, whose gradients are communicated at once.

    Args:
        params: parameters, in the order of their position in the buffer.
        param_data: view of the bucket's part of the buffer of parameters; None if parameters lie elsewhere.
        grad_data: view of the bucket's part of the buffer of gradients.
        offset: first element of the bucket in the buffer.
        numel_unpadded: number of elements without the padding at the end.
        gradient_scaling_factor: factor for the gradients before they are reduced.
        bucket_id: number of the bucket in the buffer.
        names: name of each parameter, for messages.

    Raises:
        GradientError: a parameter is there twice.
    """

    def __init__(
        self,
        params: Sequence[Parameter],
        param_data: torch.Tensor | None,
        grad_data: torch.Tensor,
        offset: int,
        numel_unpadded: int,
        gradient_scaling_factor: float,
        bucket_id: int,
        names: Mapping[Parameter, str] = MappingProxyType({}),
    ) -> None:
        self.params_list = list(params)
        self.params = set(params)
        if len(self.params) != len(self.params_list):
            raise GradientError(f"bucket {bucket_id}: each parameter must be there once, but one is there twice")
        self.param_data = param_data
        self.grad_data = grad_data
        self.offset = offset
        self.numel_unpadded = numel_unpadded
        self.gradient_scaling_factor = gradient_scaling_factor
        self.bucket_id = bucket_id
        self.names = names
        self.param_to_index: dict[Parameter, tuple[int, int]] = {}
        start = 0
        for param in params:
            self.param_to_index[param] = (start, start + param.numel())
            start += param.numel()


class _ParamAndGradBuffer:
    """Gradients, and where the optimizer is sharded parameters, of one type in one piece of memory.

    Constructing it does not communicate. `main_grad` of each parameter becomes a view of the buffer; where the
    optimizer is sharded, so does its data.

    Args:
        ddp_config: options.
        param_dtype: type of the parameters; uint8 for those of 8 bits.
        grad_dtype: type of the gradients.
        params: parameters in order of definition, at least one.
        data_parallel_group: object with `size()` and `rank()`.
        bucket_size: number of elements from which a bucket is closed; None for one bucket.
        param_to_name: name of each parameter.
        gradient_scaling_factor: factor for the gradients before they are reduced.
        param_indices: number of each parameter among those of its type in the model.
        nccl_ub: must be False: memory is not registered with NCCL.
        pg_collection: object with the process groups `tp` and `dp_cp`.

    Raises:
        GradientError: a parameter is there twice, or `nccl_ub` is True.
    """

    def __init__(
        self,
        ddp_config: ReductionOptions,
        param_dtype: torch.dtype,
        grad_dtype: torch.dtype,
        params: Sequence[Parameter],
        data_parallel_group: Any,
        bucket_size: int | None,
        param_to_name: Mapping[Parameter, str],
        gradient_scaling_factor: float,
        param_indices: Sequence[int],
        nccl_ub: bool,
        pg_collection: Any = None,
    ) -> None:
        self.tp_group = None if pg_collection is None else pg_collection.tp
        self.dp_cp_group = data_parallel_group if pg_collection is None else pg_collection.dp_cp
        self.ddp_config = ddp_config
        self.params = params
        self.param_indices = param_indices
        self.param_to_name = param_to_name
        self.param_dtype = param_dtype
        self.grad_dtype = grad_dtype
        self.data_parallel_group = data_parallel_group
        self.data_parallel_world_size = data_parallel_group.size()
        self.gradient_scaling_factor = gradient_scaling_factor
        self.nccl_ub = nccl_ub
        if nccl_ub:
            raise GradientError(
                "nccl_ub: must be False, as buffers are not registered with NCCL, but is True: leave it out"
            )
        if len(set(params)) != len(params):
            raise GradientError("params: each parameter must be there once, but one is there twice")
        self.layout = _layout_of(
            params, param_to_name, ddp_config, num_ranks=self.data_parallel_world_size, bucket_size=bucket_size
        )
        self.bucket_indices = list(
            zip(self.layout.bucket_starts.tolist(), self.layout.bucket_stops.tolist(), strict=True)
        )
        places = zip(self.layout.starts.tolist(), self.layout.stops.tolist(), self.layout.buckets.tolist(), strict=True)
        in_order = list(zip(params, places, strict=True))[::-1]
        self.param_index_map: dict[Parameter, tuple[int, int, int]] = dict(in_order)
        self.numel = self.layout.numel
        self.numel_unpadded = self.layout.numel_unpadded
        device = params[0].device
        self._grad_memory = BufferMemory(self.numel, grad_dtype, device)
        self.grad_data = self._grad_memory.tensor
        self._param_memory: BufferMemory | None = None
        self.param_data: torch.Tensor | None = None
        if ddp_config.use_distributed_optimizer:
            self._param_memory = BufferMemory(self.numel, param_dtype, device)
            self.param_data = self._param_memory.tensor
        self.param_data_cpu: torch.Tensor | None = None
        if self.param_data is not None:
            for param, (start, _, _) in self.param_index_map.items():
                _move(param, self.param_data, start)
        first = 0 if self.param_data is None else self.param_data.data_ptr()
        self._offsets = [param.data_ptr() - first for param in params]
        """Bytes from the start of the parameters, which the CPU may have in the meantime, to each of them."""
        self.param_to_bucket: dict[Parameter, _ParamAndGradBucket] = {}
        self.buckets = self._cut_buckets()
        logger.info("buckets of %s parameters and %s gradients:\n%s", param_dtype, grad_dtype, self.layout)

    @property
    def memories(self) -> list[BufferMemory]:
        """Memory of the gradients, and of the parameters if they lie in the buffer."""
        return [self._grad_memory, *([] if self._param_memory is None else [self._param_memory])]

    def first_moved(self) -> str | None:
        """Name of the first parameter whose data does not lie as it lay at first; None if there is none."""
        first = 0 if self.param_data is None else self.param_data.data_ptr()
        for param, offset in zip(self.params, self._offsets, strict=True):
            shape = param.main_grad.shape  # type: ignore[attr-defined]
            if quantized_data(param) is not None or shape.numel() == 0:
                continue
            is_turned = self.param_data is not None and not param.is_contiguous()
            if param.data_ptr() != first + offset or param.shape != shape or is_turned:
                return self.param_to_name[param]
        return None

    def scale_gradients(self, scaling_factor: float) -> None:
        """Multiplies all gradients by a factor."""
        self.grad_data *= scaling_factor

    def reset(self) -> None:
        """Sets all gradients to zero."""
        self.grad_data.zero_()

    def offload_to_cpu(
        self,
        move_params: bool = True,
        move_grads: bool = True,
    ) -> None:
        """Frees the memory of the device: parameters are kept on the CPU, gradients are lost.

        Views stay valid, but must not be used before `reload_from_cpu`. Parameters on the CPU stay where they are.
        """
        if move_grads:
            self._grad_memory.release()
        memory = self._param_memory
        if move_params and memory is not None and memory.shared is None and not memory.is_released:
            if self.param_data_cpu is None:
                is_cuda = memory.tensor.device.type == "cuda"
                self.param_data_cpu = torch.empty_like(memory.tensor, device="cpu", pin_memory=is_cuda)
            self.param_data_cpu.copy_(memory.tensor)
            memory.release()

    def reload_from_cpu(
        self,
        move_params: bool = True,
        move_grads: bool = True,
    ) -> None:
        """Undoes `offload_to_cpu`. Gradients are zero then."""
        memory = self._param_memory
        if move_params and memory is not None and memory.is_released and self.param_data_cpu is not None:
            memory.restore()
            memory.tensor.copy_(self.param_data_cpu, non_blocking=True)
        if move_grads:
            self._grad_memory.restore()

    def _get(self, shape: torch.Size, start_index: int, buffer_type: BufferType) -> torch.Tensor:
        """View of the elements from `start_index` on, in a shape."""
        if not isinstance(buffer_type, BufferType):
            raise GradientError(f"buffer_type: must be BufferType.PARAM or BufferType.GRAD, found {buffer_type!r}")
        data = self.param_data if buffer_type is BufferType.PARAM else self.grad_data
        stop = start_index + shape.numel()
        if data is None or stop > self.numel:
            numel = 0 if data is None else self.numel
            raise GradientError(f"buffer must have the elements [{start_index}, {stop}), but ends at {numel}")
        return data[start_index:stop].view(shape)

    def _cut_buckets(self) -> list[_ParamAndGradBucket]:
        members: list[list[Parameter]] = [[] for _ in self.bucket_indices]
        for param, (_, _, bucket) in self.param_index_map.items():
            members[bucket].append(param)
        return [
            self._new_bucket(params, start, stop, numel_unpadded, bucket_id)
            for bucket_id, (params, (start, stop), numel_unpadded) in enumerate(
                zip(members, self.bucket_indices, self.layout.bucket_numel_unpadded.tolist(), strict=True)
            )
        ]

    def _new_bucket(
        self, bucket_params: list[Parameter], start_index: int, end_index: int, numel_unpadded: int, bucket_id: int
    ) -> _ParamAndGradBucket:
        shape = torch.Size([end_index - start_index])
        # `data` is a view whose changes torch counts apart from those of other buckets.
        grad_data = self._get(shape, start_index, BufferType.GRAD).data
        for param in bucket_params:
            start = self.param_index_map[param][0] - start_index
            param.main_grad = grad_data[start : start + param.nelement()].view(param.shape)  # type: ignore[attr-defined]
        bucket = _ParamAndGradBucket(
            params=bucket_params,
            param_data=None if self.param_data is None else self._get(shape, start_index, BufferType.PARAM),
            grad_data=grad_data,
            offset=start_index,
            numel_unpadded=numel_unpadded,
            gradient_scaling_factor=self.gradient_scaling_factor,
            bucket_id=bucket_id,
            names=self.param_to_name,
        )
        self.param_to_bucket.update(dict.fromkeys(bucket_params, bucket))
        return bucket


def _layout_of(
    params: Sequence[Parameter],
    names: Mapping[Parameter, str],
    config: ReductionOptions,
    *,
    num_ranks: int,
    bucket_size: int | None,
) -> Layout:
    specs = [
        ParameterSpec(names[param], param.data.nelement(), bool(getattr(param, "shared_embedding", False)))
        for param in params
    ]
    return plan_layout(
        specs,
        data_parallel_size=num_ranks,
        bucket_size=bucket_size,
        sharded=config.use_distributed_optimizer,
        pad_for_high_bandwidth=config.pad_buckets_for_high_nccl_busbw,
    )


def _move(param: Parameter, data: torch.Tensor, start: int) -> None:
    """Moves the data of a parameter into the buffer; of one with 8 bits, the bytes that it holds."""
    old = quantized_data(param)
    old = param.data if old is None else old
    new = data[start : start + old.numel()].view(old.shape)
    new.copy_(old)
    if quantized_data(param) is None:
        param.data = new
    else:
        param._data = new  # type: ignore[attr-defined]  # noqa: SLF001  where Transformer Engine keeps the bytes


def quantized_data(param: torch.Tensor) -> torch.Tensor | None:
    """Bytes of a parameter of 8 bits, as Transformer Engine keeps them; None for any other parameter."""
    data = getattr(param, "_data", None)
    return data if isinstance(data, torch.Tensor) and data.dtype == torch.uint8 else None


# Fused kernels pair the elements of two tensors as they lie in memory, not by index: a gradient or a state must lie as
# its parameter does.


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
