"""Exactly the remaining samples after a resume, on any number of ranks and workers."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch.multiprocessing
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.conftest import Bucket
from voxlane import DataLoader, IterableDataset, Manifest, MapDataset, errors, list_objects, list_once
from voxlane.testing import Emulator

Put = Callable[[Bucket, dict[str, bytes]], None]
STYLES = [MapDataset, IterableDataset]
NAMES = [f"s{i:03d}" for i in range(101)]


def decode(body: bytes) -> str:
    return body.decode()


@pytest.fixture
def manifest(folder: Bucket, put: Put) -> Manifest:
    put(folder, {name: name.encode() for name in NAMES})
    return list_objects(folder.uri)


def loaders(style: type[Any], manifest: Manifest, world: int, workers: int, batch: int) -> list[DataLoader]:
    return [
        DataLoader(
            style(manifest, decode=decode, shuffle=True, seed=7, rank=rank, world_size=world),
            batch,
            num_workers=workers,
            collate_fn=list,
        )
        for rank in range(world)
    ]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(("world", "workers", "batch"), [(1, 0, 4), (3, 0, 5), (2, 2, 4)])
@pytest.mark.parametrize(("new_world", "new_workers", "new_batch"), [(1, 0, 4), (4, 0, 3), (2, 3, 7)])
def test_elastic_resume(
    manifest: Manifest, style: type[Any], world: int, workers: int, batch: int, new_world: int, new_workers: int,
    new_batch: int,
) -> None:  # fmt: skip
    first = loaders(style, manifest, world, workers, batch)
    names: list[str] = []
    states = []
    for loader in first:
        for returned in itertools.islice(loader, 4):
            names += returned
        states.append(loader.state_dict())
    assert all(state == states[0] for state in states)
    assert len(names) == 4 * world * batch
    state = json.loads(json.dumps(states[0]))  # plain data, which any checkpoint can hold

    second = loaders(style, manifest, new_world, new_workers, new_batch)
    for loader in second:
        loader.load_state_dict(state)
    expected = sum(len(loader) - 4 for loader in second)  # the length of the epoch includes the four batches before
    rest = [batch for loader in second for batch in loader]
    assert len(rest) == expected
    assert sorted(names + [name for b in rest for name in b]) == NAMES
    # The next epoch is complete and shuffled again.
    assert sorted(name for loader in second for b in loader for name in b) == NAMES


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("workers", [0, 3])
def test_order_is_the_same_for_any_number_of_workers(manifest: Manifest, style: type[Any], workers: int) -> None:
    (alone,) = loaders(MapDataset, manifest, 1, 0, 4)
    (loader,) = loaders(style, manifest, 1, workers, 4)
    for _ in range(2):
        assert list(loader) == list(alone)


@pytest.mark.parametrize("style", STYLES)
def test_persistent_workers_see_each_epoch(manifest: Manifest, style: type[Any]) -> None:
    dataset = style(manifest, decode=decode, shuffle=True, seed=1)
    loader = DataLoader(dataset, 10, num_workers=2, persistent_workers=True, collate_fn=list)
    epochs = [[name for batch in loader for name in batch] for _ in range(3)]
    assert all(sorted(epoch) == NAMES for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("workers", [0, 2])
def test_resume_is_exact_when_samples_are_skipped(manifest: Manifest, style: type[Any], workers: int) -> None:
    def loader() -> DataLoader:
        dataset = style(manifest, decode=only_even, on_error="skip", shuffle=True)
        return DataLoader(dataset, 4, num_workers=workers, collate_fn=list)

    first = loader()
    names = [name for batch in itertools.islice(first, 9) for name in batch]
    other = loader()
    other.load_state_dict(first.state_dict())
    rest = [name for batch in other for name in batch]
    assert sorted(names + rest) == NAMES[::2]


def only_even(body: bytes) -> str:
    if int(body[1:]) % 2:
        raise ValueError("odd")
    return body.decode()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("style", STYLES)
def test_torchdata_stateful_dataloader(manifest: Manifest, style: type[Any], workers: int) -> None:
    def loader() -> StatefulDataLoader[Any]:
        dataset = style(manifest, decode=decode, shuffle=True)
        sampler = dataset.sampler() if style is MapDataset else None
        return StatefulDataLoader(dataset, batch_size=4, sampler=sampler, num_workers=workers, collate_fn=list)

    first = loader()
    stream = iter(first)
    names = [name for batch in itertools.islice(stream, 7) for name in batch]
    state = first.state_dict()
    other = loader()
    other.load_state_dict(state)
    assert sorted(names + [name for batch in other for name in batch]) == NAMES


def test_plain_loop_resumes(manifest: Manifest) -> None:
    dataset = IterableDataset(manifest, decode=decode, shuffle=True)
    names = list(itertools.islice(dataset, 33))
    other = IterableDataset(manifest, decode=decode)
    other.load_state_dict(dataset.state_dict())
    assert len(other) == 101 - 33
    assert sorted(names + list(other)) == NAMES


def test_state_of_other_samples_raises(manifest: Manifest) -> None:
    state = MapDataset(manifest).state_dict()
    with pytest.raises(errors.StateError, match="a dataset of 101 samples"):
        MapDataset(manifest.take(range(50))).load_state_dict(state)
    with pytest.raises(errors.StateError, match="not a dataset state"):
        MapDataset(manifest).load_state_dict({})


def test_uneven_tails(manifest: Manifest) -> None:
    for tail, expected in (("keep", [51, 50]), ("drop", [50, 50]), ("repeat", [51, 51])):
        datasets = [IterableDataset(manifest, rank=r, world_size=2, tail=tail, decode=decode) for r in range(2)]
        assert [len(list(d)) for d in datasets] == [len(d) for d in datasets] == expected


def test_loader_rejects_arguments_that_would_break_its_order(manifest: Manifest) -> None:
    with pytest.raises(errors.ConfigError, match="does not accept shuffle"):
        DataLoader(MapDataset(manifest), 4, shuffle=True)
    with pytest.raises(errors.ConfigError, match="batch_size must be an integer of at least 1, got 0"):
        DataLoader(MapDataset(manifest), 0)
    with pytest.raises(errors.ConfigError, match="does not support a list"):
        DataLoader([1, 2], 4)  # type: ignore[arg-type]


def _rank(rank: int, world: int, store: str, uri: str, endpoint_config: Any, answers: Any) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    listed = list_once(uri, config=endpoint_config)
    dataset = IterableDataset(listed, config=endpoint_config, decode=decode, shuffle=True)
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=None, num_workers=2, multiprocessing_context="spawn" if rank else "fork"
    )
    answers.put((rank, list(loader)))
    try:
        list_once("gs://no-such-bucket/", config=endpoint_config)
    except errors.VoxlaneError as error:
        answers.put((rank, [type(error).__name__]))
    torch.distributed.destroy_process_group()


def test_ranks_of_a_process_group_share_one_listing(
    gcs: Bucket, put: Put, emulator: Emulator, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    put(gcs, {f"s/{name}": name.encode() for name in NAMES})
    emulator.reset_counters()
    context = torch.multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    config = gcs.config
    ranks = [
        context.Process(target=_rank, args=(r, 2, str(tmp_path / "group"), "gs://bkt/s/", config, answers))
        for r in range(2)
    ]
    for process in ranks:
        process.start()
    got = [answers.get() for _ in range(4)]
    for process in ranks:
        process.join(60)
        assert process.exitcode == 0
    samples = [name for _, names in got for name in names if name.startswith("s")]
    assert sorted(samples) == NAMES
    # One rank lists for both. If it fails, both raise its error.
    assert emulator.counters().list.requests == 2
    assert [names for _, names in got].count(["BucketNotFoundError"]) == 2


def test_state_saved_before_the_first_sample_loses_none(manifest: Manifest) -> None:
    dataset = IterableDataset(manifest, decode=decode)
    list(itertools.islice(dataset, 10))
    state = dataset.state_dict()
    dataset.load_state_dict(state)
    assert dataset.state_dict() == state
    dataset.set_epoch(1)
    assert (dataset.state_dict()["epoch"], dataset.state_dict()["consumed"]) == (1, 0)


def test_after_a_resumed_pass_the_next_one_is_complete(manifest: Manifest) -> None:
    stream = IterableDataset(manifest, decode=decode)
    random_access = MapDataset(manifest, decode=decode)
    for dataset in (stream, random_access):
        dataset.load_state_dict({**dataset.state_dict(), "consumed": 90})
    loader = torch.utils.data.DataLoader(random_access, sampler=random_access.sampler())
    for passes in (stream, loader):
        assert [sum(1 for _ in passes) for _ in range(3)] == [11, 101, 101]
    assert stream.state_dict()["consumed"] == 101


def test_two_loaders_over_one_dataset_do_not_disturb_each_other(manifest: Manifest) -> None:
    dataset = IterableDataset(manifest, decode=decode, shuffle=True)
    first = DataLoader(dataset, 4, num_workers=2, collate_fn=list)
    DataLoader(dataset, 10, num_workers=2)
    names = [name for batch in itertools.islice(first, 3) for name in batch]
    other = DataLoader(IterableDataset(manifest, decode=decode, shuffle=True), 4, collate_fn=list)
    other.load_state_dict(first.state_dict())
    assert sorted(names + [name for batch in other for name in batch]) == NAMES
