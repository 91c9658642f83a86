"""Whether this package's kernels run on a device, and if not, why."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

CAPABILITY = (8, 0)
"""The oldest compute capability that the kernels are for: bfloat16's first."""


def usable(x: Tensor) -> bool:
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


def launched_there(operation: Callable[P, R]) -> Callable[P, R]:
    """An operation that launches on the GPU of its first argument, a tensor: Triton takes the current one, wherever the
    tensors are.

    torch.library.custom_op looks up what the operation's annotations name in this module: `Tensor` must be in it.
    """

    @functools.wraps(operation)
    def launched(*arguments: P.args, **named: P.kwargs) -> R:
        with torch.cuda.device_of(arguments[0]):  # type: ignore[no-untyped-call]
            return operation(*arguments, **named)

    return launched
