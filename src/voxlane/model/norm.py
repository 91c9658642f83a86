"""Instance norm and activation as one module, computed by one kernel on GPUs."""

from __future__ import annotations

import functools
import logging
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from voxlane.model.kernels import support

_log = logging.getLogger("voxlane")
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class InstanceNormAct(nn.InstanceNorm3d):
    """InstanceNorm3d and a leaky ReLU with the given slope below zero: 0 is a ReLU, 1 no activation.

    Parameters and their names are those of InstanceNorm3d. On a GPU that our kernels support, the result is
    channels-last for any input; otherwise, and with running statistics, it is the result of the two modules.
    """

    def __init__(
        self, num_features: int, eps: float = 1e-5, *, slope: float, affine: bool = True, **others: Any
    ) -> None:
        super().__init__(num_features, eps, affine=affine, **others)
        self.slope = slope

    def forward(self, x_BCDHW: Tensor, partials: Tensor | None = None, omitted_bias: Tensor | None = None) -> Tensor:  # noqa: N803
        """Normalise and activate.

        partials: partial statistics, as in kernels.norm.norm_act.
        omitted_bias: bias that the preceding convolution omitted (see layers.conv_norm_act).
        """
        x = x_BCDHW
        if self.uses_kernel(x) and x.shape[1] == self.num_features and math.prod(x.shape[2:]) > 1:
            from voxlane.model.kernels.norm import norm_act

            return norm_act(x, self.weight, self.bias, self.eps, self.slope, partials, omitted_bias)
        if omitted_bias is not None:
            x = x + omitted_bias.to(x.dtype).view(-1, 1, 1, 1)
        x = super().forward(x)
        return functional.relu_(x) if self.slope == 0 else functional.leaky_relu_(x, self.slope)

    def uses_kernel(self, x: Tensor) -> bool:
        """Return whether the kernel is used for this input."""
        return can_use_kernels(x) and x.dim() == 5 and x.numel() > 0 and not self.track_running_stats

    def extra_repr(self) -> str:
        """Return InstanceNorm3d's text and the slope."""
        base_repr: str = super().extra_repr()  # type: ignore[no-untyped-call]
        return f"{base_repr}, slope={self.slope}"


def make_norm_and_act(norm: nn.Module, slope: float, *, fused: bool) -> list[nn.Module]:
    """Return modules that normalise and activate; if `fused`, in a single kernel where possible."""
    if fused and type(norm) is nn.InstanceNorm3d and not norm.track_running_stats:
        return [InstanceNormAct(norm.num_features, norm.eps, slope=slope, affine=norm.affine), nn.Identity()]
    return [norm, nn.ReLU(inplace=True) if slope == 0 else nn.LeakyReLU(slope, inplace=True)]


def can_use_kernels(x: Tensor) -> bool:
    """Return whether our kernels support this device and dtype; warn once about an unsupported GPU."""
    return x.is_cuda and x.dtype in _DTYPES and _is_device_supported(x.device.index)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_device_supported(device_index: int) -> bool:
    return _check_and_warn(device_index)


@functools.cache
def _check_and_warn(device_index: int) -> bool:
    reason = support.unsupported_reason(device_index)
    if reason is not None:
        _log.warning(
            "cuda:%d: instance norm and loss use PyTorch's operations, which give the same results but are slower, "
            "because Voxlane's kernels are not supported: %s",
            device_index,
            reason,
        )
    return reason is None
