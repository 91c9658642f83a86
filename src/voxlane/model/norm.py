"""Instance norm with its activation as one module, on GPUs by one kernel."""

from __future__ import annotations

import functools
import logging
import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from voxlane.kernels import support

_log = logging.getLogger("voxlane")
_KINDS = (torch.bfloat16, torch.float16, torch.float32)


class InstanceNormAct(nn.InstanceNorm3d):
    """InstanceNorm3d and a leaky ReLU with the given slope below zero: 0 is a ReLU, 1 no activation.

    Parameters and their names are InstanceNorm3d's. On a GPU that our kernels run on the result is channels-last,
    whatever the input is; elsewhere, and with running statistics, it is what the two modules give.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        *,
        slope: float,
        affine: bool = True,
        track_running_stats: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            num_features,
            eps,
            affine=affine,
            track_running_stats=track_running_stats,
            device=device,
            dtype=dtype,
        )
        self.slope = slope

    def forward(self, x_BCDHW: Tensor, partials: Tensor | None = None, dead: Tensor | None = None) -> Tensor:  # noqa: N803
        """Normalised and activated. `partials`: what is known of the statistics, as kernels.norm.norm_act takes it.
        `dead`: the bias that a convolution left out (see layers.conv_norm_act)."""
        x = x_BCDHW
        if self.fast(x) and x.shape[1] == self.num_features and math.prod(x.shape[2:]) > 1:
            from voxlane.kernels.norm import norm_act

            return norm_act(x, self.weight, self.bias, self.eps, self.slope, partials, dead)
        if dead is not None:
            x = x + dead.to(x.dtype).view(-1, 1, 1, 1)
        x = super().forward(x)
        return functional.relu_(x) if self.slope == 0 else functional.leaky_relu_(x, self.slope)

    def fast(self, x: Tensor) -> bool:
        """Whether such an input takes the kernel."""
        return kernels_run(x) and x.dim() == 5 and x.numel() > 0 and not self.track_running_stats

    def extra_repr(self) -> str:
        """InstanceNorm3d's and the slope."""
        plain: str = super().extra_repr()  # type: ignore[no-untyped-call]
        return f"{plain}, slope={self.slope}"


def norm_and_act(norm: nn.Module, slope: float, *, fused: bool) -> list[nn.Module]:
    """Two modules that normalise and activate; `fused`: in one where that is possible, for the kernel's sake."""
    if fused and type(norm) is nn.InstanceNorm3d and not norm.track_running_stats:
        return [InstanceNormAct(norm.num_features, norm.eps, slope=slope, affine=norm.affine), nn.Identity()]
    return [norm, nn.ReLU(inplace=True) if slope == 0 else nn.LeakyReLU(slope, inplace=True)]


def kernels_run(x: Tensor) -> bool:
    """Whether our kernels take a tensor of this device and dtype; says so once, if a GPU is not one for them."""
    return x.is_cuda and x.dtype in _KINDS and _ready(x.device.index)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _ready(device_index: int) -> bool:
    return _told(device_index)


@functools.cache
def _told(device_index: int) -> bool:
    reason = support.why_not(device_index)
    if reason is not None:
        _log.warning(
            "cuda:%d: instance norm and loss take PyTorch's operations, with the same results, but slower: "
            "Voxlane's kernels cannot run there, %s",
            device_index,
            reason,
        )
    return reason is None
