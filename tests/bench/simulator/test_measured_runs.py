"""Test simulating measured runs from their result files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from voxlane.bench.loading.raw_scans import find_cases
from voxlane.bench.simulator import measured_runs
from voxlane.errors import ConfigError
from voxlane.store.listing import list_objects


def result(**changes: Any) -> dict[str, Any]:
    """A run of one rank on whole objects: 0.1 s to the first byte, 10 MB at 10 MB/s, steps of 0.5 s. Two samples at a
    time, so a batch of one every 0.55 s."""
    epoch = {
        "mode": "whole-object",
        "cache": "none",
        "seconds": 20 * 0.55 + 1.1,
        "samples": 20,
        "samples_per_s": 20 / (20 * 0.55 + 1.1),
        "bytes": 200_000_000,
        "requests": 20,
        "retries": 0,
        "stall_share": 1 - 10 / (20 * 0.55 + 1.1),
        "first_batch_s": 1.1,
        "cpu_s": 0.0,
        "decode_s": 0.0,
        "nodes": [{"host": "a"}],
    }
    setting = {
        "batch": 1,
        "step_time_s": 0.5,
        "workers": 0,
        "prefetch": 2,
        "in_flight": None,
        "samples": [20],
        "seed": 0,
    }
    faults = {"latency_s": 0.1, "jitter_s": 0.0, "bandwidth_bytes_per_s": 10e6}
    return {
        "benchmark": "voxlane bench loading",
        "hardware": {"cores": 2},
        "setting": {**setting, "ranks": 1, "nodes": 1, "sync": True, "foreground_share": 0.0},
        "data": [{"mode": "whole-object", "cases": 20, "sample_bytes": 10e6}],
        "server": {"kind": "emulator", "faults": faults},
        "epochs": [{**epoch, "epoch": 1}, {**epoch, "epoch": 2}],
        **changes,
    }


def saved(folder: Path, document: Any) -> str:
    path = folder / "result.json"
    path.write_text(json.dumps(document))
    return str(path)


def test_hand_computed_run(tmp_path: Path) -> None:
    (compared,) = measured_runs.compare(saved(tmp_path, result()))
    assert compared["simulated_samples_per_s"] == pytest.approx(compared["measured_samples_per_s"], rel=0.03)
    assert compared["simulated_stall"] == pytest.approx(compared["measured_stall"], abs=0.03)
    assert compared["simulated_first_batch_s"] == pytest.approx(1.1)
    assert compared["server"] == "100 ms, 10 MB/s per connection"
    assert abs(compared["error"]) <= 0.15


def test_objects_of_unequal_size_are_waited_for_by_the_larger(tmp_path: Path) -> None:
    document = result(data=[{"mode": "whole-object", "cases": 20, "object_bytes": [8e6, 2e6]}])
    (compared,) = measured_runs.compare(saved(tmp_path, document))
    assert compared["simulated_first_batch_s"] == pytest.approx(0.9)


def patches(cache: str, requests: int, **setting: Any) -> dict[str, Any]:
    """Return a run on ten cases, each read twice per epoch."""
    document = result(data=[{"mode": "patches", "cases": 10, "sample_bytes": None}])
    document["setting"] |= setting
    for epoch in document["epochs"]:
        epoch |= {"mode": "patches", "cache": cache, "requests": requests, "bytes": 20_000_000}
    return document


def test_first_visit_of_a_case_costs_more_rounds(tmp_path: Path) -> None:
    """Half of the samples are first visits of a case with a cold cache; none are with a warm cache."""
    cold = patches("cold", 20 * 5 + 10 * 2)
    for epoch in cold["epochs"]:
        assert measured_runs.first_visits(cold, epoch) == (0.5, 0.0)
    work = measured_runs.work_of(cold, cold["epochs"][0])
    assert sorted(len(rounds) for _, rounds in work.kinds) == [1, 2]
    assert (work.requests, work.bytes) == (pytest.approx(6), pytest.approx(1e6))
    assert len(measured_runs.compare(saved(tmp_path, cold))) == 1
    warm = patches("warm", 20 * 5)
    assert measured_runs.first_visits(warm, warm["epochs"][0]) == (0.0, 0.0)
    assert measured_runs.work_of(warm, warm["epochs"][0]).requests == pytest.approx(5)


def test_without_a_cache_every_sample_is_its_cases_first() -> None:
    """As in the benchmark, nothing is cached in any epoch, not even indexes."""
    document = patches("none", 20 * 5 + 20 * 2 + 10, foreground_share=0.5)
    for epoch in document["epochs"]:
        assert measured_runs.first_visits(document, epoch) == (1.0, 0.5)
        work = measured_runs.work_of(document, epoch)
        assert sorted(len(rounds) for _, rounds in work.kinds) == [2, 3]
        assert work.requests == pytest.approx(7.5)


def test_benchmark_reports_the_size_of_each_object(tmp_path: Path) -> None:
    for folder, sizes in {"images": (400, 600), "labels": (100, 200)}.items():
        (tmp_path / folder).mkdir()
        for number, size in enumerate(sizes):
            (tmp_path / folder / f"case_{number}.npy").write_bytes(bytes(size))
    compared = find_cases(list_objects(f"{tmp_path}/"), None)
    assert compared.object_bytes == [500, 150]
    assert sum(compared.object_bytes) == compared.sample_bytes


def test_nodes_that_one_machine_plays_share_its_cores() -> None:
    document = result()
    document["setting"] |= {"nodes": 2, "ranks": 2, "samples": [80]}
    cluster = measured_runs.scenario_of("x", document, {**document["epochs"][0], "samples": 80}).cluster
    assert (cluster.nodes, cluster.ranks, cluster.cores) == (1, 4, 2)


def test_epoch_that_starts_workers_is_left_out() -> None:
    document = result()
    document["setting"]["workers"] = 2
    assert [e["epoch"] for e in measured_runs.compared_epochs(document, "whole-object", "none")] == [2]
    document["epochs"].pop()
    assert [e["epoch"] for e in measured_runs.compared_epochs(document, "whole-object", "none")] == [1]


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "not a result of voxlane bench loading"),
        ({"benchmark": "voxlane bench scaling"}, "not a result of voxlane bench loading"),
        (result(epochs=[]), "no epochs"),
        (result(server=None), "does not describe its server"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, document: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        measured_runs.compare(saved(tmp_path, document))


def test_no_file_and_no_json(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        measured_runs.load(str(tmp_path / "none.json"))
    (tmp_path / "some.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        measured_runs.load(str(tmp_path / "some.json"))
