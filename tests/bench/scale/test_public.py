"""The public table, and the defaults that we measured ourselves."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import pytest

from voxlane.bench.scale import public
from voxlane.bench.scale.command import add
from voxlane.bench.scale.setting import SimulateSetting, from_options
from voxlane.bench.scale.study import simulated

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


@pytest.fixture(scope="module")
def setting() -> SimulateSetting:
    parser = argparse.ArgumentParser()
    add(parser.add_subparsers(), lambda _: None, lambda _: None)  # type: ignore[arg-type, return-value]
    return from_options(parser.parse_args(["simulate", "--thin", "8"]))


@pytest.mark.parametrize("row", public.TABLE, ids=lambda row: str(row.nodes))
def test_the_table_within_15_percent(setting: SimulateSetting, row: public.Row) -> None:
    """Of both epochs, but for the second one of 128 nodes, which lies far below the first; there a chart's minutes may
    have begun badly."""
    found = simulated(setting, "whole-object", row.nodes)[0]
    assert found["steps"] == row.steps
    for number, gbps in enumerate(row.gbps):
        if (row.nodes, number) != (128, 1):
            assert found["max_gbps"] == pytest.approx(gbps, rel=0.15)
    assert found["max_gbps_at_worst"] <= found["max_gbps"]
    assert found["bytes"] == pytest.approx(row.steps * row.nodes * 32 * 187.5e6)


def test_patches_need_no_wait_where_whole_objects_are_the_limit(setting: SimulateSetting) -> None:
    whole = simulated(setting, "whole-object", 1024)[0]
    patches = simulated(replace(setting, thin=2), "patches", 1024)[0]
    assert whole["stall_share"] > 0.9
    assert patches["steady"]["stall_share"] < 0.01
    assert whole["bytes"] / whole["samples"] > 15 * patches["bytes"] / patches["samples"]


def test_defaults_are_what_was_measured() -> None:
    patches = json.loads((RESULTS / "segmentation_loading.json").read_text())
    (ours,) = [row for row in patches["summary"] if (row["mode"], row["cache"]) == ("patches", "none")]
    assert ours["bytes_per_sample"]["median"] == pytest.approx(public.PATCH_BYTES, rel=1e-3)
    requests = ours["requests_per_sample"]["median"] - public.INDEX_REQUESTS
    assert requests == pytest.approx(public.PATCH_REQUESTS, rel=1e-3)
    assert ours["cpu_s_per_sample"]["median"] == pytest.approx(public.PATCH_CPU_S, rel=0.01)
    readers = json.loads((RESULTS / "patch_readers.json").read_text())
    assert sum(readers["settings"]["object_bytes"].values()) == pytest.approx(public.PREPARED_BYTES, rel=1e-2)
    loading = json.loads((RESULTS / "loading.json").read_text())
    (large,) = [
        row
        for row in loading["summary"]
        if (row["service"], row["size_bytes"], row["style"], row["contender"]) == ("gcs", 157286400, "map", "voxlane")
    ]
    assert large["client_cpu_s"]["median"] / 4 / 157286400 == pytest.approx(public.WHOLE_CPU_S_PER_BYTE, rel=0.01)
