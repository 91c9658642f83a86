"""Layers of a U-Net: convolutions with norm and activation, upsampling and the final convolution.

They are PyTorch's modules, with the same parameters and names, and use our kernels where those are supported and
faster.
"""

from __future__ import annotations

import functools
import logging
import math
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from voxlane.model.kernels import conv as conv_kernels
from voxlane.model.kernels import stem
from voxlane.model.kernels.support import can_use_kernels

_log = logging.getLogger("voxlane")
_HALF_DTYPES = (torch.bfloat16, torch.float16)
_MIN_SIDE = 8
"""Shortest side for which the kernels for large volumes are used."""


class ConvStage(nn.Sequential):
    """Repeated convolution, norm and activation. An InstanceNormAct is followed by an Identity in place of its
    activation, so that names in a state dict are those of three modules."""

    def forward(self, *parts_BCDHW: Tensor) -> Tensor:  # noqa: N803
        """Apply all modules in turn to the concatenated channels of the parts."""
        parts, modules = parts_BCDHW, list(self)
        for conv, norm, act in zip(modules[::3], modules[1::3], modules[2::3], strict=True):
            parts = (act(conv_norm_act(conv, norm, *parts)),)
        return parts[0]


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
        omitted_bias: bias that the preceding convolution omitted (see conv_norm_act).
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


class UpConv(nn.ConvTranspose3d):
    """A transposed convolution whose windows do not overlap."""

    def __init__(self, channels: int, outputs: int, stride: tuple[int, int, int] | int, *, fused: bool = True) -> None:
        super().__init__(channels, outputs, stride, stride)
        self.fused = fused

    def forward(self, x_BCDHW: Tensor, *arguments: Any) -> Tensor:  # noqa: N803
        """Upsample the volume by the stride."""
        x = x_BCDHW
        if not arguments and _can_fuse(self, x):
            from voxlane.model.kernels.upconv import upconv

            assert self.bias is not None
            return upconv(x.to(working_dtype(x)), self.weight, self.bias)
        return super().forward(x, *arguments)


class FinalConv(nn.Conv3d):
    """A 1 x 1 x 1 convolution that computes logits."""

    def __init__(self, channels: int, outputs: int, *, fused: bool = True) -> None:
        super().__init__(channels, outputs, 1)
        self.fused = fused

    def forward(self, x_BCDHW: Tensor) -> Tensor:  # noqa: N803
        """Return logits; the kernel stores each output's voxels contiguously."""
        x = x_BCDHW
        if _can_fuse(self, x):
            from voxlane.model.kernels import final_conv

            assert self.bias is not None
            if self.in_channels in final_conv.CHANNELS and self.out_channels <= final_conv.MAX_OUTPUTS:
                return final_conv.final_conv(x.to(working_dtype(x)), self.weight, self.bias)
        return super().forward(x)


def _can_fuse(module: UpConv | FinalConv, x: Tensor) -> bool:
    """Return whether a module's kernel, which computes in 16 bits, may be used for this input."""
    return module.fused and can_use_kernels(x) and _inputs_match(module, x) and working_dtype(x) in _HALF_DTYPES


def conv_norm_act(conv: nn.Module, norm: nn.Module, *parts: Tensor) -> Tensor:
    """Compute norm(conv(cat(parts))).

    With our kernels the convolution omits its bias, because the norm subtracts the mean anyway. The bias still gets its
    gradient, zero, because distributed training waits for one.
    """
    if (
        not isinstance(norm, InstanceNormAct)
        or type(conv) is not nn.Conv3d  # another class may compute something else
        or not norm.uses_kernel(parts[0])
        or not _inputs_match(conv, *parts)
        or conv._forward_hooks
        or conv._forward_pre_hooks  # hooks must see the module being called
    ):
        unfused: Tensor = norm(conv(torch.cat(parts, 1) if len(parts) > 1 else parts[0]))
        return unfused
    convolved, partials = _convolve(conv, *parts)
    result: Tensor = norm(convolved, partials, conv.bias)
    return result


def _convolve(conv: nn.Conv3d, *parts: Tensor) -> tuple[Tensor, Tensor | None]:
    """Convolve without the bias; also return partial statistics of the output if the kernel computed them."""
    dtype, device = working_dtype(parts[0]), parts[0].device.index
    if _is_plain_3x3x3(conv) and dtype in _HALF_DTYPES and min(parts[0].shape[2:]) >= _MIN_SIDE:
        if (
            conv.in_channels <= stem.MAX_CHANNELS
            and conv.out_channels == stem.OUTPUTS
            and not parts[0].requires_grad
            and _can_compile(stem, device, dtype, conv.in_channels)
        ):
            return stem.stem(join_channels(*parts), conv.weight, dtype)
        if (
            len(parts) <= 2
            and all(part.shape[1] == conv_kernels.CHANNELS for part in parts)
            and conv.out_channels == conv_kernels.CHANNELS
            and _can_compile(conv_kernels, device, dtype)
        ):
            first, *rest = (part.to(dtype) for part in parts)
            return conv_kernels.conv(first, rest[0] if rest else None, conv.weight)
    return conv._conv_forward(join_channels(*parts), conv.weight, None), None


def _inputs_match(module: nn.Conv3d | nn.ConvTranspose3d, *parts: Tensor) -> bool:
    """Return whether kernels may read the parts: volumes of one size with the module's channels in total.

    Kernels do not check shapes themselves; PyTorch reports an error for other inputs.
    """
    first = parts[0]
    same_size = all(
        part.dim() == 5
        and part.device == first.device
        and (part.shape[0], *part.shape[2:]) == (first.shape[0], *first.shape[2:])
        for part in parts
    )
    return same_size and first.numel() > 0 and sum(part.shape[1] for part in parts) == module.in_channels


def _is_plain_3x3x3(conv: nn.Conv3d) -> bool:
    """Return whether a convolution has a 3 x 3 x 3 kernel, stride 1 and zero padding of 1."""
    once = conv.stride == conv.padding == conv.dilation == (1, 1, 1) and conv.groups == 1
    return once and conv.kernel_size == (3, 3, 3) and conv.padding_mode == "zeros"


def join_channels(*parts: Tensor) -> Tensor:
    """Concatenate the channels of all parts."""
    if len(parts) == 2 and all(can_use_kernels(part) for part in parts) and parts[0].dtype == parts[1].dtype:
        from voxlane.model.kernels.upconv import join_channels

        return join_channels(*parts)
    return torch.cat(parts, 1) if len(parts) > 1 else parts[0]


def working_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which a convolution of `x` computes."""
    device_type = x.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else x.dtype


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _can_compile(kernel: ModuleType, device_index: int, *device_type: Any) -> bool:
    """Return whether one of our convolutions can be compiled for a GPU."""
    return _check_and_log(kernel, device_index, *device_type)


@functools.cache
def _check_and_log(kernel: ModuleType, device_index: int, *device_type: Any) -> bool:
    reason: str | None = kernel.unsupported_reason(device_index, *device_type)
    if reason is not None:
        _log.info("cuda:%d: convolutions use cuDNN instead of Voxlane's kernels: %s", device_index, reason)
    return reason is None
