"""Patches from prepared volumes: their order, their contents, and the requests they need."""

from __future__ import annotations

import pickle
import shutil
import threading
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import Bucket
from tests.volume import sample_data
from voxlane import DataLoader
from voxlane.dataset.prefetch import window_after
from voxlane.errors import ConfigError, PreparedError, StateError
from voxlane.testing import Emulator
from voxlane.volume.case_volumes import CacheLimits, Cases
from voxlane.volume.patch_sampling import case_for_position, draw_patch, is_forced
from voxlane.volume.patch_stream import PatchStream
from voxlane.volume.prepared_dataset import Prepared

SAMPLES = 26
Sample = dict[str, Any]


@pytest.fixture(scope="module", autouse=True)
def single_torch_thread() -> Any:
    """Use one torch thread, because forked children do not inherit the others."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_stream(dataset: Prepared, **changes: Any) -> PatchStream:
    return PatchStream(dataset, **{"samples": SAMPLES, "seed": 3, "in_flight": 4, **changes})


def sample_key(sample: Sample) -> tuple[int, int, int, bytes, bytes]:
    """Return the contents of a sample in a form that can be compared."""
    position, row, seed = (int(sample[name]) for name in ("position", "row", "seed"))
    return position, row, seed, sample["image"].numpy().tobytes(), sample["label"].numpy().tobytes()


def split_batches(batches: Sequence[Sample]) -> list[Sample]:
    """Return the samples of collated batches."""
    return [{name: batch[name][i] for name in batch} for batch in batches for i in range(len(batch["row"]))]


def sample_keys(samples: Sequence[Sample]) -> list[Any]:
    return [sample_key(sample) for sample in samples]


@pytest.fixture(scope="module")
def full_epoch(tiny: Prepared) -> list[Any]:
    """Return the keys of an epoch in one process."""
    return sample_keys(list(make_stream(tiny)))


def prepare_in_bucket(bucket: Bucket, folder: Path) -> Prepared:
    """Prepare the same cases in a bucket, and return the dataset."""
    src = sample_data.upload(bucket, sample_data.make_kits19(), "scans/")
    return sample_data.prepare_dataset(src, f"{bucket.uri}/data", bucket.config).prepared


# -- contents of patches -----------------------------------------------------------------------------------------------


def zarr_case(folder: Path, case: str) -> Any:
    return zarr.open_group(str(folder / "cases" / f"{case}.zarr"), mode="r")


def read_region(array: np.ndarray, start: Any, patch: Any) -> np.ndarray:
    """Return a region of an array, with zeros outside the array."""
    result = np.zeros((*array.shape[:-3], *patch), array.dtype)
    low = [max(0, a) for a in start]
    high = [min(n, a + p) for a, p, n in zip(start, patch, array.shape[-3:], strict=True)]
    result[(..., *(slice(a - s, b - s) for a, b, s in zip(low, high, start, strict=True)))] = array[
        (..., *map(slice, low, high))
    ]
    return result


@pytest.mark.parametrize("patch", [(16, 16, 16), (24, 8, 40), (1, 1, 1)])
@pytest.mark.parametrize("placement", ["centre", "inside"])
def test_patches_match_slices_read_by_zarr(tiny: Prepared, tiny_folder: Path, patch: Any, placement: Any) -> None:
    actual = list(make_stream(tiny, patch=patch, placement=placement, foreground_share=0.5))
    assert [s["position"] for s in actual] == list(range(SAMPLES))
    outside = 0
    for sample in actual:
        case = tiny.case(sample["row"])
        assert sample["row"] == case_for_position(sample["position"], cases=6, samples=SAMPLES, seed=3, epoch=0)
        group = zarr_case(tiny_folder, case.id)
        scale, offset = (np.float32(group.attrs[a]) for a in ("scale_factor", "add_offset"))
        assert offset[0] != 0  # the stored 0 of a CT is not the 0 of the network
        values = group["image"][...] * scale[:, None, None, None] + offset[:, None, None, None]
        foreground = group["foreground"][...]
        start = draw_patch(
            sample["position"],
            seed=3,
            epoch=0,
            patch=patch,
            shape=case.shape,
            foreground=foreground if is_forced(sample["position"], 0.5) else None,
            placement=placement,
        )
        assert sample["image"].dtype == torch.float32
        assert sample["image"].shape == (1, *patch)
        np.testing.assert_allclose(sample["image"], read_region(values, start, patch), rtol=1e-6, atol=1e-6)
        assert sample["label"].dtype == torch.uint8
        np.testing.assert_array_equal(sample["label"], read_region(group["label"][...], start, patch))
        outside += any(p > n for p, n in zip(patch, case.shape, strict=True))
    assert bool(outside) == (max(patch) > 1)  # the volumes have 13 to 18 slices


def test_regions_outside_a_volume_are_zero(tiny: Prepared) -> None:
    volume = Cases(tiny).open(0)
    image, label = volume.read_whole()
    assert image.shape[1:] == label.shape == volume.shape
    padded_image, padded_label = volume.read_padded((-3, -2, -1), tuple(n + 5 for n in volume.shape))  # type: ignore[arg-type]
    z, y, x = volume.shape
    torch.testing.assert_close(padded_image[:, 3 : z + 3, 2 : y + 2, 1 : x + 1], image, rtol=0, atol=0)
    frame = torch.ones(padded_image.shape[1:], dtype=torch.bool)
    frame[3 : z + 3, 2 : y + 2, 1 : x + 1] = False
    assert not padded_image[0][frame].any()
    assert not padded_label[frame].any()
    outside_image, outside_label = volume.read_padded((z + 9, 0, -99), (4, 4, 4))
    assert not outside_image.any()
    assert not outside_label.any()


def test_foreground_patches_contain_foreground(tiny: Prepared) -> None:
    actual = list(make_stream(tiny, patch=(4, 4, 4), foreground_share=1.0))
    assert all(sample["label"].any() for sample in actual)
    assert {int(v) for s in actual for v in s["label"].unique()} == {0, 1, 2}
    unforced = list(make_stream(tiny, patch=(4, 4, 4), foreground_share=0.0))
    assert not all(sample["label"].any() for sample in unforced)


# -- order and resume --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_ranks_split_an_epoch(tiny: Prepared, full_epoch: list[Any], world_size: int, batch_size: int) -> None:
    by_rank = [
        sample_keys(split_batches(list(DataLoader(make_stream(tiny, rank=rank, world_size=world_size), batch_size))))
        for rank in range(world_size)
    ]
    assert sorted(chain.from_iterable(by_rank)) == sorted(full_epoch)
    for rank, actual in enumerate(by_rank):
        assert actual == full_epoch[rank::world_size]


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_give_the_same_samples_in_the_same_order(tiny: Prepared, full_epoch: list[Any], context: str) -> None:
    workers = 2 if context == "fork" else 1
    loader = DataLoader(
        make_stream(tiny), 4, num_workers=workers, multiprocessing_context=context, persistent_workers=True
    )
    assert len(loader) == 7
    assert sample_keys(split_batches(list(loader))) == full_epoch
    second = sample_keys(split_batches(list(loader)))
    reference = make_stream(tiny)
    reference.set_epoch(1)
    assert second == sample_keys(list(reference)) != full_epoch
    del loader


def test_samples_depend_on_rows_seed_and_epoch(tiny: Prepared, full_epoch: list[Any]) -> None:
    assert sample_keys(list(make_stream(tiny))) == full_epoch
    assert sample_keys(list(make_stream(tiny, seed=4))) != full_epoch
    assert {s["row"] for s in make_stream(tiny, rows=[1, 4])} == {1, 4}
    counts = np.bincount([k[1] for k in full_epoch])
    assert counts.max() - counts.min() <= 1
    iterated = make_stream(tiny)
    assert (
        sample_keys(list(iterated)) == sample_keys(list(iterated)) == full_epoch
    )  # the epoch stays until another is set


@pytest.mark.parametrize("consumed", [0, 1, 4, 6])
@pytest.mark.parametrize(("before", "after"), [((1, 2), (1, 2)), ((2, 2), (1, 3)), ((1, 4), (3, 1)), ((2, 1), (2, 3))])
def test_resume_with_other_ranks_and_batches_is_exact(
    tiny: Prepared, full_epoch: list[Any], consumed: int, before: tuple[int, int], after: tuple[int, int]
) -> None:
    consumed_keys: list[Any] = []
    states = []
    for rank in range(before[0]):
        loader = DataLoader(make_stream(tiny, rank=rank, world_size=before[0]), before[1])
        batches = iter(loader)
        consumed_keys += sample_keys(split_batches([next(batches) for _ in range(consumed)]))
        states.append(loader.state_dict())
        batches.close()  # type: ignore[attr-defined]
    assert all(state == states[0] for state in states)
    state = pickle.loads(pickle.dumps(states[0]))
    remaining_keys: list[Any] = []
    next_epoch_keys: list[Any] = []
    for rank in range(after[0]):
        # The seed of the state takes precedence.
        loader = DataLoader(make_stream(tiny, rank=rank, world_size=after[0], seed=99), after[1])
        loader.load_state_dict(state)
        remaining_keys += sample_keys(split_batches(list(loader)))
        next_epoch_keys += sample_keys(split_batches(list(loader)))
    assert sorted(consumed_keys + remaining_keys) == sorted(full_epoch)
    reference = make_stream(tiny)
    reference.set_epoch(1)
    assert sorted(next_epoch_keys) == sorted(sample_keys(list(reference)))


def test_state_at_the_end_of_an_epoch_starts_the_next(tiny: Prepared) -> None:
    loader = DataLoader(make_stream(tiny), 4)
    for _ in loader:
        state = loader.state_dict()  # checkpoints are also taken inside the loop
    assert (state["epoch"], state["consumed"]) == (1, 0)
    assert loader.state_dict() == state
    resumed = DataLoader(make_stream(tiny), 4)
    resumed.load_state_dict(state)
    assert sample_keys(split_batches(list(resumed))) == sample_keys(split_batches(list(loader)))


def test_resume_with_workers(tiny: Prepared, full_epoch: list[Any]) -> None:
    loader = DataLoader(make_stream(tiny), 2, num_workers=2, multiprocessing_context="fork")
    batches = iter(loader)
    consumed_keys = sample_keys(split_batches([next(batches) for _ in range(3)]))
    state = loader.state_dict()
    batches.close()  # type: ignore[attr-defined]
    resumed = DataLoader(make_stream(tiny), 3, num_workers=1, multiprocessing_context="fork")
    resumed.load_state_dict(state)
    assert consumed_keys + sample_keys(split_batches(list(resumed))) == full_epoch


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": [0, 1, 2]},
        {"patch": (8, 8, 8)},
        {"samples": SAMPLES + 1},
        {"foreground_share": 0.5},
        {"placement": "inside"},
    ],
)
def test_state_of_another_stream_is_rejected(tiny: Prepared, changes: dict[str, Any]) -> None:
    state = DataLoader(make_stream(tiny)).state_dict()
    with pytest.raises(StateError, match="Resume over the prepared dataset and the split of the first run"):
        DataLoader(make_stream(tiny, **changes)).load_state_dict(state)


def test_state_of_another_fold_of_equal_size_is_rejected(tiny: Prepared) -> None:
    state = DataLoader(make_stream(tiny, rows=[0, 1, 2])).state_dict()
    DataLoader(make_stream(tiny, rows=[0, 1, 2])).load_state_dict(state)
    with pytest.raises(StateError):
        DataLoader(make_stream(tiny, rows=[0, 1, 3])).load_state_dict(state)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": []}, "needs at least one case"),
        ({"rows": [0, 6]}, "rows: expected rows from 0 to 5"),
        ({"rows": [-1]}, "rows: expected rows from 0 to 5"),
        ({"samples": 0}, "samples=0"),
        ({"in_flight": 0}, "in_flight=0"),
        ({"foreground_share": 1.5}, r"foreground_share=1\.5"),
        ({"patch": (0, 4, 4)}, "patch="),
        ({"patch": (4, 4)}, "patch="),
        ({"placement": "corner"}, "placement='corner'"),
        ({"rank": 2, "world_size": 2}, "rank 2 of 2"),
    ],
)
def test_errors_name_the_argument(tiny: Prepared, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_stream(tiny, **changes)


def test_stream_survives_pickling(tiny: Prepared, full_epoch: list[Any]) -> None:
    started_stream = make_stream(tiny)
    next(iter(started_stream))
    assert sample_keys(list(pickle.loads(pickle.dumps(started_stream)))) == full_epoch
    volume = pickle.loads(pickle.dumps(Cases(tiny))).open(1)
    torch.testing.assert_close(volume.read_whole()[0], Cases(tiny).open(1).read_whole()[0])


def test_dropped_iterators_leave_no_work(tiny: Prepared, full_epoch: list[Any]) -> None:
    patch_stream = make_stream(tiny, in_flight=2)
    for _ in range(5):
        iterator = iter(patch_stream)
        next(iterator)
        del iterator
    assert sample_keys(list(patch_stream)) == full_epoch
    patch_threads = [t for t in threading.enumerate() if t.name.startswith("voxlane-patch")]
    assert len([t for t in patch_threads if t.is_alive()]) < 100


# -- requests and caches -----------------------------------------------------------------------------------------------


@pytest.fixture
def large_dataset(gcs: Bucket) -> Prepared:
    """Return a dataset with one case of noise, whose many chunks compress badly."""
    random = np.random.default_rng(0)
    image = random.integers(-200, 300, (96, 96, 96)).astype(np.int16)
    label = np.zeros(image.shape, np.uint8)
    label[40:50, 40:50, 40:50] = 1
    objects = {"case_00000/imaging.nii.gz": sample_data.encode_nifti(image, np.eye(4))}
    objects["case_00000/segmentation.nii.gz"] = sample_data.encode_nifti(label, np.eye(4))
    src = sample_data.upload(gcs, objects, "scans/")
    labels = {"labels": {"background": 0, "kidney": 1}}
    plan = {"patch": [32, 32, 32], "normalisation": [{"scheme": "none"}]}
    return sample_data.prepare_dataset(src, f"{gcs.uri}/data", gcs.config, plan=plan, description=labels).prepared


def test_only_chunks_of_the_patch_are_read(large_dataset: Prepared, emulator: Emulator) -> None:
    volume = Cases(large_dataset).open(0)
    full_image, full_label = volume.read_whole()
    case = large_dataset.case(0).volume
    stored = sum(size for _, size, *_ in case["objects"])
    chunk = case["image"]["chunk"][1:]
    assert chunk == [32, 32, 32]
    for start, patch, chunks_touched in (((0, 0, 0), (32, 32, 32), 1), ((33, 17, 50), (16, 16, 16), 4)):
        cases = Cases(large_dataset, max_gap_bytes=0)
        emulator.reset_counters()
        image, label = cases.open(0).read_padded(start, patch)
        bytes_read = emulator.counters().bytes_out
        region = tuple(slice(a, a + n) for a, n in zip(start, patch, strict=True))
        np.testing.assert_array_equal(image[0], full_image[0][region])
        np.testing.assert_array_equal(label, full_label[region])
        # Besides chunks (of 27), only the index of the image and the small label are read.
        assert bytes_read < 1.05 * chunks_touched / 27 * stored + 2000
        assert cases.timing().bytes_read == bytes_read
        emulator.reset_counters()
        cases.open(0).read_padded(start, patch)
        assert emulator.counters().requests == 0  # the chunks are in memory


def test_traffic_matches_the_server_counters(large_dataset: Prepared, emulator: Emulator) -> None:
    for workers in (0, 2):
        patch_stream = make_stream(large_dataset, samples=4)
        emulator.reset_counters()
        loader = DataLoader(patch_stream, 2, num_workers=workers, multiprocessing_context="fork" if workers else None)
        assert len(list(loader)) == 2
        counted, traffic = emulator.counters(), patch_stream.traffic()
        assert (traffic.bytes_read, traffic.requests) == (counted.bytes_out, counted.requests)


def test_without_memory_cache_chunks_are_read_again(large_dataset: Prepared, emulator: Emulator) -> None:
    cases = Cases(large_dataset, CacheLimits(ram_bytes=0))
    first, _ = cases.open(0).read_padded((0, 0, 0), (32, 32, 32))
    emulator.reset_counters()
    again, _ = cases.open(0).read_padded((0, 0, 0), (32, 32, 32))
    assert emulator.counters().bytes_out > 0
    torch.testing.assert_close(first, again, rtol=0, atol=0)


def test_disk_cache_serves_other_processes(large_dataset: Prepared, emulator: Emulator, tmp_path: Path) -> None:
    caching = CacheLimits(ram_bytes=0, folder=tmp_path / "cache")
    expected = sample_keys(list(make_stream(large_dataset, samples=6)))
    first = sample_keys(list(make_stream(large_dataset, samples=6, caching=caching)))
    emulator.reset_counters()
    second = sample_keys(list(make_stream(large_dataset, samples=6, caching=caching)))
    assert emulator.counters().requests == 0
    loader = DataLoader(
        make_stream(large_dataset, samples=6, caching=caching), 2, num_workers=1, multiprocessing_context="fork"
    )
    third = sample_keys(split_batches(list(loader)))
    assert emulator.counters().requests == 0
    assert first == second == third == expected


def test_memory_cache_stays_within_its_limit(large_dataset: Prepared) -> None:
    cases = Cases(large_dataset, CacheLimits(ram_bytes=100_000))
    first, _ = cases.open(0).read_whole()
    again, _ = cases.open(0).read_whole()
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    assert 0 < cases._volumes._chunks.used_bytes <= 100_000


# -- changed data ------------------------------------------------------------------------------------------------------


def drain(dataset: Prepared, **loading: Any) -> None:
    for _ in DataLoader(make_stream(dataset), 2, **loading):
        pass


def test_missing_or_changed_volume_error_gives_advice(tiny_folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "data"
    dataset = sample_data.prepare_dataset(str(tiny_folder.parent / "scans"), str(copy)).prepared
    image = copy / "cases" / "case_00002.zarr" / "image" / "c" / "0" / "0" / "0" / "0"
    body = image.read_bytes()
    drain(dataset)
    for changed in (body[:-10], bytes(len(body))):
        image.write_bytes(changed)
        with pytest.raises(PreparedError, match=r"case_00002\.zarr/image.*(shorter|not the one).*run voxlane prepare"):
            drain(dataset)
    shutil.rmtree(copy / "cases" / "case_00002.zarr")
    with pytest.raises(PreparedError, match=r"case_00002\.zarr.*missing.*run voxlane prepare again"):
        drain(dataset)
    with pytest.raises(PreparedError, match=r"case_00002\.zarr.*missing.*run voxlane prepare again"):
        drain(dataset, num_workers=1, multiprocessing_context="fork")
    repaired = sample_data.prepare_dataset(str(tiny_folder.parent / "scans"), str(copy))
    assert (repaired.cases_checked, repaired.cases_written) == (0, 1)
    drain(repaired.prepared)
    assert image.read_bytes() == body


def test_newly_prepared_dataset_in_a_bucket_is_detected(gcs: Bucket, tmp_path: Path) -> None:
    old = prepare_in_bucket(gcs, tmp_path)
    src = sample_data.upload(
        gcs, {n: b for n, b in sample_data.make_kits19(6, first=1).items() if "00003" in n}, "scans/"
    )
    image, label = sample_data.make_ct(77)
    sample_data.upload(
        gcs,
        {
            "case_00003/imaging.nii.gz": sample_data.encode_nifti(image),
            "case_00003/segmentation.nii.gz": sample_data.encode_nifti(label),
        },
        "scans/",
    )
    new = sample_data.prepare_dataset(src, f"{gcs.uri}/data", gcs.config).prepared
    with pytest.raises(PreparedError, match=r"gs://bkt/data/cases/case_0000\d\.zarr/.*(shorter than|not the one)"):
        drain(old)
    drain(new)


# -- patches in flight -------------------------------------------------------------------------------------------------


@given(st.integers(1, 40), st.integers(1, 64))
def test_window_starts_with_a_batch_and_grows_to_its_limit(batch: int, most: int) -> None:
    sizes = [window_after(consumed, batch=batch, most=most) for consumed in range(batch + most + 1)]
    assert sizes == sorted(sizes)
    assert set(sizes[: batch + 1]) == {min(most, max(2, batch))}
    assert sizes[-1] == most


@pytest.mark.parametrize("in_flight", [1, 2, 7, 64])
def test_window_does_not_change_patches(tiny: Prepared, full_epoch: list[Any], in_flight: int) -> None:
    assert sample_keys(list(make_stream(tiny, in_flight=in_flight))) == full_epoch
    batches = list(DataLoader(make_stream(tiny, in_flight=in_flight), batch_size=5))
    assert sample_keys(split_batches(batches)) == full_epoch


def test_first_batch_is_requested_alone(tiny: Prepared) -> None:
    requested: list[int] = []

    class RecordingStream(PatchStream):
        def sample(self, position: int, epoch: int) -> dict[str, Any]:
            requested.append(position)
            return super().sample(position, epoch)

    patches = RecordingStream(tiny, samples=SAMPLES, seed=3, in_flight=16)
    patches.block = 4
    iterator = iter(patches)
    next(iterator)
    next(iterator)
    iterator.close()
    assert set(requested) <= set(range(4 + 2))


def test_larger_gap_needs_fewer_requests(large_dataset: Prepared, emulator: Emulator) -> None:
    actual = {}
    for gap in (0, 1 << 20):
        patch_stream = PatchStream(large_dataset, samples=4, patch=(40, 40, 40), seed=1, max_gap_bytes=gap)
        emulator.reset_counters()
        patches = [(sample["image"], sample["label"]) for sample in patch_stream]
        actual[gap] = patches, emulator.counters().get.requests, emulator.counters().bytes_out
    for (image, label), (image_joined, label_joined) in zip(actual[0][0], actual[1 << 20][0], strict=True):
        assert image.equal(image_joined)
        assert label.equal(label_joined)
    assert actual[1 << 20][1] < actual[0][1]
    assert actual[1 << 20][2] > actual[0][2]
