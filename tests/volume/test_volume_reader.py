"""Cases are written to real servers and read back by voxlane and by other Zarr libraries."""

from __future__ import annotations

import json
import multiprocessing
import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conftest import Bucket
from voxlane.dataset.cache import DiskCache
from voxlane.errors import ConfigError, PreparedError
from voxlane.testing import Emulator, Faults
from voxlane.volume.case_writer import write_arrays, write_case
from voxlane.volume.codec import image_codecs
from voxlane.volume.volume_reader import VolumeCache, VolumeReader
from voxlane.volume.zarr_array import ArrayMeta

ATTRIBUTES = {"spacing": [3.0, 0.8, 0.8], "note": "phantom"}
SHAPE = (2, 50, 70, 90)


def make_case(seed: int = 0, shape: tuple[int, ...] = SHAPE) -> dict[str, Any]:
    """Return a case: half is noise that hardly compresses, half is air, and there is a small organ."""
    random = np.random.default_rng(seed)
    image = random.integers(-1000, 1000, shape).astype(np.int16)
    image[..., : shape[-1] // 2] = -79
    label = np.zeros(shape[1:], np.uint8)
    label[10:20, 30:50, 60:85] = 1
    label[12:16, 35:40, 65:70] = 2
    voxels = np.argwhere(label)[::500]
    foreground = np.column_stack([label[tuple(voxels.T)], voxels]).astype(np.int32)
    return {"image": image, "label": label, "foreground": foreground, "attributes": ATTRIBUTES}


def write_to_bucket(bucket: Bucket, case: dict[str, Any], name: str = "cases/a.zarr", patch: Any = (32, 32, 32)) -> Any:
    metadata = write_case(bucket.store, bucket.key(name), patch=patch, **case)
    return json.loads(json.dumps(metadata))  # a manifest stores it as JSON


def make_range_readers(bucket: Bucket, **changes: Any) -> VolumeCache:
    """Return a cache whose readers always read ranges, even of small objects."""
    return VolumeCache(bucket.store, whole_bytes=0, **changes)


def test_all_stores_return_the_written_case(bucket: Bucket) -> None:
    case = make_case()
    metadata = write_to_bucket(bucket, case)
    for volumes in (VolumeCache(bucket.store), make_range_readers(bucket, memory_bytes=0)):
        reader = volumes.open(bucket.key("cases/a.zarr"), metadata)
        for name in ("image", "label", "foreground"):
            actual = reader.read(name)
            assert actual.dtype == case[name].dtype
            np.testing.assert_array_equal(actual, case[name])


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_regions_match_slices_of_the_array(gcs: Bucket, data: st.DataObject) -> None:
    case = make_case()
    metadata = write_to_bucket(gcs, case)
    volumes = make_range_readers(gcs, memory_bytes=data.draw(st.sampled_from([0, 50_000, 1 << 30])))
    reader = volumes.open("cases/a.zarr", metadata)
    for name in ("image", "label"):
        shape = case[name].shape[-3:]
        start = [data.draw(st.integers(0, n - 1)) for n in shape]
        stop = [data.draw(st.integers(a + 1, n)) for a, n in zip(start, shape, strict=True)]
        region = (..., *map(slice, start, stop))
        for _ in range(2):
            np.testing.assert_array_equal(reader.read(name, start, stop), case[name][region])
        low = [data.draw(st.integers(-30, n + 10)) for n in shape]
        high = [data.draw(st.integers(a + 1, a + 60)) for a in low]
        leading_axes = len(case[name].shape) - 3
        padded = np.pad(case[name], [(0, 0)] * leading_axes + [(100, 100)] * 3, constant_values=7)
        expected = padded[(..., *(slice(a + 100, b + 100) for a, b in zip(low, high, strict=True)))]
        np.testing.assert_array_equal(reader.read(name, low, high, fill=7), expected)


@pytest.mark.parametrize("index_at", ["start", "end"])
def test_slabs_and_both_index_locations(folder: Bucket, index_at: str) -> None:
    image = make_case()["image"]
    meta = ArrayMeta(SHAPE, "int16", (2, 8, 16, 20), image_codecs("int16", (2, 8, 16, 20)), (2, 16, 48, 100), index_at)
    metadata = write_arrays(folder.store, folder.key("a"), {"image": image}, {"image": meta}, {})
    assert len(metadata["objects"]) == 4 * 2
    for volumes in (VolumeCache(folder.store), make_range_readers(folder)):
        reader = volumes.open(folder.key("a"), metadata)
        np.testing.assert_array_equal(reader.read("image"), image)
        np.testing.assert_array_equal(
            reader.read("image", (1, 13, 40, 3), (2, 33, 60, 77)), image[1:2, 13:33, 40:60, 3:77]
        )
    check_with_zarr(folder, "a", {"image": image})


def check_with_zarr(folder: Bucket, name: str, arrays: dict[str, Any]) -> Any:
    """Check that zarr-python and tensorstore read the same voxels, and return the zarr group."""
    import tensorstore
    import zarr

    path = folder.uri.removeprefix("file://") + f"/{name}"
    group = zarr.open_group(path, mode="r")
    for array, expected in arrays.items():
        np.testing.assert_array_equal(group[array][...], expected)
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/{array}/"}}
        np.testing.assert_array_equal(tensorstore.open(spec).result().read().result(), expected)
    return group


def test_other_libraries_read_a_case(folder: Bucket) -> None:
    case = make_case()
    write_to_bucket(folder, case)
    group = check_with_zarr(folder, "cases/a.zarr", {n: case[n] for n in ("image", "label", "foreground")})
    assert dict(group.attrs) == ATTRIBUTES
    assert group["image"].metadata.dimension_names == ("c", "z", "y", "x")


def test_arrays_written_by_zarr_python_are_read(folder: Bucket) -> None:
    import zarr

    image = make_case()["image"]
    path = folder.uri.removeprefix("file://") + "/other"
    zarr_array = zarr.create_array(
        path, shape=SHAPE, dtype="int16", chunks=(2, 10, 10, 10), shards=(2, 20, 30, 90), fill_value=0
    )
    zarr_array[...] = image
    sharding = json.loads(Path(f"{path}/zarr.json").read_text())["codecs"][0]["configuration"]
    location = sharding["index_location"]
    meta = ArrayMeta(SHAPE, "int16", (2, 10, 10, 10), tuple(sharding["codecs"]), (2, 20, 30, 90), location)
    objects = [
        [f"other/{p.relative_to(path)}", p.stat().st_size, None, None, None]
        for p in Path(path).rglob("*")
        if p.is_file()
    ]
    metadata = {"other": meta.to_metadata(), "objects": objects}
    reader = make_range_readers(folder).open(folder.key(""), metadata)
    np.testing.assert_array_equal(reader.read("other"), image)


def test_without_a_label_and_without_foreground(folder: Bucket) -> None:
    case = {**make_case(), "label": None, "foreground": np.empty((0, 4), np.int32)}
    metadata = write_to_bucket(folder, case)
    reader = VolumeCache(folder.store).open(folder.key("cases/a.zarr"), metadata)
    assert reader.read("foreground").shape == (0, 4)
    np.testing.assert_array_equal(reader.read("image"), case["image"])
    with pytest.raises(PreparedError, match="has no array 'label', only foreground, image"):
        reader.start("label")


def test_chunks_of_air_are_not_stored(folder: Bucket) -> None:
    case = make_case()
    case["image"][..., 85:] = -79
    metadata = write_to_bucket(folder, case)
    assert metadata["image"]["fill"] == -79
    reader = make_range_readers(folder).open(folder.key("cases/a.zarr"), metadata)
    assert (reader.read("image", (0, 0, 0), (50, 70, 30)) == -79).all()
    assert reader.shared.timing.requests == 1  # the index
    infinite = np.full((1, 40, 40, 40), np.inf, np.float32)
    metadata = write_to_bucket(folder, {**case, "image": infinite, "label": None}, "cases/b.zarr")
    np.testing.assert_array_equal(
        make_range_readers(folder).open(folder.key("cases/b.zarr"), metadata).read("image"), infinite
    )


def test_empty_label_has_no_chunks(folder: Bucket) -> None:
    case = make_case()
    case["label"][:] = 0
    metadata = write_to_bucket(folder, case)
    reader = make_range_readers(folder).open(folder.key("cases/a.zarr"), metadata)
    assert not reader.read("label").any()
    assert reader.shared.timing.requests == 1
    check_with_zarr(folder, "cases/a.zarr", {"label": case["label"]})


# -- requests and caches ---------------------------------------------------------------------------------------------


def test_patch_reads_the_index_once_and_only_its_chunks(gcs: Bucket, emulator: Emulator) -> None:
    metadata = write_to_bucket(gcs, make_case())
    chunk = metadata["image"]["chunk"]
    volumes = VolumeCache(gcs.store, whole_bytes=0, max_gap_bytes=0, memory_bytes=0)
    reader = volumes.open("cases/a.zarr", metadata)
    emulator.reset_counters()
    reader.read("image", (0, 0, 64), (16, 16, 80))
    first = emulator.counters()
    assert first.requests == first.get.requests
    index_bytes = ArrayMeta.from_metadata(metadata["image"]).index_bytes
    max_bytes = 4 * 2 * np.prod(chunk) + index_bytes  # at most 2 x 2 x 1 chunks of noise
    assert index_bytes < first.bytes_out <= max_bytes * 1.01
    reader.read("image", (0, 0, 64), (16, 16, 80))
    second = emulator.counters()
    assert second.bytes_out - first.bytes_out == first.bytes_out - index_bytes
    assert (reader.shared.timing.requests, reader.shared.timing.bytes_read) == (second.requests, second.bytes_out)
    assert reader.shared.timing.regions == 2
    assert reader.shared.timing.decode_s > 0
    assert reader.shared.timing.wait_s > 0


def test_small_object_needs_one_request(gcs: Bucket, emulator: Emulator) -> None:
    metadata = write_to_bucket(gcs, make_case())
    reader = VolumeCache(gcs.store).open("cases/a.zarr", metadata)
    emulator.reset_counters()
    for _ in range(3):
        reader.read("label", (0, 0, 0), (32, 32, 32))
        reader.read("label", (10, 30, 50), (42, 62, 82))
    assert emulator.counters().requests == 1


def test_memory_cache_stays_within_its_limit(gcs: Bucket, emulator: Emulator) -> None:
    case = make_case()
    metadata = write_to_bucket(gcs, case)
    volumes = make_range_readers(gcs)
    reader = volumes.open("cases/a.zarr", metadata)
    reader.read("image")
    emulator.reset_counters()
    np.testing.assert_array_equal(reader.read("image"), case["image"])
    assert emulator.counters().requests == 0
    assert reader.shared.timing.memory_hits > 0
    small_cache = make_range_readers(gcs, memory_bytes=60_000)
    reader = small_cache.open("cases/a.zarr", metadata)
    for _ in range(2):
        np.testing.assert_array_equal(reader.read("image"), case["image"])
    assert 0 < small_cache._chunks.used_bytes <= 60_000


def test_disk_cache_serves_another_process(gcs: Bucket, emulator: Emulator, tmp_path: Path) -> None:
    case = make_case()
    metadata = write_to_bucket(gcs, case)
    disk = DiskCache(tmp_path / "cache", 1 << 30)
    for whole_bytes in (0, 1 << 20):
        for repetition in range(2):
            volumes = pickle.loads(pickle.dumps(VolumeCache(gcs.store, disk=disk, whole_bytes=whole_bytes)))
            reader = volumes.open("cases/a.zarr", metadata)
            emulator.reset_counters()
            for name in ("image", "label"):
                np.testing.assert_array_equal(reader.read(name), case[name])
            assert (emulator.counters().requests == 0) == bool(repetition)


def test_requests_of_several_patches_overlap(gcs: Bucket, emulator: Emulator) -> None:
    case = make_case()
    metadata = write_to_bucket(gcs, case)
    volumes = make_range_readers(gcs, memory_bytes=0)
    reader = volumes.open("cases/a.zarr", metadata)
    latency_s = 1.0  # long enough that all requests overlap, even on a busy machine
    emulator.set_faults(Faults(latency_s=latency_s))
    emulator.reset_counters()
    corners = [(z, y, x) for z in (0, 18) for y in (0, 38) for x in (45, 58)]
    pending = [(c, reader.start(n, c, [v + 32 for v in c]), n) for c in corners for n in ("image", "label")]
    for corner, future, name in pending:
        region = (..., *(slice(v, v + 32) for v in corner))
        np.testing.assert_array_equal(future.result(), case[name][region])
    assert emulator.counters().max_concurrent >= 16
    assert reader.shared.timing.wait_s < 16 * latency_s


def test_100_cases_share_one_client(folder: Bucket) -> None:
    metadata = write_to_bucket(folder, make_case(shape=(1, 24, 60, 90)), patch=(16, 16, 16))
    volumes = VolumeCache(folder.store)
    before = threading.active_count()
    readers = [volumes.open(folder.key("cases/a.zarr"), metadata) for _ in range(100)]
    for reader in readers:
        reader.read("label", (0, 0, 0), (8, 8, 8))
    assert threading.active_count() - before <= folder.store.config.max_concurrency
    assert volumes.timing.regions == 100
    assert volumes.timing.requests == 1


# -- threads and processes ---------------------------------------------------------------------------------------------


def test_many_threads(gcs: Bucket) -> None:
    case = make_case()
    metadata = write_to_bucket(gcs, case)
    reader = make_range_readers(gcs, memory_bytes=100_000).open("cases/a.zarr", metadata)

    def read(index: int) -> bool:
        low = (index % 18, index % 38, index % 58)
        region = (..., *(slice(v, v + 32) for v in low))
        return bool(np.array_equal(reader.read("image", low, [v + 32 for v in low]), case["image"][region]))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(60)))
    assert reader.shared.timing.regions == 60


def _put_sum(reader: VolumeReader, results: Any) -> None:
    results.put((int(reader.read("image", (0, 0, 40), (32, 32, 72)).sum()), reader.shared.timing.regions))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_readers_work_in_other_processes(gcs: Bucket, method: str) -> None:
    case = make_case()
    metadata = write_to_bucket(gcs, case)
    reader = make_range_readers(gcs).open("cases/a.zarr", metadata)
    expected = int(case["image"][:, :32, :32, 40:72].sum())
    assert int(reader.read("image", (0, 0, 40), (32, 32, 72)).sum()) == expected
    context: Any = multiprocessing.get_context(method)
    results = context.Queue()
    process = context.Process(target=_put_sum, args=(reader, results))
    process.start()
    assert results.get(timeout=150) == (expected, 1)
    process.join()


# -- errors ------------------------------------------------------------------------------------------------------------


def test_newly_prepared_case_is_detected(shared_bucket: Bucket) -> None:
    metadata = write_to_bucket(shared_bucket, make_case(0))
    reader = make_range_readers(shared_bucket).open(shared_bucket.key("cases/a.zarr"), metadata)
    reader.read("image", (0, 0, 40), (8, 8, 48))
    write_to_bucket(shared_bucket, make_case(1))
    with pytest.raises(PreparedError, match=r"image/c/0/0/0/0: .* not the one that was prepared.*voxlane cp"):
        reader.read("image", (30, 30, 60), (40, 40, 70))


def test_missing_object_is_detected(gcs: Bucket) -> None:
    metadata = write_to_bucket(gcs, make_case())
    gcs.store.delete("cases/a.zarr/image/c/0/0/0/0")
    reader = VolumeCache(gcs.store).open("cases/a.zarr", metadata)
    for _ in range(2):
        with pytest.raises(PreparedError, match="image/c/0/0/0/0: an object of the prepared dataset is missing"):
            reader.read("image")


@pytest.mark.parametrize("whole_bytes", [0, 1 << 20])
def test_errors_name_damaged_data(folder: Bucket, whole_bytes: int) -> None:
    case = make_case()
    metadata = write_to_bucket(folder, case)
    path = Path(folder.uri.removeprefix("file://")) / "cases/a.zarr/image/c/0/0/0/0"
    body = bytearray(path.read_bytes())
    body[-1000] ^= 1
    path.write_bytes(body)
    unversioned = {**metadata, "objects": [[name, size, None, None, None] for name, size, *_ in metadata["objects"]]}
    reader = VolumeCache(folder.store, whole_bytes=whole_bytes).open(folder.key("cases/a.zarr"), unversioned)
    with pytest.raises(PreparedError, match=r"c/0/0/0/0: chunk \d+ \(bytes \d+ to \d+\) is damaged: its checksum"):
        reader.read("image")
    body[3] ^= 1
    path.write_bytes(body)
    reader = VolumeCache(folder.store, whole_bytes=whole_bytes).open(folder.key("cases/a.zarr"), unversioned)
    with pytest.raises(PreparedError, match=r"c/0/0/0/0: the shard's index is damaged"):
        reader.read("image")
    path.write_bytes(body[:50])
    reader = VolumeCache(folder.store, whole_bytes=whole_bytes).open(folder.key("cases/a.zarr"), unversioned)
    with pytest.raises(PreparedError, match=r"c/0/0/0/0: the object is shorter"):
        reader.read("image")


def test_server_faults_are_retried(gcs: Bucket, emulator: Emulator) -> None:
    case = make_case()
    metadata = write_to_bucket(gcs, case)
    emulator.set_faults(Faults(error_rate=0.2, cut_rate=0.1, truncate_rate=0.1, seed=3))
    reader = VolumeCache(gcs.store, whole_bytes=0, max_gap_bytes=0, memory_bytes=0).open("cases/a.zarr", metadata)
    for name in ("image", "label"):
        np.testing.assert_array_equal(reader.read(name), case[name])
    assert gcs.store.counters.read().retries == 0  # the retries are counted by the store of the reader
    assert reader.shared.store.counters.read().retries > 0


def test_failed_write_leaves_no_case(gcs: Bucket, emulator: Emulator) -> None:
    emulator.set_faults(Faults(error_rate=1.0, error_statuses=(403,), key_prefix="cases/a.zarr/label"))
    with pytest.raises(Exception, match="label"):
        write_to_bucket(gcs, make_case())
    emulator.clear_faults()
    assert not gcs.store.exists("cases/a.zarr/zarr.json")


def test_arrays_of_wrong_shape_are_rejected(folder: Bucket) -> None:
    case = make_case()
    with pytest.raises(ConfigError, match=r"Pass an array of shape \(C, Z, Y, X\)"):
        write_to_bucket(folder, {**case, "image": case["image"][0]})
    with pytest.raises(ConfigError, match="label: shape"):
        write_to_bucket(folder, {**case, "label": case["label"][1:]})
    with pytest.raises(ConfigError, match="Pass N x 4"):
        write_to_bucket(folder, {**case, "foreground": case["foreground"][:, :3]})
    with pytest.raises(ConfigError, match="below zero"):
        VolumeCache(folder.store, memory_bytes=-1)


def test_threads_of_a_forked_child_share_one_state(folder: Bucket) -> None:
    metadata = write_to_bucket(folder, make_case())
    cache = VolumeCache(folder.store)
    context = multiprocessing.get_context("fork")
    ended = context.Queue()

    def read_in_child() -> None:
        barrier = threading.Barrier(16)
        states = []

        def enter(_: int) -> None:
            barrier.wait()
            cache._enter_process()
            states.append(id(cache._opening))
            cache.open(folder.key("cases/a.zarr"), metadata).read("label")

        with ThreadPoolExecutor(16) as pool:
            list(pool.map(enter, range(16)))
        ended.put(len(set(states)))

    sys.setswitchinterval(1e-6)
    try:
        for _ in range(5):
            process = context.Process(target=read_in_child)
            process.start()
            assert ended.get(timeout=60) == 1
            process.join()
    finally:
        sys.setswitchinterval(0.005)
