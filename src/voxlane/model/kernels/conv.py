"""3 x 3 x 3 convolutions with stride 1 from 32 or 2 x 32 channels to 32, for large volumes on Hopper GPUs.

cuDNN uses older tensor-core instructions for these, at a third of the card's rate; see conv.cu. Volumes are
channels-last and 16-bit; weights are float32 and rounded to 16 bits, as with autocast.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from voxlane.model.kernels.cuda import CompiledKernel, CompileJob, explain_failure
from voxlane.model.kernels.support import operator, save_inputs

CHANNELS = 32
CAPABILITY = (9, 0)
"""The only compute capability with these tensor-core instructions."""
_TYPES = {torch.bfloat16: "bf16", torch.float16: "f16"}
_SHAPES = {CHANNELS: (1, 2, 3, 2), 2 * CHANNELS: (2, 2, 2, 1)}
"""By channels: warpgroups of a block along y and x, planes in flight, and blocks per multiprocessor."""
_SIDE = 16
_LAST_3D = torch.channels_last_3d


@functools.cache
def unsupported_reason(device_index: int, dtype: torch.dtype) -> str | None:
    """Compile these convolutions for a GPU; return None, or the reason if it does not support them."""
    if torch.cuda.get_device_capability(device_index) != CAPABILITY:
        return "they are for compute capability 9.0"
    kinds = [(channels, statistics) for channels in (CHANNELS, 2 * CHANNELS) for statistics in (False, True)]

    def load() -> None:
        with torch.cuda.device(device_index):
            _load_weights(dtype, device_index)
            for kind in kinds:
                _load_forward(dtype, *kind, device_index)

    return explain_failure([_weights_job(dtype), *(_forward_job(dtype, *kind) for kind in kinds)], load)


@operator("voxlane::conv", lambda first, second, _: _allocate_results(first, _divide(first, second)), "cuda")
def conv(first: Tensor, second: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Compute conv3d(cat((first, second), 1), weight, padding=1), channels-last, and partial statistics of the output
    (B, T, 3, 32): count, mean and sum of squared distances from it.

    first and, if given, second: (B, 32, D, H, W), channels-last; weight (32, 32 or 64, 3, 3, 3) float32.
    """
    first = _as_channels_last(first)
    second = None if second is None else _as_channels_last(second)
    if second is not None and second.stride(4) != first.stride(4):  # the kernel supports a single stride
        first, second = (part.contiguous(memory_format=_LAST_3D) for part in (first, second))
    return _forward(first, second, _pack(weight, first.dtype), statistics=True)


@operator("voxlane::conv_input_gradient", lambda dy, _: torch.empty_like(dy, memory_format=_LAST_3D), "cuda")
def _input_gradient(dy: Tensor, weight: Tensor) -> Tensor:
    # The input's gradient is a convolution of the output's gradient by the reversed weights.
    packed = _pack(weight.transpose(0, 1).flip(2, 3, 4), dy.dtype)
    return _forward(_as_channels_last(dy), None, packed, statistics=False)[0]


@operator(
    "voxlane::conv_weight_gradient",
    lambda first, second, dy: dy.new_empty((CHANNELS, _count_channels(second), 3, 3, 3), dtype=torch.float32),
    "cuda",
)
def _weight_gradient(first: Tensor, second: Tensor | None, dy: Tensor) -> Tensor:
    dy = _as_channels_last(dy)
    parts = [_gradient_of_part(_as_channels_last(x), dy) for x in (first, second) if x is not None]
    return torch.cat(parts, 1) if len(parts) > 1 else parts[0].contiguous()


def _run_backward(ctx: Any, dy: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    first, second, weight = ctx.saved_tensors
    if dy is None:
        return None, None, None
    needs_first, needs_second, needs_weight = ctx.needs_input_grad
    return (
        _input_gradient(dy, weight[:, :CHANNELS]) if needs_first else None,
        _input_gradient(dy, weight[:, CHANNELS:]) if needs_second else None,
        _weight_gradient(first, second, dy).to(weight.dtype) if needs_weight else None,
    )


conv.register_autograd(_run_backward, setup_context=save_inputs)


def _as_channels_last(x: Tensor) -> Tensor:
    """Return `x` channels-last, unless it already is or is 32 adjacent channels of a channels-last volume."""
    _, _, _, height, width = x.shape
    row = x.stride(4)
    even_strides = x.stride(1) == 1 and x.stride(3) == width * row and x.stride(2) == height * width * row
    aligned = row % 8 == 0 and x.data_ptr() % 16 == 0 and x.stride(0) == x.shape[2] * x.stride(2)
    return x if even_strides and aligned else x.contiguous(memory_format=_LAST_3D)


def _forward(first: Tensor, second: Tensor | None, packed: Tensor, *, statistics: bool) -> tuple[Tensor, Tensor]:
    """Convolve `first` (B, 32, D, H, W) and, if given, `second` by weights from `_pack`; also return the partial
    statistics of the output, undefined unless `statistics`."""
    tiles_y, tiles_x, planes, chunks = division = _divide(first, second)
    out, partials = _allocate_results(first, division)
    tensors = first, first if second is None else second, packed, out, partials
    sizes = *first.shape[2:], first.stride(4), CHANNELS, planes, chunks
    kernel = _load_forward(first.dtype, _count_channels(second), statistics, first.device.index)
    kernel((tiles_x, tiles_y, first.shape[0] * chunks), *tensors, *sizes)
    return out, partials


def _count_channels(second: Tensor | None) -> int:
    return CHANNELS if second is None else 2 * CHANNELS


def _divide(first: Tensor, second: Tensor | None) -> tuple[int, int, int, int]:
    """Return the number of tiles along y and x, the planes of a chunk along z, and the number of chunks."""
    groups_y, groups_x, _, blocks_per_sm = _SHAPES[_count_channels(second)]
    batch, _, depth, height, width = first.shape
    tiles_y, tiles_x = -(-height // (8 * groups_y)), -(-width // (8 * groups_x))
    blocks = _count_multiprocessors(first.device) * blocks_per_sm
    return tiles_y, tiles_x, *_split_depth(batch * tiles_y * tiles_x, depth, blocks)


def _allocate_results(x: Tensor, division: tuple[int, int, int, int]) -> tuple[Tensor, Tensor]:
    tiles_y, tiles_x, _, chunks = division
    partials = x.new_empty((x.shape[0], chunks * tiles_y * tiles_x, 3, CHANNELS), dtype=torch.float32)
    return torch.empty_like(x, memory_format=_LAST_3D), partials


def _gradient_of_part(x: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient (32, 32, 3, 3, 3) in float32 of the weights between `x` and the convolution's output."""
    batch, _, depth, height, width = x.shape
    blocks = _count_multiprocessors(x.device)
    tiles_y, tiles_x = -(-height // _SIDE), -(-width // _SIDE)
    planes, chunks = _split_depth(batch * tiles_y * tiles_x, depth, blocks)
    items = batch * tiles_y * tiles_x * chunks
    blocks = min(blocks, items)
    sums = x.new_empty((blocks, 3, 3, 3, CHANNELS, CHANNELS), dtype=torch.float32)
    sizes = depth, height, width, x.stride(4), gradient.stride(4), tiles_y, tiles_x, planes, chunks, items
    _load_weights(x.dtype, x.device.index)((blocks, 1, 1), x, gradient, sums, *sizes)
    return sums.sum(0).permute(3, 4, 0, 1, 2)


def _pack(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Pack weights (32, 32 or 64, 3, 3, 3) for `_forward`: [dy][dx][in / 8][dz][out][in % 8], with output channels in
    an order in which a thread's sums are 8 neighbours."""
    parts = weight.reshape(4, 4, 2, -1, 8, 3, 3, 3)  # quad, pair, one of it, in / 8, in % 8, dz, dy, dx
    return parts.permute(6, 7, 3, 5, 1, 0, 2, 4).to(dtype).contiguous()


def _split_depth(columns: int, depth: int, blocks: int) -> tuple[int, int]:
    """Return planes per chunk and chunks along z, for a total of about `blocks` or a multiple, with 8 planes or
    more."""
    chunks = max(1, min(blocks // columns if columns <= blocks else 1, depth // 8))
    planes = math.ceil(depth / chunks)
    return planes, math.ceil(depth / planes)


@functools.cache
def _count_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _load_forward(dtype: torch.dtype, channels: int, statistics: bool, device: int) -> CompiledKernel:
    groups_y, groups_x, stages, _ = _SHAPES[channels]
    plane = _plane_bytes(8 * groups_y + 2, 8 * groups_x + 2, channels // 8)
    shared = 9 * channels * 96 * 2 + stages * plane
    job = _forward_job(dtype, channels, statistics)
    return CompiledKernel(job, "conv_forward", 128 * groups_y * groups_x, shared)


@functools.cache
def _load_weights(dtype: torch.dtype, device: int) -> CompiledKernel:
    shared = 2 * _plane_bytes(_SIDE + 2, _SIDE + 2, 4) + 4 * _plane_bytes(_SIDE, _SIDE, 4)
    return CompiledKernel(_weights_job(dtype), "conv_weights", 256, shared)


def _forward_job(dtype: torch.dtype, channels: int, statistics: bool) -> CompileJob:
    groups_y, groups_x, stages, blocks_per_sm = _SHAPES[channels]
    defines = [f"T={_TYPES[dtype]}", "FORWARD", *(["STATISTICS"] if statistics else [])]
    shape = [f"CIN={channels}", f"WGY={groups_y}", f"WGX={groups_x}", f"STAGES={stages}", f"MIN_BLOCKS={blocks_per_sm}"]
    return "conv.cu", "sm_90a", (*defines, *shape)


def _weights_job(dtype: torch.dtype) -> CompileJob:
    return "conv.cu", "sm_90a", (f"T={_TYPES[dtype]}", "WEIGHTS", "WGY=2", "WGX=1")


def _plane_bytes(rows: int, columns: int, chunks: int) -> int:
    """Return the size of a plane in shared memory, as conv.cu's Plane has it."""
    voxels = rows * columns
    return (voxels + ((2 if chunks == 4 else 1) - voxels) % 8) * 16 * chunks
