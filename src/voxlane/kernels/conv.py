"""3 x 3 x 3 convolutions with stride 1, of 32 channels to 32 or of twice 32 to 32, for large volumes on Hopper GPUs.

cuDNN runs these on the tensor cores' older instructions, at a third of the card's rate; see conv.cu. Volumes are
channels-last, of 16 bits; weights are float32 and are rounded to 16 bits as autocast would.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from voxlane.kernels.cuda import CompileError, Job, Kernel, compile_ahead

CHANNELS = 32
CAPABILITY = (9, 0)
"""The only compute capability whose tensor cores are spoken to so."""
_TYPES = {torch.bfloat16: "bf16", torch.float16: "f16"}
_SHAPES = {CHANNELS: (1, 2, 3, 2), 2 * CHANNELS: (2, 2, 2, 1)}
"""By channels: warpgroups of a block along y and x, planes in flight, and blocks of a multiprocessor."""
_SIDE = 16
_LAST_3D = torch.channels_last_3d


def conv(first: Tensor, second: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
    """conv3d(cat((first, second), 1), weight, padding=1), channels-last, and the output's partial statistics
    (B, T, 3, 32): count, mean and sum of squared distances from it.

    first and, if given, second: (B, 32, D, H, W), channels-last; weight (32, 32 or 64, 3, 3, 3) float32.
    """
    made: tuple[Tensor, Tensor] = _conv(first, second, weight)
    return made


@functools.cache
def why_not(device_index: int, dtype: torch.dtype) -> str | None:
    """What keeps these convolutions from a GPU, in a clause; None: nothing. Compiles them."""
    if torch.cuda.get_device_capability(device_index) != CAPABILITY:
        return "they are for compute capability 9.0"
    kinds = [(channels, statistics) for channels in (CHANNELS, 2 * CHANNELS) for statistics in (False, True)]
    try:
        compile_ahead([_weights_job(dtype), *(_forward_job(dtype, *kind) for kind in kinds)])
        with torch.cuda.device(device_index):
            _weights(dtype, device_index)
            for kind in kinds:
                _forward(dtype, *kind, device_index)
    except (CompileError, OSError, RuntimeError) as error:
        return str(error).strip()
    return None


@torch.library.custom_op("voxlane::conv", mutates_args=(), device_types="cuda")
def _conv(first: Tensor, second: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
    with torch.cuda.device(first.device):
        first = _last(first)
        second = None if second is None else _last(second)
        if second is not None and second.stride(4) != first.stride(4):  # the kernel knows of one
            first, second = (part.contiguous(memory_format=_LAST_3D) for part in (first, second))
        out, partials = forward(first, second, pack(weight, first.dtype), statistics=True)
    assert partials is not None
    return out, partials


@torch.library.custom_op("voxlane::conv_input_gradient", mutates_args=(), device_types="cuda")
def _input_gradient(dy: Tensor, weight: Tensor) -> Tensor:
    with torch.cuda.device(dy.device):
        return forward(_last(dy), None, pack_backward(weight, dy.dtype))[0]


@torch.library.custom_op("voxlane::conv_weight_gradient", mutates_args=(), device_types="cuda")
def _weight_gradient(first: Tensor, second: Tensor | None, dy: Tensor) -> Tensor:
    with torch.cuda.device(dy.device):
        dy = _last(dy)
        parts = [weight_gradient(_last(x), dy) for x in (first, second) if x is not None]
        return torch.cat(parts, 1) if len(parts) > 1 else parts[0].contiguous()


@_conv.register_fake
def _(first: Tensor, second: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
    batch, _, depth, height, width = first.shape
    groups_y, groups_x, _, at_once = _SHAPES[CHANNELS if second is None else 2 * CHANNELS]
    tiles = -(-height // (8 * groups_y)) * -(-width // (8 * groups_x))
    blocks = torch.cuda.get_device_properties(first.device).multi_processor_count * at_once
    _, chunks = chunked(batch * tiles, depth, blocks)
    partials = first.new_empty((batch, chunks * tiles, 3, CHANNELS), dtype=torch.float32)
    return torch.empty_like(first, memory_format=_LAST_3D), partials


@_input_gradient.register_fake
def _(dy: Tensor, weight: Tensor) -> Tensor:
    return torch.empty_like(dy, memory_format=_LAST_3D)


@_weight_gradient.register_fake
def _(first: Tensor, second: Tensor | None, dy: Tensor) -> Tensor:
    channels = CHANNELS if second is None else 2 * CHANNELS
    return dy.new_empty((CHANNELS, channels, 3, 3, 3), dtype=torch.float32)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, dy: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    first, second, weight = ctx.saved_tensors
    if dy is None:
        return None, None, None
    of_first, of_second, of_weight = ctx.needs_input_grad
    return (
        _input_gradient(dy, weight[:, :CHANNELS]) if of_first else None,
        _input_gradient(dy, weight[:, CHANNELS:]) if of_second else None,
        _weight_gradient(first, second, dy).to(weight.dtype) if of_weight else None,
    )


_conv.register_autograd(_differentiate, setup_context=_keep)


def _last(x: Tensor) -> Tensor:
    """Channels-last, or 32 neighbouring channels of such a volume that has more."""
    _, _, _, height, width = x.shape
    row = x.stride(4)
    evenly = x.stride(1) == 1 and x.stride(3) == width * row and x.stride(2) == height * width * row
    aligned = row % 8 == 0 and x.data_ptr() % 16 == 0 and x.stride(0) == x.shape[2] * x.stride(2)
    return x if evenly and aligned else x.contiguous(memory_format=_LAST_3D)


def forward(
    first: Tensor, second: Tensor | None, packed: Tensor, *, statistics: bool = False
) -> tuple[Tensor, Tensor | None]:
    """The convolution of `first` (B, 32, D, H, W) and, if given, `second` behind it, by weights that `pack` made; and
    the output's partial statistics (B, T, 3, 32): count, mean and sum of squared distances from it."""
    batch, _, depth, height, width = first.shape
    kernel, tile_y, tile_x, threads, blocks = _forward(
        first.dtype, 64 if second is not None else 32, statistics, first.device.index
    )
    out = torch.empty_like(first, memory_format=torch.channels_last_3d)
    tiles_y, tiles_x = -(-height // tile_y), -(-width // tile_x)
    planes, chunks = chunked(batch * tiles_y * tiles_x, depth, blocks)
    partials = first.new_empty((batch, chunks * tiles_y * tiles_x, 3, CHANNELS), dtype=torch.float32)
    kernel(
        (tiles_x, tiles_y, batch * chunks),
        threads,
        first,
        second if second is not None else first,
        packed,
        out,
        partials,
        depth,
        height,
        width,
        first.stride(4),
        CHANNELS,
        planes,
        chunks,
    )
    return out, partials if statistics else None


def weight_gradient(x: Tensor, gradient: Tensor) -> Tensor:
    """The gradient (32, 32, 3, 3, 3) in float32 of the weights between `x` and the convolution's output."""
    batch, _, depth, height, width = x.shape
    kernel, blocks = _weights(x.dtype, x.device.index)
    tiles_y, tiles_x = -(-height // _SIDE), -(-width // _SIDE)
    planes, chunks = chunked(batch * tiles_y * tiles_x, depth, blocks)
    items = batch * tiles_y * tiles_x * chunks
    blocks = min(blocks, items)
    sums = x.new_empty((blocks, 3, 3, 3, CHANNELS, CHANNELS), dtype=torch.float32)
    strides = x.stride(4), gradient.stride(4)
    kernel(
        (blocks, 1, 1), 256, x, gradient, sums, depth, height, width, *strides, tiles_y, tiles_x, planes, chunks, items
    )
    return sums.sum(0).permute(3, 4, 0, 1, 2)


def pack(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Weights (32, 32 or 64, 3, 3, 3) as `forward` reads them: [dy][dx][in / 8][dz][out][in % 8], output channels in
    the order in which a thread's sums are 8 neighbours."""
    parts = weight.reshape(4, 4, 2, -1, 8, 3, 3, 3)  # quad, pair, one of it, in / 8, in % 8, dz, dy, dx
    return parts.permute(6, 7, 3, 5, 1, 0, 2, 4).to(dtype).contiguous()


def pack_backward(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Weights (32, 32, 3, 3, 3) for the gradient of the input: `forward` of the output's gradient by these."""
    return pack(weight.transpose(0, 1).flip(2, 3, 4), dtype)


def chunked(columns: int, depth: int, blocks: int) -> tuple[int, int]:
    """Planes of a chunk and chunks along z, for about `blocks` or a multiple of it in all, none below 8 planes."""
    chunks = max(1, min(blocks // columns if columns <= blocks else 1, depth // 8))
    planes = math.ceil(depth / chunks)
    return planes, math.ceil(depth / planes)


@functools.cache
def _forward(dtype: torch.dtype, channels: int, statistics: bool, device: int) -> tuple[Kernel, int, int, int, int]:
    """The kernel, voxels of a tile along y and x, threads of a block, and blocks that run at once."""
    groups_y, groups_x, stages, at_once = _SHAPES[channels]
    tile_y, tile_x = 8 * groups_y, 8 * groups_x
    shared = 9 * channels * 96 * 2 + stages * _plane_bytes(tile_y + 2, tile_x + 2, channels // 8)
    kernel = Kernel(_forward_job(dtype, channels, statistics), "conv_forward", shared)
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return kernel, tile_y, tile_x, 128 * groups_y * groups_x, multiprocessors * at_once


@functools.cache
def _weights(dtype: torch.dtype, device: int) -> tuple[Kernel, int]:
    shared = 2 * _plane_bytes(_SIDE + 2, _SIDE + 2, 4) + 4 * _plane_bytes(_SIDE, _SIDE, 4)
    kernel = Kernel(_weights_job(dtype), "conv_weights", shared)
    return kernel, torch.cuda.get_device_properties(device).multi_processor_count


def _forward_job(dtype: torch.dtype, channels: int, statistics: bool) -> Job:
    groups_y, groups_x, stages, at_once = _SHAPES[channels]
    what = [f"T={_TYPES[dtype]}", "FORWARD", *(["STATISTICS"] if statistics else [])]
    shape = [f"CIN={channels}", f"WGY={groups_y}", f"WGX={groups_x}", f"STAGES={stages}", f"MIN_BLOCKS={at_once}"]
    return "conv.cu", "sm_90a", (*what, *shape)


def _weights_job(dtype: torch.dtype) -> Job:
    return "conv.cu", "sm_90a", (f"T={_TYPES[dtype]}", "WEIGHTS", "WGY=2", "WGX=1")


def _plane_bytes(rows: int, columns: int, chunks: int) -> int:
    """Of a plane in shared memory; as conv.cu's Plane."""
    voxels = rows * columns
    return (voxels + ((2 if chunks == 4 else 1) - voxels) % 8) * 16 * chunks
