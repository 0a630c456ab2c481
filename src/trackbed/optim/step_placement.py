"""Device of the number of steps in the state of an optimizer."""

import torch

__all__ = ["place_steps"]


def place_steps(optimizer: torch.optim.Optimizer) -> None:
    """Moves each `step` of a state that was loaded to where torch's optimizers make it.

    It lies on the device of the parameter, in float32, if the parameter group is fused or capturable: their kernels
    read it there. Otherwise it lies on the CPU, as reading it elsewhere would wait for the device in every step.
    """
    for group in optimizer.param_groups:
        is_read_by_kernels = bool(group.get("fused") or group.get("capturable"))
        for param in group["params"]:
            state = optimizer.state.get(param, {})
            step = state.get("step")
            if not isinstance(step, torch.Tensor):
                continue
            if is_read_by_kernels:
                state["step"] = step.to(param.device, torch.float32)
            elif step.device.type != "cpu":
                state["step"] = step.cpu()
