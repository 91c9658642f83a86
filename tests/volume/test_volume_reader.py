"""Cases written to real servers and read back, by us and by other Zarr libraries."""

from __future__ import annotations

import json
import multiprocessing
import pickle
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
from voxlane.volume.array import ArrayMeta
from voxlane.volume.case_writer import write_arrays, write_case
from voxlane.volume.codec import image_codecs
from voxlane.volume.volume_reader import VolumeReader, Volumes, read_metadata

ATTRIBUTES = {"spacing": [3.0, 0.8, 0.8], "note": "phantom"}
SHAPE = (2, 50, 70, 90)


def make_case(seed: int = 0, shape: tuple[int, ...] = SHAPE) -> dict[str, Any]:
    """Noise that hardly compresses in one half, air in the other, and a small organ."""
    random = np.random.default_rng(seed)
    image = random.integers(-1000, 1000, shape).astype(np.int16)
    image[..., : shape[-1] // 2] = -79
    label = np.zeros(shape[1:], np.uint8)
    label[10:20, 30:50, 60:85] = 1
    label[12:16, 35:40, 65:70] = 2
    places = np.argwhere(label)[::500]
    foreground = np.column_stack([label[tuple(places.T)], places]).astype(np.int32)
    return {"image": image, "label": label, "foreground": foreground, "attributes": ATTRIBUTES}


def write(bucket: Bucket, case: dict[str, Any], name: str = "cases/a.zarr", patch: Any = (32, 32, 32)) -> Any:
    metadata = write_case(bucket.store, bucket.key(name), patch=patch, **case)
    return json.loads(json.dumps(metadata))  # what a manifest does to it


def always_ranges(bucket: Bucket, **changes: Any) -> Volumes:
    """Readers that do not read small objects whole."""
    return Volumes(bucket.store, whole_bytes=0, **changes)


def test_every_kind_of_store_gives_back_what_was_written(bucket: Bucket) -> None:
    case = make_case()
    metadata = write(bucket, case)
    for volumes in (Volumes(bucket.store), always_ranges(bucket, memory_bytes=0)):
        for known in (metadata, None):
            reader = volumes.open(bucket.key("cases/a.zarr"), known)
            for name in ("image", "label", "foreground"):
                found = reader.read(name)
                assert found.dtype == case[name].dtype
                np.testing.assert_array_equal(found, case[name])


def test_metadata_read_from_the_bucket_is_what_the_writer_returned(shared_bucket: Bucket) -> None:
    metadata = write(shared_bucket, make_case())
    found = json.loads(json.dumps(read_metadata(shared_bucket.store, shared_bucket.key("cases/a.zarr"))))
    for one in (metadata, found):
        one["objects"] = [[name, size, etag.strip('"')] for name, size, etag in one["objects"]]
    assert found == metadata


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_region_is_the_slice_of_the_array(gcs: Bucket, data: st.DataObject) -> None:
    case = make_case()
    if not gcs.store.exists("cases/a.zarr/zarr.json"):
        write(gcs, case)
    volumes = always_ranges(gcs, memory_bytes=data.draw(st.sampled_from([0, 50_000, 1 << 30])))
    reader = volumes.open("cases/a.zarr")
    for name in ("image", "label"):
        shape = case[name].shape[-3:]
        start = [data.draw(st.integers(0, n - 1)) for n in shape]
        stop = [data.draw(st.integers(a + 1, n)) for a, n in zip(start, shape, strict=True)]
        inside = (..., *map(slice, start, stop))
        for _ in range(2):
            np.testing.assert_array_equal(reader.read(name, start, stop), case[name][inside])
        low = [data.draw(st.integers(-30, n + 10)) for n in shape]
        high = [data.draw(st.integers(a + 1, a + 60)) for a in low]
        lead = len(case[name].shape) - 3
        padded = np.pad(case[name], [(0, 0)] * lead + [(100, 100)] * 3, constant_values=7)
        expected = padded[(..., *(slice(a + 100, b + 100) for a, b in zip(low, high, strict=True)))]
        np.testing.assert_array_equal(reader.read_padded(name, low, high, 7), expected)


@pytest.mark.parametrize("index_at", ["start", "end"])
def test_slabs_and_both_places_of_the_index(folder: Bucket, index_at: str) -> None:
    image = make_case()["image"]
    meta = ArrayMeta(SHAPE, "int16", (2, 8, 16, 20), image_codecs("int16", (2, 8, 16, 20)), (2, 16, 48, 100), index_at)
    metadata = write_arrays(folder.store, folder.key("a"), {"image": image}, {"image": meta}, {})
    assert len(metadata["objects"]) == 4 * 2
    for volumes in (Volumes(folder.store), always_ranges(folder)):
        reader = volumes.open(folder.key("a"), metadata)
        np.testing.assert_array_equal(reader.read("image"), image)
        np.testing.assert_array_equal(
            reader.read("image", (1, 13, 40, 3), (2, 33, 60, 77)), image[1:2, 13:33, 40:60, 3:77]
        )
    check_with_zarr(folder, "a", {"image": image})


def check_with_zarr(folder: Bucket, name: str, arrays: dict[str, Any]) -> Any:
    """zarr-python and tensorstore read the same voxels."""
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
    write(folder, case)
    group = check_with_zarr(folder, "cases/a.zarr", {n: case[n] for n in ("image", "label", "foreground")})
    assert dict(group.attrs) == ATTRIBUTES
    assert group["image"].metadata.dimension_names == ("c", "z", "y", "x")


def test_we_read_what_zarr_python_wrote(folder: Bucket) -> None:
    import zarr

    image = make_case()["image"]
    path = folder.uri.removeprefix("file://") + "/other"
    written = zarr.create_array(
        path, shape=SHAPE, dtype="int16", chunks=(2, 10, 10, 10), shards=(2, 20, 30, 90), fill_value=0
    )
    written[...] = image
    meta = ArrayMeta.from_zarr(json.loads(Path(f"{path}/zarr.json").read_text()), "other")
    objects = [[f"other/{p.relative_to(path)}", p.stat().st_size, None] for p in Path(path).rglob("*") if p.is_file()]
    metadata = {"other": meta.to_metadata(), "objects": objects}
    reader = always_ranges(folder).open(folder.key(""), metadata)
    np.testing.assert_array_equal(reader.read("other"), image)


def test_without_a_label_and_without_foreground(folder: Bucket) -> None:
    case = {**make_case(), "label": None, "foreground": np.empty((0, 4), np.int32)}
    metadata = write(folder, case)
    reader = VolumeReader(folder.store, folder.key("cases/a.zarr"), metadata=metadata)
    assert reader.read("foreground").shape == (0, 4)
    np.testing.assert_array_equal(reader.read("image"), case["image"])
    with pytest.raises(PreparedError, match="has no 'label'; it has foreground, image"):
        reader.start("label")


def test_air_is_not_stored(folder: Bucket) -> None:
    case = make_case()
    case["image"][..., 85:] = -79
    metadata = write(folder, case)
    assert metadata["image"]["fill"] == -79
    reader = always_ranges(folder).open(folder.key("cases/a.zarr"), metadata)
    assert (reader.read("image", (0, 0, 0), (50, 70, 30)) == -79).all()
    assert reader.timing.requests == 1  # the index
    infinite = np.full((1, 40, 40, 40), np.inf, np.float32)
    metadata = write(folder, {**case, "image": infinite, "label": None}, "cases/b.zarr")
    np.testing.assert_array_equal(always_ranges(folder).open(folder.key("cases/b.zarr")).read("image"), infinite)


def test_an_empty_label_costs_no_chunk(folder: Bucket) -> None:
    case = make_case()
    case["label"][:] = 0
    metadata = write(folder, case)
    reader = always_ranges(folder).open(folder.key("cases/a.zarr"), metadata)
    assert not reader.read("label").any()
    assert reader.timing.requests == 1
    check_with_zarr(folder, "cases/a.zarr", {"label": case["label"]})


# -- what it costs ---------------------------------------------------------------------------------------------------


def test_a_patch_reads_the_index_once_and_only_its_chunks(gcs: Bucket, emulator: Emulator) -> None:
    metadata = write(gcs, make_case())
    chunk = metadata["image"]["chunk"]
    volumes = Volumes(gcs.store, whole_bytes=0, max_gap_bytes=0, memory_bytes=0)
    reader = volumes.open("cases/a.zarr", metadata)
    emulator.reset_counters()
    reader.read("image", (0, 0, 64), (16, 16, 80))
    first = emulator.counters()
    assert first.requests == first.get.requests
    index_bytes = ArrayMeta.from_metadata(metadata["image"]).index_bytes
    most = 4 * 2 * np.prod(chunk) + index_bytes  # at most 2 x 2 x 1 chunks, of noise
    assert index_bytes < first.bytes_out <= most * 1.01
    reader.read("image", (0, 0, 64), (16, 16, 80))
    second = emulator.counters()
    assert second.bytes_out - first.bytes_out == first.bytes_out - index_bytes
    assert (reader.timing.requests, reader.timing.bytes_read) == (second.requests, second.bytes_out)
    assert reader.timing.regions == 2
    assert reader.timing.decode_s > 0
    assert reader.timing.wait_s > 0


def test_a_small_object_is_one_request(gcs: Bucket, emulator: Emulator) -> None:
    metadata = write(gcs, make_case())
    reader = VolumeReader(gcs.store, "cases/a.zarr", metadata=metadata)
    emulator.reset_counters()
    for _ in range(3):
        reader.read("label", (0, 0, 0), (32, 32, 32))
        reader.read("label", (10, 30, 50), (42, 62, 82))
    assert emulator.counters().requests == 1


def test_memory_holds_what_was_read_within_its_bound(gcs: Bucket, emulator: Emulator) -> None:
    case = make_case()
    metadata = write(gcs, case)
    volumes = always_ranges(gcs)
    reader = volumes.open("cases/a.zarr", metadata)
    reader.read("image")
    emulator.reset_counters()
    np.testing.assert_array_equal(reader.read("image"), case["image"])
    assert emulator.counters().requests == 0
    assert reader.timing.memory_hits > 0
    small = always_ranges(gcs, memory_bytes=60_000)
    reader = small.open("cases/a.zarr", metadata)
    for _ in range(2):
        np.testing.assert_array_equal(reader.read("image"), case["image"])
    assert 0 < small._chunks.used_bytes <= 60_000


def test_the_disk_cache_serves_another_process_without_requests(
    gcs: Bucket, emulator: Emulator, tmp_path: Path
) -> None:
    case = make_case()
    metadata = write(gcs, case)
    disk = DiskCache(tmp_path / "cache", 1 << 30)
    for whole_bytes in (0, 1 << 20):
        for turn in range(2):
            volumes = pickle.loads(pickle.dumps(Volumes(gcs.store, disk=disk, whole_bytes=whole_bytes)))
            reader = volumes.open("cases/a.zarr", metadata)
            emulator.reset_counters()
            for name in ("image", "label"):
                np.testing.assert_array_equal(reader.read(name), case[name])
            assert (emulator.counters().requests == 0) == bool(turn)


def test_requests_of_many_patches_are_in_flight_together(gcs: Bucket, emulator: Emulator) -> None:
    case = make_case()
    metadata = write(gcs, case)
    volumes = always_ranges(gcs, memory_bytes=0)
    reader = volumes.open("cases/a.zarr", metadata)
    emulator.set_faults(Faults(latency_s=0.05))
    emulator.reset_counters()
    corners = [(z, y, x) for z in (0, 18) for y in (0, 38) for x in (45, 58)]
    pending = [(c, reader.start(n, c, [v + 32 for v in c]), n) for c in corners for n in ("image", "label")]
    for corner, one, name in pending:
        inside = (..., *(slice(v, v + 32) for v in corner))
        np.testing.assert_array_equal(one.result(), case[name][inside])
    assert emulator.counters().max_concurrent >= 16
    assert reader.timing.wait_s < 16 * 0.05


def test_100_cases_share_one_client(folder: Bucket) -> None:
    metadata = write(folder, make_case(shape=(1, 24, 60, 90)), patch=(16, 16, 16))
    volumes = Volumes(folder.store)
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
    metadata = write(gcs, case)
    reader = always_ranges(gcs, memory_bytes=100_000).open("cases/a.zarr", metadata)

    def read(turn: int) -> bool:
        low = (turn % 18, turn % 38, turn % 58)
        inside = (..., *(slice(v, v + 32) for v in low))
        return bool(np.array_equal(reader.read("image", low, [v + 32 for v in low]), case["image"][inside]))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(60)))
    assert reader.timing.regions == 60


def _sum_of(reader: VolumeReader, answers: Any) -> None:
    answers.put((int(reader.read("image", (0, 0, 40), (32, 32, 72)).sum()), reader.timing.regions))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_readers_go_to_other_processes(gcs: Bucket, method: str) -> None:
    case = make_case()
    metadata = write(gcs, case)
    reader = always_ranges(gcs).open("cases/a.zarr", metadata)
    expected = int(case["image"][:, :32, :32, 40:72].sum())
    assert int(reader.read("image", (0, 0, 40), (32, 32, 72)).sum()) == expected
    context: Any = multiprocessing.get_context(method)
    answers = context.Queue()
    process = context.Process(target=_sum_of, args=(reader, answers))
    process.start()
    assert answers.get(timeout=60) == (expected, 1)
    process.join()


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def test_a_case_that_was_prepared_again_is_noticed(shared_bucket: Bucket) -> None:
    metadata = write(shared_bucket, make_case(0))
    reader = always_ranges(shared_bucket).open(shared_bucket.key("cases/a.zarr"), metadata)
    reader.read("image", (0, 0, 40), (8, 8, 48))
    write(shared_bucket, make_case(1))
    with pytest.raises(PreparedError, match=r"image/c/0/0/0/0: the object changed .*voxlane prepare"):
        reader.read("image", (30, 30, 60), (40, 40, 70))


def test_a_missing_object_is_noticed(gcs: Bucket) -> None:
    metadata = write(gcs, make_case())
    gcs.store.delete("cases/a.zarr/image/c/0/0/0/0")
    reader = VolumeReader(gcs.store, "cases/a.zarr", metadata=metadata)
    for _ in range(2):
        with pytest.raises(PreparedError, match="image/c/0/0/0/0: an object of the prepared dataset is gone"):
            reader.read("image")


def test_an_unfinished_case_is_no_case(gcs: Bucket) -> None:
    write(gcs, make_case())
    gcs.store.delete("cases/a.zarr/zarr.json")
    with pytest.raises(PreparedError, match="not finished"):
        VolumeReader(gcs.store, "cases/a.zarr").read("image")


@pytest.mark.parametrize("whole_bytes", [0, 1 << 20])
def test_damage_is_noticed_and_named(folder: Bucket, whole_bytes: int) -> None:
    case = make_case()
    metadata = write(folder, case)
    path = Path(folder.uri.removeprefix("file://")) / "cases/a.zarr/image/c/0/0/0/0"
    body = bytearray(path.read_bytes())
    body[-1000] ^= 1
    path.write_bytes(body)
    unversioned = {**metadata, "objects": [[name, size, None] for name, size, _ in metadata["objects"]]}
    reader = Volumes(folder.store, whole_bytes=whole_bytes).open(folder.key("cases/a.zarr"), unversioned)
    with pytest.raises(PreparedError, match=r"c/0/0/0/0: chunk \d+ \(bytes \d+ to \d+\) is damaged: its checksum"):
        reader.read("image")
    body[3] ^= 1
    path.write_bytes(body)
    reader = Volumes(folder.store, whole_bytes=whole_bytes).open(folder.key("cases/a.zarr"), unversioned)
    with pytest.raises(PreparedError, match=r"c/0/0/0/0: the shard's index is damaged"):
        reader.read("image")
    path.write_bytes(body[:50])
    reader = Volumes(folder.store, whole_bytes=whole_bytes).open(folder.key("cases/a.zarr"), unversioned)
    with pytest.raises(PreparedError, match=r"c/0/0/0/0: the object is shorter"):
        reader.read("image")


def test_a_flaky_bucket_only_costs_time(gcs: Bucket, emulator: Emulator) -> None:
    case = make_case()
    metadata = write(gcs, case)
    emulator.set_faults(Faults(error_rate=0.2, cut_rate=0.1, truncate_rate=0.1, seed=3))
    reader = Volumes(gcs.store, whole_bytes=0, max_gap_bytes=0, memory_bytes=0).open("cases/a.zarr", metadata)
    for name in ("image", "label"):
        np.testing.assert_array_equal(reader.read(name), case[name])
    assert gcs.store.counters.read().retries == 0  # that store made none; the reader's did
    assert reader.shared.store.counters.read().retries > 0


def test_a_killed_write_leaves_no_case(gcs: Bucket, emulator: Emulator) -> None:
    emulator.set_faults(Faults(error_rate=1.0, error_statuses=(403,), key_prefix="cases/a.zarr/label"))
    with pytest.raises(Exception, match="label"):
        write(gcs, make_case())
    emulator.clear_faults()
    with pytest.raises(PreparedError, match="not finished"):
        VolumeReader(gcs.store, "cases/a.zarr").read("image")


def test_arrays_that_do_not_fit_are_refused(folder: Bucket) -> None:
    case = make_case()
    with pytest.raises(ConfigError, match="Give \\(C, Z, Y, X\\)"):
        write(folder, {**case, "image": case["image"][0]})
    with pytest.raises(ConfigError, match="a label of shape"):
        write(folder, {**case, "label": case["label"][1:]})
    with pytest.raises(ConfigError, match="Give N x 4"):
        write(folder, {**case, "foreground": case["foreground"][:, :3]})
    with pytest.raises(ConfigError, match="below zero"):
        Volumes(folder.store, memory_bytes=-1)
