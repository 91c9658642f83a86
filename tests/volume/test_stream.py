"""Patches out of prepared volumes: which, what is in them, and what they cost."""

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
from tests.volume import made
from voxlane import DataLoader
from voxlane.dataset.ahead import window_after
from voxlane.errors import ConfigError, PreparedError, StateError
from voxlane.testing import Emulator
from voxlane.volume.cases import Caching, Cases
from voxlane.volume.draw import case_at, draw_patch, is_forced
from voxlane.volume.prepared import Prepared
from voxlane.volume.stream import PatchStream

SAMPLES = 26
Sample = dict[str, Any]


@pytest.fixture(scope="module", autouse=True)
def few_threads() -> Any:
    """Forked children do not have torch's threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def stream(dataset: Prepared, **changes: Any) -> PatchStream:
    return PatchStream(dataset, **{"samples": SAMPLES, "seed": 3, "in_flight": 4, **changes})


def key(sample: Sample) -> tuple[int, int, int, bytes, bytes]:
    """All of a sample, to compare it."""
    position, row, seed = (int(sample[name]) for name in ("position", "row", "seed"))
    return position, row, seed, sample["image"].numpy().tobytes(), sample["label"].numpy().tobytes()


def singles(batches: Sequence[Sample]) -> list[Sample]:
    """The samples of collated batches."""
    return [{name: batch[name][i] for name in batch} for batch in batches for i in range(len(batch["row"]))]


def keys(samples: Sequence[Sample]) -> list[Any]:
    return [key(sample) for sample in samples]


@pytest.fixture(scope="module")
def whole(tiny: Prepared) -> list[Any]:
    """An epoch of one process."""
    return keys(list(stream(tiny)))


def copy_to(bucket: Bucket, folder: Path) -> Prepared:
    """The prepared dataset with the same cases in a bucket, by preparing there."""
    src = made.put(bucket, made.kits(), "scans/")
    return made.prepared(src, f"{bucket.uri}/data", bucket.config).prepared


# -- what is in a patch ------------------------------------------------------------------------------------------------


def zarr_case(folder: Path, case: str) -> Any:
    return zarr.open_group(str(folder / "cases" / f"{case}.zarr"), mode="r")


def padded(array: np.ndarray, start: Any, patch: Any) -> np.ndarray:
    """A region of a whole array, zero outside of it."""
    result = np.zeros((*array.shape[:-3], *patch), array.dtype)
    low = [max(0, a) for a in start]
    high = [min(n, a + p) for a, p, n in zip(start, patch, array.shape[-3:], strict=True)]
    result[(..., *(slice(a - s, b - s) for a, b, s in zip(low, high, start, strict=True)))] = array[
        (..., *map(slice, low, high))
    ]
    return result


@pytest.mark.parametrize("patch", [(16, 16, 16), (24, 8, 40), (1, 1, 1)])
@pytest.mark.parametrize("placement", ["centre", "inside"])
def test_patches_are_slices_of_the_volumes_that_zarr_reads(
    tiny: Prepared, tiny_folder: Path, patch: Any, placement: Any
) -> None:
    found = list(stream(tiny, patch=patch, placement=placement, foreground_share=0.5))
    assert [s["position"] for s in found] == list(range(SAMPLES))
    outside = 0
    for sample in found:
        case = tiny.case(sample["row"])
        assert sample["row"] == case_at(sample["position"], cases=6, samples=SAMPLES, seed=3, epoch=0)
        group = zarr_case(tiny_folder, case.id)
        scale, offset = (np.float32(group.attrs[a]) for a in ("scale_factor", "add_offset"))
        assert offset[0] != 0  # as a CT's integers have: their 0 is not the network's
        values = group["image"][...] * scale[:, None, None, None] + offset[:, None, None, None]
        foreground = group["foreground"][...]
        start = draw_patch(
            sample["position"],
            seed=3,
            epoch=0,
            patch=patch,
            shape=case.shape,
            foreground=foreground,
            forced=is_forced(sample["position"], 0.5),
            placement=placement,
        ).start
        assert sample["image"].dtype == torch.float32
        assert sample["image"].shape == (1, *patch)
        np.testing.assert_allclose(sample["image"], padded(values, start, patch), rtol=1e-6, atol=1e-6)
        assert sample["label"].dtype == torch.uint8
        np.testing.assert_array_equal(sample["label"], padded(group["label"][...], start, patch))
        outside += any(p > n for p, n in zip(patch, case.shape, strict=True))
    assert bool(outside) == (max(patch) > 1)  # the volumes have from 13 to 18 slices


def test_a_region_outside_of_a_volume_is_zero_and_background(tiny: Prepared) -> None:
    volume = Cases(tiny).open(0)
    image, label = volume.whole()
    assert image.shape[1:] == label.shape == volume.shape
    inside, inside_label = volume.read_padded((-3, -2, -1), tuple(n + 5 for n in volume.shape))  # type: ignore[arg-type]
    z, y, x = volume.shape
    torch.testing.assert_close(inside[:, 3 : z + 3, 2 : y + 2, 1 : x + 1], image, rtol=0, atol=0)
    frame = torch.ones(inside.shape[1:], dtype=torch.bool)
    frame[3 : z + 3, 2 : y + 2, 1 : x + 1] = False
    assert not inside[0][frame].any()
    assert not inside_label[frame].any()
    far, far_label = volume.read_padded((z + 9, 0, -99), (4, 4, 4))
    assert not far.any()
    assert not far_label.any()


def test_foreground_patches_hold_foreground(tiny: Prepared) -> None:
    found = list(stream(tiny, patch=(4, 4, 4), foreground_share=1.0))
    assert all(sample["label"].any() for sample in found)
    assert {int(v) for s in found for v in s["label"].unique()} == {0, 1, 2}
    none = list(stream(tiny, patch=(4, 4, 4), foreground_share=0.0))
    assert not all(sample["label"].any() for sample in none)


# -- which patches, on whatever machines -------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_ranks_share_an_epoch_out(tiny: Prepared, whole: list[Any], world_size: int, batch_size: int) -> None:
    by_rank = [
        keys(singles(list(DataLoader(stream(tiny, rank=rank, world_size=world_size), batch_size))))
        for rank in range(world_size)
    ]
    assert sorted(chain.from_iterable(by_rank)) == sorted(whole)
    for rank, found in enumerate(by_rank):
        assert found == whole[rank::world_size]


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_give_the_same_in_the_same_order(tiny: Prepared, whole: list[Any], context: str) -> None:
    workers = 2 if context == "fork" else 1
    loader = DataLoader(stream(tiny), 4, num_workers=workers, multiprocessing_context=context, persistent_workers=True)
    assert len(loader) == 7
    assert keys(singles(list(loader))) == whole
    second = keys(singles(list(loader)))
    reference = stream(tiny)
    reference.set_epoch(1)
    assert second == keys(list(reference)) != whole
    del loader


def test_rows_seed_and_epoch_change_what_comes(tiny: Prepared, whole: list[Any]) -> None:
    assert keys(list(stream(tiny))) == whole
    assert keys(list(stream(tiny, seed=4))) != whole
    assert {s["row"] for s in stream(tiny, rows=[1, 4])} == {1, 4}
    counts = np.bincount([k[1] for k in whole])
    assert counts.max() - counts.min() <= 1
    iterated = stream(tiny)
    assert keys(list(iterated)) == keys(list(iterated)) == whole  # an epoch, until another is set


@pytest.mark.parametrize("taken", [0, 1, 4, 6])
@pytest.mark.parametrize(("before", "after"), [((1, 2), (1, 2)), ((2, 2), (1, 3)), ((1, 4), (3, 1)), ((2, 1), (2, 3))])
def test_a_run_goes_on_exactly_with_other_ranks_and_batches(
    tiny: Prepared, whole: list[Any], taken: int, before: tuple[int, int], after: tuple[int, int]
) -> None:
    done: list[Any] = []
    states = []
    for rank in range(before[0]):
        loader = DataLoader(stream(tiny, rank=rank, world_size=before[0]), before[1])
        batches = iter(loader)
        done += keys(singles([next(batches) for _ in range(taken)]))
        states.append(loader.state_dict())
        batches.close()  # type: ignore[attr-defined]
    assert all(state == states[0] for state in states)
    state = pickle.loads(pickle.dumps(states[0]))
    rest: list[Any] = []
    following: list[Any] = []
    for rank in range(after[0]):
        # Another seed is overruled by the state's.
        loader = DataLoader(stream(tiny, rank=rank, world_size=after[0], seed=99), after[1])
        loader.load_state_dict(state)
        rest += keys(singles(list(loader)))
        following += keys(singles(list(loader)))
    assert sorted(done + rest) == sorted(whole)
    reference = stream(tiny)
    reference.set_epoch(1)
    assert sorted(following) == sorted(keys(list(reference)))


def test_a_state_at_the_end_of_an_epoch_begins_the_next(tiny: Prepared) -> None:
    loader = DataLoader(stream(tiny), 4)
    for _ in loader:
        state = loader.state_dict()  # inside the loop, as checkpoints are taken
    assert (state["epoch"], state["consumed"]) == (1, 0)
    assert loader.state_dict() == state
    resumed = DataLoader(stream(tiny), 4)
    resumed.load_state_dict(state)
    assert keys(singles(list(resumed))) == keys(singles(list(loader)))


def test_a_run_goes_on_in_workers(tiny: Prepared, whole: list[Any]) -> None:
    loader = DataLoader(stream(tiny), 2, num_workers=2, multiprocessing_context="fork")
    batches = iter(loader)
    done = keys(singles([next(batches) for _ in range(3)]))
    state = loader.state_dict()
    batches.close()  # type: ignore[attr-defined]
    resumed = DataLoader(stream(tiny), 3, num_workers=1, multiprocessing_context="fork")
    resumed.load_state_dict(state)
    assert done + keys(singles(list(resumed))) == whole


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
def test_a_state_of_another_stream_is_refused(tiny: Prepared, changes: dict[str, Any]) -> None:
    state = DataLoader(stream(tiny)).state_dict()
    with pytest.raises(StateError, match="Resume over the prepared dataset and the split of the first run"):
        DataLoader(stream(tiny, **changes)).load_state_dict(state)


def test_a_state_of_another_fold_of_equal_size_is_refused(tiny: Prepared) -> None:
    state = DataLoader(stream(tiny, rows=[0, 1, 2])).state_dict()
    DataLoader(stream(tiny, rows=[0, 1, 2])).load_state_dict(state)
    with pytest.raises(StateError):
        DataLoader(stream(tiny, rows=[0, 1, 3])).load_state_dict(state)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rows": []}, "over no cases"),
        ({"rows": [0, 6]}, "rows: from 0 to 5"),
        ({"rows": [-1]}, "rows: from 0 to 5"),
        ({"samples": 0}, "samples=0"),
        ({"in_flight": 0}, "in_flight=0"),
        ({"foreground_share": 1.5}, r"foreground_share=1\.5"),
        ({"patch": (0, 4, 4)}, "patch="),
        ({"patch": (4, 4)}, "patch="),
        ({"placement": "corner"}, "placement='corner'"),
        ({"rank": 2, "world_size": 2}, "rank 2 of 2"),
    ],
)
def test_wrong_arguments_are_named(tiny: Prepared, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        stream(tiny, **changes)


def test_a_stream_travels_to_other_processes(tiny: Prepared, whole: list[Any]) -> None:
    used = stream(tiny)
    next(iter(used))
    assert keys(list(pickle.loads(pickle.dumps(used)))) == whole
    volume = pickle.loads(pickle.dumps(Cases(tiny))).open(1)
    torch.testing.assert_close(volume.whole()[0], Cases(tiny).open(1).whole()[0])


def test_an_iteration_that_is_dropped_leaves_no_work_behind(tiny: Prepared, whole: list[Any]) -> None:
    one = stream(tiny, in_flight=2)
    for _ in range(5):
        iterator = iter(one)
        next(iterator)
        del iterator
    assert keys(list(one)) == whole
    ours = [t for t in threading.enumerate() if t.name.startswith("voxlane-patch")]
    assert len([t for t in ours if t.is_alive()]) < 100


# -- what it costs -----------------------------------------------------------------------------------------------------


@pytest.fixture
def large(gcs: Bucket) -> Prepared:
    """One case of noise, of many chunks that compress badly."""
    random = np.random.default_rng(0)
    image = random.integers(-200, 300, (96, 96, 96)).astype(np.int16)
    label = np.zeros(image.shape, np.uint8)
    label[40:50, 40:50, 40:50] = 1
    objects = {"case_00000/imaging.nii.gz": made.nifti(image, np.eye(4))}
    objects["case_00000/segmentation.nii.gz"] = made.nifti(label, np.eye(4))
    src = made.put(gcs, objects, "scans/")
    labels = {"labels": {"background": 0, "kidney": 1}}
    plan = {"patch": [32, 32, 32], "normalisation": [{"scheme": "none"}]}
    return made.prepared(src, f"{gcs.uri}/data", gcs.config, plan=plan, description=labels).prepared


def test_only_the_chunks_that_a_patch_touches_are_read(large: Prepared, emulator: Emulator) -> None:
    volume = Cases(large).open(0)
    whole, whole_label = volume.whole()
    case = large.case(0).volume
    stored = sum(size for _, size, _ in case["objects"])
    chunk = case["image"]["chunk"][1:]
    assert chunk == [32, 32, 32]
    for start, patch, touched in (((0, 0, 0), (32, 32, 32), 1), ((33, 17, 50), (16, 16, 16), 4)):
        cases = Cases(large, max_gap_bytes=0)
        emulator.reset_counters()
        image, label = cases.open(0).read_padded(start, patch)
        read = emulator.counters().bytes_out
        inside = tuple(slice(a, a + n) for a, n in zip(start, patch, strict=True))
        np.testing.assert_array_equal(image[0], whole[0][inside])
        np.testing.assert_array_equal(label, whole_label[inside])
        # Beside the chunks of 27: the image's index and the label, which is small.
        assert read < 1.05 * touched / 27 * stored + 2000
        assert cases.timing().bytes_read == read
        emulator.reset_counters()
        cases.open(0).read_padded(start, patch)
        assert emulator.counters().requests == 0  # they are in memory


def test_a_stream_counts_what_it_reads_as_the_server_does(large: Prepared, emulator: Emulator) -> None:
    for workers in (0, 2):
        one = stream(large, samples=4)
        emulator.reset_counters()
        loader = DataLoader(one, 2, num_workers=workers, multiprocessing_context="fork" if workers else None)
        assert len(list(loader)) == 2
        counted, traffic = emulator.counters(), one.traffic()
        assert (traffic.bytes_read, traffic.requests) == (counted.bytes_out, counted.requests)


def test_without_memory_everything_is_read_again(large: Prepared, emulator: Emulator) -> None:
    cases = Cases(large, Caching(ram_bytes=0))
    first, _ = cases.open(0).read_padded((0, 0, 0), (32, 32, 32))
    emulator.reset_counters()
    again, _ = cases.open(0).read_padded((0, 0, 0), (32, 32, 32))
    assert emulator.counters().bytes_out > 0
    torch.testing.assert_close(first, again, rtol=0, atol=0)


def test_the_disk_cache_serves_other_processes(large: Prepared, emulator: Emulator, tmp_path: Path) -> None:
    caching = Caching(ram_bytes=0, folder=tmp_path / "cache")
    expected = keys(list(stream(large, samples=6)))
    first = keys(list(stream(large, samples=6, caching=caching)))
    emulator.reset_counters()
    second = keys(list(stream(large, samples=6, caching=caching)))
    assert emulator.counters().requests == 0
    loader = DataLoader(stream(large, samples=6, caching=caching), 2, num_workers=1, multiprocessing_context="fork")
    third = keys(singles(list(loader)))
    assert emulator.counters().requests == 0
    assert first == second == third == expected


def test_memory_holds_no_more_than_it_may(large: Prepared) -> None:
    cases = Cases(large, Caching(ram_bytes=100_000))
    whole, _ = cases.open(0).whole()
    again, _ = cases.open(0).whole()
    torch.testing.assert_close(whole, again, rtol=0, atol=0)
    assert 0 < cases._volumes._chunks.used_bytes <= 100_000


# -- data that change --------------------------------------------------------------------------------------------------


def drain(dataset: Prepared, **loading: Any) -> None:
    for _ in DataLoader(stream(dataset), 2, **loading):
        pass


def test_a_volume_that_is_gone_or_changed_says_to_prepare_again(tiny_folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "data"
    dataset = made.prepared(str(tiny_folder.parent / "scans"), str(copy)).prepared
    image = copy / "cases" / "case_00002.zarr" / "image" / "c" / "0" / "0" / "0" / "0"
    body = image.read_bytes()
    drain(dataset)
    for changed in (body[:-10], bytes(len(body))):
        image.write_bytes(changed)
        with pytest.raises(PreparedError, match=r"case_00002\.zarr/image.*changed after .*Run `voxlane prepare` again"):
            drain(dataset)
    shutil.rmtree(copy / "cases" / "case_00002.zarr")
    with pytest.raises(PreparedError, match=r"case_00002\.zarr.*gone.*Run `voxlane prepare` again"):
        drain(dataset)
    with pytest.raises(PreparedError, match=r"case_00002\.zarr.*gone.*Run `voxlane prepare` again"):
        drain(dataset, num_workers=1, multiprocessing_context="fork")
    mended = made.prepared(str(tiny_folder.parent / "scans"), str(copy))
    assert (mended.checked, mended.written) == (0, 1)
    drain(mended.prepared)
    assert image.read_bytes() == body


def test_a_dataset_prepared_anew_is_noticed_in_a_bucket(gcs: Bucket, tmp_path: Path) -> None:
    old = copy_to(gcs, tmp_path)
    src = made.put(gcs, {n: b for n, b in made.kits(6, first=1).items() if "00003" in n}, "scans/")
    image, label = made.ct(77)
    made.put(
        gcs,
        {"case_00003/imaging.nii.gz": made.nifti(image), "case_00003/segmentation.nii.gz": made.nifti(label)},
        "scans/",
    )
    new = made.prepared(src, f"{gcs.uri}/data", gcs.config).prepared
    with pytest.raises(PreparedError, match=r"gs://bkt/data/cases/case_0000\d\.zarr/.*changed after"):
        drain(old)
    drain(new)


# -- how many are under way --------------------------------------------------------------------------------------------


@given(st.integers(1, 40), st.integers(1, 64))
def test_the_window_begins_with_a_batch_and_grows_to_its_bound(batch: int, most: int) -> None:
    sizes = [window_after(taken, batch=batch, most=most) for taken in range(batch + most + 1)]
    assert sizes == sorted(sizes)
    assert set(sizes[: batch + 1]) == {min(most, max(2, batch))}
    assert sizes[-1] == most


@pytest.mark.parametrize("in_flight", [1, 2, 7, 64])
def test_the_window_changes_no_patch(tiny: Prepared, whole: list[Any], in_flight: int) -> None:
    assert keys(list(stream(tiny, in_flight=in_flight))) == whole
    batches = list(DataLoader(stream(tiny, in_flight=in_flight), batch_size=5))
    assert keys(singles(batches)) == whole


def test_the_first_batch_is_asked_for_alone(tiny: Prepared) -> None:
    asked: list[int] = []

    class Watched(PatchStream):
        def sample(self, position: int, epoch: int) -> dict[str, Any]:
            asked.append(position)
            return super().sample(position, epoch)

    patches = Watched(tiny, samples=SAMPLES, seed=3, in_flight=16)
    patches.block = 4
    taken = iter(patches)
    next(taken)
    next(taken)
    taken.close()
    assert set(asked) <= set(range(4 + 2))


def test_a_larger_gap_means_fewer_requests_and_the_same_voxels(large: Prepared, emulator: Emulator) -> None:
    found = {}
    for gap in (0, 1 << 20):
        stream = PatchStream(large, samples=4, patch=(40, 40, 40), seed=1, max_gap_bytes=gap)
        emulator.reset_counters()
        patches = [(sample["image"], sample["label"]) for sample in stream]
        found[gap] = patches, emulator.counters().get.requests, emulator.counters().bytes_out
    for (image, label), (image_joined, label_joined) in zip(found[0][0], found[1 << 20][0], strict=True):
        assert image.equal(image_joined)
        assert label.equal(label_joined)
    assert found[1 << 20][1] < found[0][1]
    assert found[1 << 20][2] > found[0][2]
