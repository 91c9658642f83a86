"""Datasets over real servers: content, order, filters, pairs, errors."""

from __future__ import annotations

import dataclasses
import multiprocessing
import pickle
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.utils.data
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import Bucket
from voxlane import DataLoader, IterableDataset, Manifest, MapDataset, Store, StoreConfig, errors, list_objects
from voxlane.dataset.samples import align
from voxlane.testing import Access, Emulator, Faults

Put = Callable[[Bucket, dict[str, bytes]], None]
OBJECTS = {f"scans/case_{i:03d}.bin": f"body {i}".encode() * (i + 1) for i in range(40)}
BODIES = list(OBJECTS.values())
STYLES = [MapDataset, IterableDataset]


def text(body: bytes) -> str:
    return body.decode()


def fails_on_seven(body: bytes) -> int:
    if body.startswith(b"body 7body"):
        raise ValueError("seven is right out")
    return len(body)


@pytest.mark.parametrize("style", STYLES)
def test_samples_are_the_objects_in_order(bucket: Bucket, put: Put, style: type[Any]) -> None:
    put(bucket, OBJECTS)
    assert list(style(f"{bucket.uri}/scans/", config=bucket.config)) == BODIES


def test_random_access(bucket: Bucket, put: Put) -> None:
    put(bucket, OBJECTS)
    dataset = MapDataset(f"{bucket.uri}/scans/", config=bucket.config, decode=text)
    assert len(dataset) == 40
    assert dataset[3] == BODIES[3].decode()
    assert dataset[-1] == BODIES[-1].decode()
    assert dataset.__getitems__([5, 0, 5]) == [BODIES[5].decode(), BODIES[0].decode(), BODIES[5].decode()]
    with pytest.raises(IndexError):
        dataset[40]


@pytest.mark.parametrize("style", STYLES)
def test_forked_workers_after_use_in_the_parent(shared_bucket: Bucket, put: Put, style: type[Any]) -> None:
    check_workers(shared_bucket, put, style, "fork", 8)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize("style", STYLES)
def test_fresh_workers_after_use_in_the_parent(s3: Bucket, put: Put, style: type[Any], method: str) -> None:
    check_workers(s3, put, style, method, 2)


def check_workers(shared_bucket: Bucket, put: Put, style: type[Any], method: str, workers: int) -> None:
    put(shared_bucket, OBJECTS)
    dataset = style(f"{shared_bucket.uri}/scans/", config=shared_bucket.config)
    assert next(iter(dataset)) == BODIES[0]
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=3, num_workers=workers, multiprocessing_context=method, collate_fn=list
    )
    assert sorted(b for batch in loader for b in batch) == sorted(BODIES)
    assert len(list(dataset)) == 40
    assert dataset.traffic().by_kind["list"]["requests"] == 1


def test_workers_that_must_list_share_one_listing(gcs: Bucket, put: Put, emulator: Emulator) -> None:
    put(gcs, OBJECTS)
    emulator.reset_counters()
    loader = torch.utils.data.DataLoader(
        IterableDataset("gs://bkt/scans/", config=gcs.config), batch_size=None, num_workers=4
    )
    bodies = [body for body in loader]  # noqa: C416 - list() would ask the parent for its length, which lists
    assert sorted(bodies) == sorted(BODIES)
    assert emulator.counters().list.requests == 1


def test_large_objects_are_read_in_ranges(bucket: Bucket, put: Put) -> None:
    objects = {f"o{i}": bytes([i]) * size for i, size in enumerate((0, 1, 999, 1000, 1001, 5000, 12_345))}
    put(bucket, objects)
    small_parts = bucket.with_config(part_bytes=1000)
    for style in STYLES:
        dataset = style(f"{bucket.uri}/", config=small_parts.config)
        assert list(dataset) == list(objects.values())
        requests = dataset.traffic().by_kind["get"]["requests"]
        assert requests == 1 + 1 + 1 + 1 + 2 + 5 + 13
        assert dataset.traffic().bytes_read == sum(map(len, objects.values()))


def test_read_ahead_is_bounded_in_bytes(gcs: Bucket, put: Put, emulator: Emulator) -> None:
    put(gcs, {f"o{i:03d}": bytes(10_000) for i in range(100)})
    emulator.reset_counters()
    stream = iter(IterableDataset("gs://bkt/", config=gcs.config, read_ahead_bytes=50_000))
    next(stream)
    while emulator.counters().get.requests < 5:
        pass  # the window fills by itself
    assert emulator.counters().get.requests <= 6
    assert len(list(stream)) == 99


def test_sample_larger_than_the_read_ahead_is_yielded(gcs: Bucket, put: Put) -> None:
    put(gcs, {"a": bytes(1000), "b": bytes(2000), "c": bytes(10)})
    dataset = IterableDataset("gs://bkt/", config=gcs.config, read_ahead_bytes=100)
    assert [len(body) for body in dataset] == [1000, 2000, 10]


def test_match_filters_keys(folder: Bucket, put: Put) -> None:
    put(folder, {"a.nii.gz": b"1", "a.json": b"2", "sub/b.nii.gz": b"3"})
    assert list(MapDataset(folder.uri, match="*.nii.gz")) == [b"1", b"3"]
    assert list(MapDataset(Path(folder.uri.removeprefix("file://")), match="sub/*")) == [b"3"]
    with pytest.raises(errors.EmptyError, match=r"no object matches '\*\.mha'"):
        len(MapDataset(folder.uri, match="*.mha"))


def test_manifests_replace_listing(gcs: Bucket, put: Put, emulator: Emulator) -> None:
    put(gcs, OBJECTS)
    list_objects("gs://bkt/scans/", config=gcs.config).save("gs://bkt/manifest", gcs.config)
    emulator.reset_counters()
    dataset = MapDataset(Manifest.load("gs://bkt/manifest", gcs.config), config=gcs.config)
    assert list(dataset) == BODIES
    assert emulator.counters().list.requests == 0


# -- pairs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", STYLES)
def test_zip_matches_by_name(bucket: Bucket, put: Put, style: type[Any]) -> None:
    put(bucket, {f"images/{n}.nii.gz": f"image {n}".encode() for n in "abc"})
    put(bucket, {f"labels/{n}.seg.nii": f"label {n}".encode() for n in "abc"})
    parts = {name: style(f"{bucket.uri}/{name}s", config=bucket.config, decode=text) for name in ("image", "label")}
    zipped = style.zip(**parts)
    assert list(zipped) == [{"image": f"image {n}", "label": f"label {n}"} for n in "abc"]


def test_zip_with_a_key_function_survives_pickling(gcs: Bucket, put: Put) -> None:
    put(gcs, {f"case_{i}/{name}.nii.gz": f"{name} {i}".encode() for i in range(3) for name in ("imaging", "seg")})
    zipped = MapDataset.zip(
        key=lambda k: k.split("/")[-2],
        image=MapDataset("gs://bkt/", match="*/imaging.nii.gz", config=gcs.config),
        label=MapDataset("gs://bkt/", match="*/seg.nii.gz", config=gcs.config),
    )
    assert len(zipped) == 3
    copy = pickle.loads(pickle.dumps(zipped))
    assert copy[1] == {"image": b"imaging 1", "label": b"seg 1"}
    assert copy.uris(1)["label"] == "gs://bkt/case_1/seg.nii.gz"


def test_zip_names_objects_without_a_partner(folder: Bucket, put: Put) -> None:
    put(folder, {"images/a.nii": b"", "images/b.nii": b"1", "labels/b.nii": b"1", "labels/c.nii": b"2"})
    zipped = MapDataset.zip(image=MapDataset(f"{folder.uri}/images"), label=MapDataset(f"{folder.uri}/labels"))
    with pytest.raises(errors.PairError, match=r"1 of 3 missing in 'image' .*: c; 1 of 3 missing in 'label' .*: a"):
        len(zipped)
    put(folder, {"images/b.nii.gz": b"1"})
    twice = MapDataset.zip(image=MapDataset(f"{folder.uri}/images"), label=MapDataset(f"{folder.uri}/labels"))
    with pytest.raises(errors.PairError, match="two objects of 'image' are named 'b'"):
        len(twice)


@given(st.lists(st.text(max_size=3), unique=True, min_size=1), st.randoms(use_true_random=False), st.booleans())
def test_names_are_matched_in_any_order_of_the_sources(names: list[str], chance: Any, same: bool) -> None:
    labels = list(names)
    if not same:
        chance.shuffle(labels)
    rows = align({"image": "a", "label": "b"}, {"image": names, "label": labels})
    assert [names[row] for row in rows["image"]] == names
    assert [labels[row] for row in rows["label"]] == names
    with pytest.raises(errors.PairError, match="two objects of 'image'"):
        align({"image": "a", "label": "b"}, {"image": [*names, names[0]], "label": [*labels, names[0]]})


# -- failures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("workers", [0, 2])
def test_decode_that_raises_names_the_object(gcs: Bucket, put: Put, style: type[Any], workers: int) -> None:
    put(gcs, OBJECTS)
    dataset = style("gs://bkt/scans/", config=gcs.config, decode=fails_on_seven)
    loader = torch.utils.data.DataLoader(dataset, batch_size=4, num_workers=workers)
    with pytest.raises(errors.DecodeError, match=r"gs://bkt/scans/case_007\.bin: decode raised ValueError: seven"):
        list(loader)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("workers", [0, 2])
def test_failed_objects_are_skipped_and_counted_with_on_error_skip(
    gcs: Bucket, put: Put, emulator: Emulator, style: type[Any], workers: int
) -> None:
    put(gcs, OBJECTS)
    dataset = style("gs://bkt/scans/", config=gcs.config, decode=fails_on_seven, on_error="skip")
    assert len(dataset) == 40
    emulator.delete("bkt", "scans/case_011.bin")
    emulator.put("bkt", "scans/case_013.bin", b"changed")
    loader = torch.utils.data.DataLoader(dataset, batch_size=4, num_workers=workers)
    assert sum(len(batch) for batch in loader) == 37
    assert dataset.skipped == 3


# An IterableDataset that raises in a worker makes torch wait five seconds for each worker, so these run once.
@pytest.mark.parametrize("style", STYLES)
def test_missing_or_changed_objects_raise_in_workers(gcs: Bucket, put: Put, style: type[Any]) -> None:
    check_vanished_and_changed(gcs, put, style, 2)


@pytest.mark.parametrize("style", STYLES)
def test_missing_or_changed_objects_raise(shared_bucket: Bucket, put: Put, style: type[Any]) -> None:
    check_vanished_and_changed(shared_bucket, put, style, 0)


def check_vanished_and_changed(shared_bucket: Bucket, put: Put, style: type[Any], workers: int) -> None:
    put(shared_bucket, OBJECTS)
    dataset = style(f"{shared_bucket.uri}/scans/", config=shared_bucket.config)
    assert len(dataset) == 40
    loader = torch.utils.data.DataLoader(dataset, batch_size=4, num_workers=workers, collate_fn=list)
    put(shared_bucket, {"scans/case_005.bin": b"other content"})
    with pytest.raises(errors.ChangedError, match=r"case_005\.bin: the object changed after it was listed"):
        list(loader)
    shared_bucket.store.delete(shared_bucket.key("scans/case_005.bin"))
    with pytest.raises(errors.NotFoundError, match=r"case_005\.bin: no such object"):
        list(loader)


def test_bucket_failures_are_never_skipped(gcs: Bucket, put: Put, emulator: Emulator) -> None:
    put(gcs, OBJECTS)
    dataset = MapDataset("gs://bkt/scans/", config=gcs.config, on_error="skip")
    assert len(dataset) == 40
    emulator.set_access(Access(bearer_token="another"))
    with pytest.raises((errors.CredentialsError, errors.PermissionDeniedError), match="gs://bkt/scans"):
        dataset.__getitems__([0, 1])


@pytest.mark.parametrize("style", STYLES)
def test_epoch_over_a_failing_server_is_complete(gcs: Bucket, put: Put, emulator: Emulator, style: type[Any]) -> None:
    """More than 1% of requests fail, in all possible ways."""
    objects = {f"o{i:04d}": bytes([i % 256]) * 3000 for i in range(1500)}
    put(gcs, objects)
    emulator.set_faults(
        Faults(error_rate=0.01, error_statuses=(429, 503, 500), cut_rate=0.01, truncate_rate=0.01, seed=11)
    )
    dataset = style("gs://bkt/", config=gcs.config)
    loader = torch.utils.data.DataLoader(dataset, batch_size=16, num_workers=2, collate_fn=list)
    assert sorted(b for batch in loader for b in batch) == sorted(objects.values())
    assert dataset.traffic().retries > 10


def test_bad_arguments_are_named(folder: Bucket) -> None:
    for arguments, message in (
        ({"on_error": "ignore"}, "on_error='ignore'"),
        ({"tail": "pad"}, "tail must be .* got 'pad'"),
        ({"rank": 0}, "belong together"),
        ({"rank": 3, "world_size": 2}, "rank 3 of 2"),
        ({"compose": "yes"}, "compose must be .* got 'yes'"),
        ({"compose": "on"}, "only on GCS"),
        ({"decode": "nii"}, "decode must be a function"),
        ({"match": []}, "empty list of patterns"),
        ({"cache": "c", "cache_bytes": 0}, "cache_bytes must be above zero, got 0"),
    ):
        with pytest.raises(errors.ConfigError, match=message):
            len(MapDataset(folder.uri, **arguments))  # type: ignore[arg-type]
    with pytest.raises(errors.ConfigError, match="read_ahead_bytes must be at least 1, got 0"):
        IterableDataset(folder.uri, read_ahead_bytes=0)
    with pytest.raises(TypeError, match="shufle"):
        MapDataset(folder.uri, shufle=True)  # type: ignore[call-arg]


@pytest.mark.parametrize("style", STYLES)
def test_constructing_a_dataset_reads_nothing(style: type[Any]) -> None:
    dataset = style("gs://bkt/x", config=StoreConfig(endpoint="http://127.0.0.1:9"))
    assert dataset.traffic().requests == 0


def test_leaving_an_epoch_early_does_not_hang(gcs: Bucket, put: Put) -> None:
    put(gcs, {f"o{i:03d}": bytes(100_000) for i in range(300)})
    dataset = IterableDataset("gs://bkt/", config=gcs.config)
    loader = torch.utils.data.DataLoader(dataset, batch_size=2, num_workers=2, collate_fn=len)
    next(iter(loader))
    del loader
    assert not [p for p in multiprocessing.active_children() if "DataLoader" in p.name]


def test_loader_prefetches_the_next_batch(gcs: Bucket, put: Put, emulator: Emulator) -> None:
    put(gcs, OBJECTS)
    dataset = MapDataset("gs://bkt/scans/", config=gcs.config, shuffle=True)
    loader = DataLoader(dataset, 4, collate_fn=list)
    emulator.reset_counters()
    batches = iter(loader)
    first = next(batches)
    while emulator.counters().get.requests < 8:
        pass  # the loader prefetches the second batch
    assert emulator.counters().get.requests == 8
    assert sorted([*first, *(b for batch in batches for b in batch)]) == sorted(BODIES)
    assert emulator.counters().get.requests == 40


@pytest.mark.parametrize("workers", [0, 2])
def test_prefetching_does_not_change_the_samples(gcs: Bucket, put: Put, workers: int) -> None:
    put(gcs, OBJECTS)
    dataset = MapDataset("gs://bkt/scans/", config=gcs.config, shuffle=True)
    plain = torch.utils.data.DataLoader(
        dataset, batch_size=3, sampler=dataset.sampler(), num_workers=workers, collate_fn=list
    )
    expected = list(plain)
    loader = DataLoader(dataset, 3, num_workers=workers, collate_fn=list)
    assert list(loader) == expected
    assert list(loader) != expected  # another epoch
    assert sorted(b for batch in loader for b in batch) == sorted(BODIES)


def test_forked_worker_does_not_wait_for_its_parents_prefetch(gcs: Bucket, put: Put) -> None:
    put(gcs, OBJECTS)
    dataset = MapDataset("gs://bkt/scans/", config=gcs.config)
    next(iter(DataLoader(dataset, 20, collate_fn=list)))  # leaves the second batch in flight in the parent
    loader = torch.utils.data.DataLoader(dataset, batch_size=20, num_workers=1, collate_fn=list)
    assert [b for batch in loader for b in batch] == BODIES


def test_empty_objects_are_pinned_too(gcs: Bucket, put: Put, emulator: Emulator) -> None:
    put(gcs, {"a": b"", "b": b"", "c": b""})
    dataset = MapDataset("gs://bkt/", config=gcs.config)
    assert list(dataset) == [b"", b"", b""]
    emulator.put("bkt", "a", b"content")
    emulator.delete("bkt", "b")
    with pytest.raises(errors.ChangedError, match="gs://bkt/a"):
        _ = dataset[0]
    with pytest.raises(errors.NotFoundError, match="gs://bkt/b: no such object"):
        _ = dataset[1]


def test_batch_of_failures_raises_with_torchs_loader(gcs: Bucket, put: Put) -> None:
    put(gcs, {"a": b"body 7body"})
    dataset = MapDataset("gs://bkt/", config=gcs.config, decode=fails_on_seven, on_error="skip")
    with pytest.raises(errors.DatasetError, match=r"every sample of a batch failed.*gs://bkt/a.*voxlane.DataLoader"):
        list(torch.utils.data.DataLoader(dataset))
    assert list(DataLoader(dataset, 1)) == []
    # Settings of a loader on the dataset end with its pass.
    with pytest.raises(errors.DatasetError):
        list(torch.utils.data.DataLoader(dataset))


def test_manifest_without_matches_raises(folder: Bucket, put: Put) -> None:
    put(folder, OBJECTS)
    with pytest.raises(errors.EmptyError, match="no object matches"):
        len(MapDataset(list_objects(folder.uri), match="*.nothing"))


def test_wrong_types_are_named(folder: Bucket) -> None:
    for arguments in ({"config": {"endpoint": "x"}}, {"match": 5}, {"seed": "a"}, {"seed": -1}):
        with pytest.raises(errors.ConfigError, match=next(iter(arguments))):
            MapDataset(folder.uri, **arguments)
    with pytest.raises(errors.ConfigError, match="must be a URI, a path or a Manifest, got None"):
        MapDataset(None)


def test_key_function_that_raises_names_the_key(folder: Bucket, put: Put) -> None:
    put(folder, {"x/a": b"1", "y/a": b"1"})
    zipped = MapDataset.zip(
        key=lambda k: k.split(":")[1], x=MapDataset(f"{folder.uri}/x"), y=MapDataset(f"{folder.uri}/y")
    )
    with pytest.raises(errors.PairError, match=r"key= raised IndexError on '.*x/a'"):
        len(zipped)


ODD_KEYS = [
    "a//b",
    "/lead",
    "a/../b",
    "../../x",
    "tab\tkey",
    "line\nfeed",
    "full/",
    "e",
    "e/x",
    "a%20b",
    "é",
    "e\u0301",
]


@pytest.mark.parametrize("dialect", ["gcs", "s3_emulator"])
@pytest.mark.parametrize("style", [MapDataset, IterableDataset])
def test_bucket_with_odd_keys_is_read_completely(
    dialect: str, style: type[Any], request: pytest.FixtureRequest, emulator: Emulator, tmp_path: Path
) -> None:
    """A tenth of the keys cannot be addressed by the byte engine, some are empty, and some are folder markers."""
    bucket: Bucket = request.getfixturevalue(dialect)
    contents = {key: key.encode() * 1000 for key in ODD_KEYS} | {"empty": b"", "e": b""}
    contents |= {f"clean/{i:03d}": bytes([i]) * 500 for i in range(100)}
    emulator.put_many("bkt", {**contents, "scans/": b"", "scans/todo/": b"", "e/": b""})
    expected = [contents[key] for key in sorted(contents)]
    config = dataclasses.replace(bucket.config, part_bytes=2000)  # the odd keys are read in ranges, too
    for _ in range(2):  # from the bucket, then from the cache
        dataset = style(bucket.uri, config=config, cache=tmp_path)
        assert [sample for batch in DataLoader(dataset, batch_size=10, num_workers=2) for sample in batch] == expected
        assert dataset.manifest.folder_markers == 3
    clean = [body for key, body in sorted(contents.items()) if key.startswith("clean/")]
    assert list(style(bucket.uri, config=bucket.config, match="clean/*")) == clean
    dataset.manifest.save(f"{tmp_path}/m.parquet")
    assert list(style(Manifest.load(f"{tmp_path}/m.parquet"), config=bucket.config)) == expected


def test_odd_key_that_changes_is_skipped_alone(gcs: Bucket, emulator: Emulator) -> None:
    contents = {key: key.encode() for key in ODD_KEYS}
    emulator.put_many("bkt", contents)
    dataset = MapDataset("gs://bkt", config=gcs.config, on_error="skip")
    assert len(dataset) == len(ODD_KEYS)
    emulator.put("bkt", "a//b", b"other")
    emulator.delete("bkt", "full/")
    with pytest.raises(errors.ChangedError, match="gs://bkt/a//b"):
        MapDataset(dataset.manifest, config=gcs.config)[sorted(ODD_KEYS).index("a//b")]
    samples = [sample for batch in DataLoader(dataset, batch_size=4, num_workers=2) for sample in batch]
    assert samples == [contents[key] for key in sorted(ODD_KEYS) if key not in ("a//b", "full/")]
    assert dataset.skipped == 2


def test_odd_keys_are_zipped(gcs: Bucket, emulator: Emulator) -> None:
    names = ["a//b", "../c", "d\te", "f "]
    emulator.put_many("bkt", {f"{side}/{name}.bin": f"{side}{name}".encode() for side in "xy" for name in names})
    pairs = MapDataset.zip(
        x=MapDataset("gs://bkt/x/", config=gcs.config), y=MapDataset("gs://bkt/y/", config=gcs.config)
    )
    assert list(pairs) == [{"x": f"x{name}".encode(), "y": f"y{name}".encode()} for name in sorted(names)]


def test_key_that_needs_a_missing_extra_is_skipped_alone(
    s3_emulator: Bucket, emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulator.put_many("bkt", {"a": b"1", "b//c": b"2", "d": b"3"})
    manifest = list_objects("s3://bkt", config=s3_emulator.config)
    # Keys that are not in the config are found by boto3, or by the engine.
    config = replace(s3_emulator.config, access_key_id=None, secret_access_key=None)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testtest")
    monkeypatch.setitem(sys.modules, "botocore.exceptions", None)
    with pytest.raises(errors.MissingExtraError, match=r"s3://bkt/b//c: .*voxlane\[s3\]"):
        list(MapDataset(manifest, config=config))
    dataset = IterableDataset(manifest, config=config, on_error="skip")
    assert (list(dataset), dataset.skipped) == ([b"1", b"3"], 1)


@pytest.mark.parametrize("receives_directly", [True, False])
def test_objects_of_all_sizes_are_read_exactly(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, receives_directly: bool
) -> None:
    """Objects of at least 1 MiB are received into their memory, those above a part in several ranges."""
    if not receives_directly:
        monkeypatch.setattr(Store, "receives_directly", False)
    mib, part_bytes = 1 << 20, 5 << 20
    sizes = (0, 1, mib - 1, mib, 3 * mib, part_bytes, part_bytes + 1, 2 * part_bytes + 7)
    pattern = bytes(range(251))
    bodies = [(pattern * (size // 251 + 1))[:size] for size in sizes]
    store = bucket.with_config(part_bytes=part_bytes).store
    for number, body in enumerate(bodies):
        store.put(bucket.key(f"{number}.bin"), body)
    dataset = MapDataset(f"{bucket.uri}/", config=store.config, cache=str(tmp_path / "cache"))
    for _ in range(2):  # the second time from the cache
        assert [dataset[i] for i in range(len(bodies))] == bodies
    assert list(IterableDataset(f"{bucket.uri}/", config=store.config)) == bodies
