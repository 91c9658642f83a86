"""The array format without I/O: metadata, index, storage order and region plans."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from voxlane.errors import ConfigError, PreparedError
from voxlane.volume.codec import ChunkCodec, checksum, image_codecs, label_codecs
from voxlane.volume.zarr_array import (
    MISSING,
    ArrayMeta,
    build_index,
    choose_chunk_shape,
    choose_shard_shape,
    object_name,
    parse_index,
    plan_region,
    storage_order,
)


@st.composite
def arrays_and_regions(draw: st.DrawFn) -> tuple[ArrayMeta, list[int], list[int]]:
    axes = draw(st.integers(1, 4))
    shape = draw(st.lists(st.integers(1, 20), min_size=axes, max_size=axes))
    chunk = [draw(st.integers(1, n)) for n in shape]
    shard = [c * draw(st.integers(1, 3)) for c in chunk]
    start = [draw(st.integers(0, n)) for n in shape]
    stop = [draw(st.integers(a, n)) for a, n in zip(start, shape, strict=True)]
    return ArrayMeta(tuple(shape), "int16", tuple(chunk), (), tuple(shard)), start, stop


@given(arrays_and_regions())
def test_plan_covers_every_voxel_of_a_region_once(
    case: tuple[ArrayMeta, list[int], list[int]],
) -> None:
    meta, start, stop = case
    array = np.arange(math.prod(meta.shape)).reshape(meta.shape)
    region = array[tuple(map(slice, start, stop))]
    actual = np.full(region.shape, -1)
    for shard, pieces in plan_region(meta, start, stop).items():
        for piece in pieces:
            inner = np.unravel_index(piece.number, meta.chunks_per_shard)
            origin = [
                s * size + int(i) * c for s, size, i, c in zip(shard, meta.object_shape, inner, meta.chunk, strict=True)
            ]
            chunk = array[tuple(slice(o, o + c) for o, c in zip(origin, meta.chunk, strict=True))]
            assert np.all(actual[piece.target] == -1)
            actual[piece.target] = chunk[piece.source]
    np.testing.assert_array_equal(actual, region)


@pytest.mark.parametrize(("start", "stop"), [((-1, 0), (1, 1)), ((0, 0), (5, 4)), ((2, 0), (1, 1)), ((0,), (1,))])
def test_region_outside_the_array_is_rejected(start: tuple[int, ...], stop: tuple[int, ...]) -> None:
    meta = ArrayMeta((4, 4), "int16", (2, 2), (), (4, 4))
    with pytest.raises(ConfigError, match="read_padded"):
        plan_region(meta, start, stop)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_storage_order_has_every_chunk_once(grid: list[int]) -> None:
    order = storage_order(tuple(grid))
    np.testing.assert_array_equal(np.sort(order), np.arange(math.prod(grid)))


@pytest.mark.parametrize("grid", [(8, 8, 8), (1, 4, 4, 4), (16, 16)])
def test_consecutive_chunks_of_a_cube_are_neighbours(grid: tuple[int, ...]) -> None:
    positions = np.stack(np.unravel_index(storage_order(grid), grid), axis=1)
    steps = np.abs(np.diff(positions, axis=0)).sum(axis=1)
    assert set(steps.tolist()) == {1}


@given(st.lists(st.integers(-1, 50), min_size=1, max_size=40), st.integers(0, 1000), st.randoms())
def test_index_places_chunks_end_to_end(sizes: list[int], first: int, random: object) -> None:
    order = np.arange(len(sizes))
    random.shuffle(order)  # type: ignore[attr-defined]
    index = build_index(np.array(sizes), order, first)
    offset = first
    for number in order:
        if sizes[number] < 0:
            assert (index[number] == MISSING).all()
            continue
        assert index[number].tolist() == [offset, sizes[number]]
        offset += sizes[number]


def test_damaged_index_is_rejected() -> None:
    meta = ArrayMeta((8, 8), "int16", (4, 4), (), (8, 8))
    raw = build_index(np.array([5, -1, 7, 3]), np.arange(4), meta.index_bytes).tobytes()
    good = raw + checksum(raw).to_bytes(4, "little")
    size = meta.index_bytes + 15
    assert parse_index(meta, good, size, checksum(good[:-4]), "u")[2].tolist() == [meta.index_bytes + 5, 7]
    damaged = bytes([good[0] ^ 1]) + good[1:]
    with pytest.raises(PreparedError, match="u: the shard's index is damaged"):
        parse_index(meta, damaged, size, checksum(damaged[:-4]), "u")
    with pytest.raises(PreparedError, match="past its end"):
        parse_index(meta, good, size - 1, checksum(good[:-4]), "u")


@given(arrays_and_regions(), st.sampled_from(["start", "end"]))
def test_metadata_survives_a_round_trip(case: tuple[ArrayMeta, list[int], list[int]], index_location: str) -> None:
    uncompressed = case[0]
    codecs = image_codecs("int16", uncompressed.chunk)
    meta = ArrayMeta(uncompressed.shape, "int16", uncompressed.chunk, codecs, uncompressed.shard, index_location)
    assert ArrayMeta.from_metadata(meta.to_metadata()) == meta


def test_unsupported_codecs_are_rejected() -> None:
    with pytest.raises(PreparedError, match="gzip"):
        ChunkCodec([{"name": "bytes"}, {"name": "gzip"}], "uint8")


def test_chunk_shape_depends_on_the_patch() -> None:
    assert choose_chunk_shape((128, 128, 128), (300, 512, 512)) == (32, 32, 32)
    assert choose_chunk_shape((28, 256, 256), (60, 512, 512)) == (8, 64, 64)
    assert choose_chunk_shape((40, 56, 40), (35, 51, 35)) == (35, 51, 35)  # a small volume has one chunk
    assert choose_chunk_shape((128, 128, 128), (20, 20, 20)) == (20, 20, 20)
    assert math.prod(choose_chunk_shape((64, 64, 64), (512, 512, 512), channels=4)) * 4 >= 32**3


def test_large_array_is_split_into_slabs() -> None:
    assert choose_shard_shape((1, 300, 512, 512), (1, 32, 32, 32), 2) == (1, 320, 512, 512)
    assert choose_shard_shape((1, 300, 512, 512), (1, 32, 32, 32), 2, max_bytes=50 << 20) == (1, 96, 512, 512)
    assert choose_shard_shape((300, 512, 512), (64, 64, 64), 1, max_bytes=1) == (64, 512, 512)
    assert object_name((0, 2, 0, 0)) == "c/0/2/0/0"


@given(st.integers(0, 2**32 - 1), st.sampled_from(["int16", "uint8", "float32", "int32"]))
def test_codecs_are_lossless(seed: int, dtype: str) -> None:
    chunk = (np.random.default_rng(seed).normal(size=(4, 6, 5)) * 40).astype(dtype)
    for codecs in (image_codecs(dtype, chunk.shape), label_codecs(dtype), ({"name": "bytes"},)):
        codec = ChunkCodec(codecs, dtype)
        decoded = codec.empty(chunk.shape)
        codec.decode(memoryview(codec.encode(chunk)), decoded)
        np.testing.assert_array_equal(decoded, chunk)


def test_any_changed_byte_of_a_chunk_is_detected() -> None:
    chunk = np.arange(60, dtype=np.int16).reshape(3, 4, 5)
    for codecs in (image_codecs("int16", chunk.shape), label_codecs("int16")):
        codec = ChunkCodec(codecs, "int16")
        stored = codec.encode(chunk)
        for offset in range(len(stored)):
            damaged = bytearray(stored)
            damaged[offset] ^= 0x10
            with pytest.raises(ValueError, match="checksum"):
                codec.decode(memoryview(bytes(damaged)), codec.empty(chunk.shape))
