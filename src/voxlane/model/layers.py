"""What a U-Net is made of: convolutions with their norm and activation, the way up and the head. PyTorch's modules,
with their parameters and names, that take our kernels where those run and are faster."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from voxlane.kernels import conv as few
from voxlane.kernels import stem
from voxlane.model.norm import InstanceNormAct, kernels_run

_log = logging.getLogger("voxlane")
_SHORT = (torch.bfloat16, torch.float16)
_LEAST_SIDE = 8
"""Smaller volumes are not worth a kernel for large ones."""


class Stage(nn.Sequential):
    """Convolution, norm and activation, repeated. An InstanceNormAct has an Identity for its activation, so that names
    in a state dict are those of the three modules."""

    def forward(self, *parts_BCDHW: Tensor) -> Tensor:  # noqa: N803
        """All of them in turn, of the parts' channels together."""
        parts = parts_BCDHW
        for conv, norm, act in self._threes():
            parts = (act(conv_norm_act(conv, norm, *parts)),)
        return parts[0]

    def _threes(self) -> Iterator[tuple[nn.Module, nn.Module, nn.Module]]:
        each = list(self)
        return zip(each[::3], each[1::3], each[2::3], strict=True)


class Rise(nn.ConvTranspose3d):
    """A transposed convolution whose windows do not overlap."""

    def __init__(self, channels: int, outputs: int, stride: tuple[int, int, int] | int, *, fused: bool = True) -> None:
        super().__init__(channels, outputs, stride, stride)
        self.fused = fused

    def forward(self, x_BCDHW: Tensor, *arguments: Any) -> Tensor:  # noqa: N803
        """The volume, larger by the stride."""
        x = x_BCDHW
        if self.fused and not arguments and kernels_run(x) and _fit(self, x) and working_dtype(x) in _SHORT:
            from voxlane.kernels.rise import rise

            assert self.bias is not None
            return rise(x.to(working_dtype(x)), self.weight, self.bias)
        return super().forward(x, *arguments)


class Head(nn.Conv3d):
    """A 1 x 1 x 1 convolution that makes logits."""

    def __init__(self, channels: int, outputs: int, *, fused: bool = True) -> None:
        super().__init__(channels, outputs, 1)
        self.fused = fused

    def forward(self, x_BCDHW: Tensor) -> Tensor:  # noqa: N803
        """Logits; from the kernel with each output's voxels contiguous."""
        x = x_BCDHW
        if self.fused and kernels_run(x) and _fit(self, x) and working_dtype(x) in _SHORT:
            from voxlane.kernels import head

            assert self.bias is not None
            if self.in_channels in head.CHANNELS and self.out_channels <= head.MAX_OUTPUTS:
                return head.head(x.to(working_dtype(x)), self.weight, self.bias)
        return super().forward(x)


def conv_norm_act(conv: nn.Module, norm: nn.Module, *parts: Tensor) -> Tensor:
    """norm(conv(cat(parts))). Where our kernels run the convolution leaves its bias out, which the norm's mean takes
    away anyhow; the bias then has the gradient that it has, zero, for distributed training waits for one."""
    if (
        not isinstance(norm, InstanceNormAct)
        or type(conv) is not nn.Conv3d  # another class may compute something else
        or not norm.fast(parts[0])
        or not _fit(conv, *parts)
        or conv._forward_hooks
        or conv._forward_pre_hooks  # those want to see the module called
    ):
        plain: Tensor = norm(conv(torch.cat(parts, 1) if len(parts) > 1 else parts[0]))
        return plain
    convolved, partials = _convolve(conv, *parts)
    made: Tensor = norm(convolved, partials, conv.bias)
    return made


def _convolve(conv: nn.Conv3d, *parts: Tensor) -> tuple[Tensor, Tensor | None]:
    """Without the bias; and the output's partial statistics, if they came with it."""
    dtype, device = working_dtype(parts[0]), parts[0].device.index
    if _is_near(conv) and dtype in _SHORT and min(parts[0].shape[2:]) >= _LEAST_SIDE:
        if (
            conv.in_channels <= stem.MAX_CHANNELS
            and conv.out_channels == stem.OUTPUTS
            and not parts[0].requires_grad
            and _compiled(stem, device, dtype, conv.in_channels)
        ):
            return stem.stem(joined(*parts), conv.weight, dtype)
        if (
            len(parts) <= 2
            and all(part.shape[1] == few.CHANNELS for part in parts)
            and conv.out_channels == few.CHANNELS
            and _compiled(few, device, dtype)
        ):
            first, *rest = (part.to(dtype) for part in parts)
            return few.conv(first, rest[0] if rest else None, conv.weight)
    return conv._conv_forward(joined(*parts), conv.weight, None), None


def _fit(module: nn.Conv3d | nn.ConvTranspose3d, *parts: Tensor) -> bool:
    """Whether kernels may read the parts: volumes of one size that together have the module's channels. They look at
    no shape themselves; what does not fit is left to PyTorch to refuse, in its words."""
    first = parts[0]
    one_size = all(
        part.dim() == 5
        and part.device == first.device
        and (part.shape[0], *part.shape[2:]) == (first.shape[0], *first.shape[2:])
        for part in parts
    )
    return one_size and first.numel() > 0 and sum(part.shape[1] for part in parts) == module.in_channels


def _is_near(conv: nn.Conv3d) -> bool:
    """Whether a convolution takes the 27 voxels around each."""
    once = conv.stride == conv.padding == conv.dilation == (1, 1, 1) and conv.groups == 1
    return once and conv.kernel_size == (3, 3, 3) and conv.padding_mode == "zeros"


def joined(*parts: Tensor) -> Tensor:
    """The channels of all parts."""
    if len(parts) == 2 and all(kernels_run(part) for part in parts) and parts[0].dtype == parts[1].dtype:
        from voxlane.kernels.rise import join

        return join(*parts)
    return torch.cat(parts, 1) if len(parts) > 1 else parts[0]


def working_dtype(x: Tensor) -> torch.dtype:
    """What a convolution of `x` computes in."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _compiled(kernel: ModuleType, device_index: int, *kind: Any) -> bool:
    """Whether a convolution of ours runs on a GPU."""
    return _told(kernel, device_index, *kind)


@functools.cache
def _told(kernel: ModuleType, device_index: int, *kind: Any) -> bool:
    reason: str | None = kernel.why_not(device_index, *kind)
    if reason is not None:
        _log.info("cuda:%d: convolutions are cuDNN's: of ours, %s", device_index, reason)
    return reason is None
