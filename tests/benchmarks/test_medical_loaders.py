"""Test the comparison with other loaders: locating patches in the volumes, and reporting results."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import medical_loader_data
import medical_loader_report

SIDE, PATCH = 48, 24


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, Any]]:
    folder = str(tmp_path_factory.mktemp("peers"))
    for number in range(2):
        medical_loader_data.make_source(folder, number, SIDE, "", "")
    return [medical_loader_data.open_verified(folder, number) for number in range(2)]


def _cut(source: tuple[Any, Any], start: tuple[int, int, int]) -> tuple[Any, Any]:
    box = tuple(slice(a, a + PATCH) for a in start)
    return medical_loader_data.normalised(np.array(source[0][box])), np.array(source[1][box])


def test_volume_is_the_same_every_time(sources: list[tuple[Any, Any]], tmp_path: Path) -> None:
    medical_loader_data.make_source(str(tmp_path), 1, SIDE, "", "")
    again = medical_loader_data.open_verified(str(tmp_path), 1)
    assert np.array_equal(again[0], sources[1][0])
    assert np.array_equal(again[1], sources[1][1])
    assert not np.array_equal(sources[0][0], sources[1][0])
    assert set(np.unique(again[1])) == {0, *medical_loader_data.CLASSES}


@pytest.mark.parametrize("number", [0, 1])
def test_patch_location_is_where_it_was_cut(sources: list[tuple[Any, Any]], number: int) -> None:
    start = (5, 11, 17)
    assert medical_loader_data.locate(sources, *_cut(sources[number], start)) == (number, start)


def test_patch_may_reach_beyond_the_far_faces(sources: list[tuple[Any, Any]]) -> None:
    start = (SIDE - PATCH + 4, 3, 3)
    image, label = _cut(sources[0], start)
    beyond = [(0, PATCH - n) for n in image.shape]
    # nnU-Net fills images with 0 and labels with -1 there
    padded = np.pad(image, beyond), np.pad(label.astype(np.int16), beyond, constant_values=-1)
    assert medical_loader_data.locate(sources, *padded) == (0, start)


def test_other_voxels_are_refused(sources: list[tuple[Any, Any]]) -> None:
    image, label = _cut(sources[0], (8, 8, 8))
    with pytest.raises(ValueError, match="not in any volume"):
        medical_loader_data.locate(sources, np.ascontiguousarray(image[:, ::-1]), label)
    with pytest.raises(ValueError, match="not in any volume"):
        medical_loader_data.locate(sources, image, label + 1)
    with pytest.raises(ValueError, match="do not occur in the volumes"):
        medical_loader_data.locate(sources, image + np.float32(0.005), label)


def _result() -> dict[str, Any]:
    def row(contender: str, place: str, rate: float, **more: Any) -> dict[str, Any]:
        keys = ("first_batch_s", "client_cpu_s_per_sample", "requests_per_sample", "bucket_bytes_per_sample")
        disk = ("disk_bytes_per_sample",) if place == "disk" else ()
        values = dict.fromkeys((*keys, *disk), 2.0) | {"peak_memory_bytes": 3e8, **more}
        spreads = {k: {"median": v, "min": v, "max": v} for k, v in values.items()}
        rates = {"median": rate, "min": rate / 2, "max": rate * 2}
        return {"contender": contender, "place": place, "latency_s": 0.02, "samples_per_s": rates, **spreads}

    return {
        "date": "2026-01-01T00:00:00",
        "commit": "abc",
        "python": "3.11",
        "hardware": {"cpu": "a CPU", "cores": 2, "memory_gib": 16},
        "versions": {"torch": "2"},
        "settings": {
            "quick": True,
            "volume_side": 336,
            "volumes": 8,
            "patches": 240,
            "whole_patches": 32,
            "litdata_items": 12,
            "rounds": 3,
            "patch": 128,
            "batch": 2,
            "workers": 2,
            "volume": "synthetic",
            "label": "synthetic",
            "form_bytes_per_volume": {"raw": 190_000_000},
        },
        "summary": [
            row("voxlane patches", "bucket", 40.0, bucket_bytes_per_sample=2e6),
            row("dataflux", "bucket", 2.0, bucket_bytes_per_sample=190e6),
            {"contender": "s3torchconnector", "place": "bucket", "latency_s": 0.02, "error": "it | broke\nhere"},
            row("voxlane patches from disk", "disk", 40.0),
            row("nnU-Net blosc2", "disk", 80.0),
        ],
    }


def test_section_names_faster_and_failed_peers() -> None:
    text = medical_loader_report.peers_section(_result())
    lines = {line.split(" | ")[0].strip("|* "): line for line in text.splitlines() if line.startswith("| ")}
    assert "QUICK RUN" in text
    assert "20.00 (5.00 to 80.00)" in lines["dataflux"]
    assert "190.00 | 95.0" in lines["dataflux"]
    assert "failed: it / broke" in lines["s3torchconnector"]
    assert "0.50 (0.12 to 2.00)" in lines["nnU-Net blosc2"]
    columns = {line.count(" | ") for name, line in lines.items() if name in ("dataflux", "s3torchconnector", "loader")}
    assert len(columns) == 2  # the bucket's table has more columns than the disk's, whose heading is the last


def test_plot_leaves_out_failed_variants(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    medical_loader_report.draw_peers(_result(), tmp_path / "peers.png")
    assert (tmp_path / "peers.png").stat().st_size > 10_000


_SMALL = """
import json
import sys

sys.path.insert(0, sys.argv[1])
import compare_medical_loaders

if __name__ == "__main__":  # the writers are processes that import this
    setting = compare_medical_loaders.Setting(
        patch=24, volume_side=48, volumes=2, patches=6, whole_patches=4, litdata_items=2, rounds=1
    )
    told, samples = compare_medical_loaders.run(setting, sys.argv[2:])
    print(json.dumps({"told": told, "summary": compare_medical_loaders.summary(samples), "samples": samples}))
"""


@pytest.mark.cluster
def test_small_comparison_from_volumes_to_figures(tmp_path: Path) -> None:
    for module in ("envoy", "psutil"):
        pytest.importorskip(module)
    (tmp_path / "small.py").write_text(_SMALL)
    chosen = ["voxlane patches", "voxlane whole objects", "voxlane patches from disk"]
    folder = str(Path(medical_loader_data.__file__).parent)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "small.py"), folder, *chosen], capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stderr
    output = json.loads(done.stdout.splitlines()[-1])
    assert [s.get("error") for s in output["samples"]] == [None] * 4
    by_place = {(r["contender"], r["latency_s"]): r for r in output["summary"]}
    assert len(by_place) == 4  # ours reads patches from a bucket with and without latency
    assert all(s["checked"] == 2 for s in output["samples"])
    whole_bytes = by_place["voxlane whole objects", 0.02]["bucket_bytes_per_sample"]["median"]
    assert whole_bytes >= 5 * 48**3  # float32 image and uint8 label, whole
    assert by_place["voxlane patches", 0.02]["bucket_bytes_per_sample"]["median"] < whole_bytes
    assert by_place["voxlane patches from disk", 0.0]["disk_bytes_per_sample"]["median"] > 0
