"""Whether this package's kernels run on a device, and if not, why."""

from __future__ import annotations

import functools
import importlib.util

import torch

CAPABILITY = (8, 0)
"""The oldest compute capability that the kernels are for: bfloat16's first."""


def usable(x: torch.Tensor) -> bool:
    """Whether the kernels run on the tensor's device."""
    return x.is_cuda and why_not(x.device.index) is None


@functools.cache
def why_not(device_index: int) -> str | None:
    """What keeps the kernels from running on a GPU, in a clause; None: nothing."""
    if torch.version.hip is not None:
        return "they are for NVIDIA's GPUs"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install triton)"
    capability = torch.cuda.get_device_capability(device_index)
    if capability < CAPABILITY:
        had, needed = (".".join(map(str, version)) for version in (capability, CAPABILITY))
        return f"{torch.cuda.get_device_name(device_index)} has compute capability {had}, they need {needed}"
    return None
