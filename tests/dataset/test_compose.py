"""Composed download: exact cuts and caps, nothing left behind."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch.utils.data
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import Bucket
from voxlane import IterableDataset, Manifest, MapDataset, errors, list_objects
from voxlane.cli.main import main
from voxlane.dataset.compose import MAX_SOURCES, plan_groups
from voxlane.store.gcs_json import COMPOSED_PREFIX
from voxlane.testing import Access, Emulator, Faults

Put = Callable[[Bucket, dict[str, bytes]], None]
STYLES = [MapDataset, IterableDataset]
OBJECTS = {f"s/{i:03d}": bytes([i]) * (i * 7 % 50) for i in range(100)}  # some are empty


@given(st.lists(st.integers(0, 30), max_size=120), st.integers(1, 60))
def test_groups_keep_order_and_caps(sizes: list[int], cap: int) -> None:
    groups = plan_groups(sizes, cap)
    assert [i for g in groups for i in g] == list(range(len(sizes)))
    for group in groups:
        assert len(group) <= MAX_SOURCES
        if len(group) > 1:
            assert sum(sizes[i] for i in group) <= cap
            assert all(sizes[i] > 0 for i in group)


def test_group_may_fill_the_cap_exactly() -> None:
    assert plan_groups([4, 6, 1], 10) == [[0, 1], [2]]
    assert plan_groups([11, 10, 1], 10) == [[0], [1], [2]]
    assert plan_groups([0, 5, 0, 5], 10) == [[0], [1], [2], [3]]
    assert len(plan_groups([1] * 33, 100)[0]) == 32


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("workers", [0, 2])
def test_same_samples_in_fewer_requests(
    gcs: Bucket, put: Put, emulator: Emulator, style: type[Any], workers: int
) -> None:
    put(gcs, OBJECTS)
    emulator.reset_counters()
    dataset = style("gs://bkt/s/", config=gcs.config, compose="on")
    loader = torch.utils.data.DataLoader(dataset, batch_size=32, num_workers=workers, collate_fn=list)
    assert sorted(b for batch in loader for b in batch) == sorted(OBJECTS.values())
    if not workers:
        finish(dataset)
    counts = emulator.counters()
    assert counts.compose.requests == counts.delete.requests > 0
    assert counts.get.requests < 40
    assert dataset.traffic().by_kind["compose"]["requests"] == counts.compose.requests
    assert emulator.keys("bkt", COMPOSED_PREFIX) == []


def test_composed_download_can_be_turned_off(gcs: Bucket, put: Put, emulator: Emulator) -> None:
    put(gcs, OBJECTS)
    assert list(MapDataset("gs://bkt/s/", config=gcs.config, compose="off")) == list(OBJECTS.values())
    assert emulator.counters().compose.requests == 0


def test_object_changed_after_listing_is_named(gcs: Bucket, put: Put, emulator: Emulator) -> None:
    put(gcs, OBJECTS)
    dataset = MapDataset("gs://bkt/s/", config=gcs.config, compose="on")
    assert len(dataset) == 100
    # The same total size: only versions can tell.
    emulator.put("bkt", "s/003", OBJECTS["s/004"])
    emulator.put("bkt", "s/004", OBJECTS["s/003"])
    with pytest.raises(errors.ChangedError, match="gs://bkt/s/003: the object changed"):
        dataset.__getitems__(list(range(1, 7)))
    emulator.delete("bkt", "s/012")
    with pytest.raises(errors.NotFoundError, match="gs://bkt/s/012"):
        dataset.__getitems__([11, 12, 13])
    assert emulator.keys("bkt", COMPOSED_PREFIX) == []


def test_missing_permissions_are_named_up_front(gcs: Bucket, put: Put, emulator: Emulator) -> None:
    put(gcs, OBJECTS)
    emulator.set_access(Access(denied_permissions=("storage.objects.delete",)))
    with pytest.raises(errors.PermissionDeniedError, match=r"gs://bkt/: .*storage\.objects\.delete.*compose=\"off\""):
        list(MapDataset("gs://bkt/s/", config=gcs.config, compose="on"))
    assert emulator.counters().compose.requests == 0


def test_failures_leave_nothing_behind(gcs: Bucket, put: Put, emulator: Emulator) -> None:
    put(gcs, OBJECTS)
    emulator.set_faults(Faults(error_rate=0.1, cut_rate=0.1, seed=4))
    assert list(IterableDataset("gs://bkt/s/", config=gcs.config, compose="on")) == list(OBJECTS.values())
    emulator.set_faults(Faults(error_rate=1.0, error_statuses=(403,), kinds=("get",), key_prefix=COMPOSED_PREFIX))
    dataset = IterableDataset("gs://bkt/s/", config=gcs.config, compose="on")
    with pytest.raises(errors.PermissionDeniedError):
        list(dataset)
    finish(dataset)
    emulator.clear_faults()
    assert emulator.keys("bkt", COMPOSED_PREFIX) == []


def test_leaving_early_leaves_nothing_behind(gcs: Bucket, put: Put, emulator: Emulator) -> None:
    put(gcs, OBJECTS)
    dataset = IterableDataset("gs://bkt/s/", config=gcs.config, compose="on")
    stream = iter(dataset)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    finish(dataset)
    assert emulator.keys("bkt", COMPOSED_PREFIX) == []


def finish(dataset: MapDataset | IterableDataset) -> None:
    """Wait for requests in flight, as the end of the process does."""
    for source in dataset.samples.sources.values():
        source.store._pools["voxlane"].shutdown(wait=True)


def _read_endlessly(config: Any) -> None:
    while True:
        list(MapDataset("gs://bkt/s/", config=config, compose="on"))


def test_clean_removes_leftovers_of_a_killed_run(
    gcs: Bucket, put: Put, emulator: Emulator, capsys: pytest.CaptureFixture[str]
) -> None:
    put(gcs, OBJECTS)
    emulator.set_faults(Faults(latency_s=0.05, kinds=("get",)))
    process = multiprocessing.get_context("fork").Process(target=_read_endlessly, args=(gcs.config,))
    process.start()
    while not emulator.keys("bkt", COMPOSED_PREFIX):
        pass
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    left = emulator.keys("bkt", COMPOSED_PREFIX)
    assert left
    assert not any(k.startswith(COMPOSED_PREFIX) for k in list_objects("gs://bkt", config=gcs.config).keys())

    endpoint = ["--endpoint", emulator.url]
    assert main(["clean", "gs://bkt", *endpoint]) == 0
    output = capsys.readouterr().out  # they may belong to a run that is alive
    assert "0 leftover objects" in output
    assert f"{len(left)} younger ones kept" in output
    assert main(["clean", "gs://bkt", "--older-than", "0", "--dry-run", *endpoint]) == 0
    assert f"{len(left)} leftover objects" in capsys.readouterr().out
    assert emulator.keys("bkt", COMPOSED_PREFIX) == left
    assert main(["clean", "gs://bkt", "--older-than", "0", *endpoint]) == 0
    assert emulator.keys("bkt", COMPOSED_PREFIX) == []
    assert len(emulator.keys("bkt")) == len(OBJECTS)


def test_manifest_without_generations_raises(gcs: Bucket, put: Put) -> None:
    put(gcs, OBJECTS)
    listed: Manifest = list_objects("gs://bkt/s/", config=gcs.config)
    manifest = Manifest.of(listed.uri, [dataclasses.replace(entry, version=None) for entry in listed])
    with pytest.raises(errors.ConfigError, match="needs each object's generation"):
        list(MapDataset(manifest, config=gcs.config, compose="on"))
    assert list(MapDataset(manifest, config=gcs.config, compose="auto")) == list(OBJECTS.values())
    with_generations = list_objects("gs://bkt/s/", config=gcs.config, generations=True)
    assert list(MapDataset(with_generations, config=gcs.config, compose="on")) == list(OBJECTS.values())


def test_odd_keys_are_composed(gcs: Bucket, emulator: Emulator) -> None:
    contents = {key: key.encode() * 50 for key in ("a//b", "/a", "a/../b", "tab\tkey", "full/", "e", "e/x", "plain")}
    emulator.put_many("bkt", {**contents, "todo/": b""})
    dataset = IterableDataset("gs://bkt", config=gcs.config, compose="on")
    assert list(dataset) == [contents[key] for key in sorted(contents)]
    assert dataset.manifest.folder_markers == 1
    assert emulator.counters().compose.requests == 1
