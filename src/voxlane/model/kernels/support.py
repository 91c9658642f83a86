"""Detection of devices that support this package's kernels."""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

_log = logging.getLogger("voxlane")
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

P = ParamSpec("P")
R = TypeVar("R", covariant=True)

CAPABILITY = (8, 0)
"""Oldest supported compute capability, the first with bfloat16."""


def is_supported(x: Tensor) -> bool:
    """Return whether the tensor's device supports the kernels."""
    return x.is_cuda and unsupported_reason(x.device.index) is None


@functools.cache
def unsupported_reason(device_index: int) -> str | None:
    """Return None if a GPU supports the kernels, else the reason."""
    if torch.version.hip is not None:
        return "they need an NVIDIA GPU"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install triton)"
    capability = torch.cuda.get_device_capability(device_index)
    if capability < CAPABILITY:
        actual, needed = (".".join(map(str, version)) for version in (capability, CAPABILITY))
        return f"{torch.cuda.get_device_name(device_index)} has compute capability {actual}, they need {needed}"
    return None


def can_use_kernels(x: Tensor) -> bool:
    """Return whether our kernels support this device and dtype; warn once about an unsupported GPU."""
    return x.is_cuda and x.dtype in _DTYPES and _is_device_supported(x.device.index)


@torch.compiler.assume_constant_result
def _is_device_supported(device_index: int) -> bool:
    return _check_and_warn(device_index)


@functools.cache
def _check_and_warn(device_index: int) -> bool:
    reason = unsupported_reason(device_index)
    if reason is not None:
        _log.warning(
            "cuda:%d: instance norm and loss use PyTorch's operations, which give the same results but are slower, "
            "because Voxlane's kernels are not supported: %s",
            device_index,
            reason,
        )
    return reason is None


def save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Save all inputs, which are tensors or None, for an operator's gradient; unused outputs get the gradient None."""
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs)


class Operator(Protocol[P, R]):
    """The parts of `torch.library.CustomOpDef` that are used here, with the operation's own signature."""

    def __call__(self, *arguments: P.args, **named: P.kwargs) -> R:
        """Run the operation."""

    def register_autograd(self, backward: Callable[..., Any], *, setup_context: Callable[..., None]) -> None:
        """Set the gradient."""


def operator(
    name: str, fake: Callable[..., Any], device_types: str | None = None
) -> Callable[[Callable[P, R]], Operator[P, R]]:
    """Register a function as a torch operator that launches on the GPU of its first argument, a tensor; Triton would
    use the current GPU. `fake` takes the same arguments and only allocates the results, for `torch.compile`.

    torch.library.custom_op looks up the names in the operation's annotations in this module, so it must have `Tensor`.
    """

    def register(operation: Callable[P, R]) -> Operator[P, R]:
        @functools.wraps(operation)
        def launched(*arguments: P.args, **named: P.kwargs) -> R:
            with torch.cuda.device_of(arguments[0]):  # type: ignore[no-untyped-call]
                return operation(*arguments, **named)

        registered = torch.library.custom_op(name, launched, mutates_args=(), device_types=device_types)
        registered.register_fake(fake)
        return registered

    return register
