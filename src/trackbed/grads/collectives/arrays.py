"""NumPy views of torch tensors, for kernels."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

SUMMABLE = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""Types that the kernels can add."""


def array_of(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Views a tensor on the CPU as an array; bfloat16, which NumPy lacks, as uint16."""
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return tensor.numpy()
