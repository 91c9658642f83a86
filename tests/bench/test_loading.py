"""Test `voxlane bench loading`: matching objects to cases, equal samples in both modes, and whole benchmarks."""

from __future__ import annotations

import dataclasses
import io
import json
import multiprocessing
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.distributed as dist

from tests.conftest import Bucket
from tests.volume import sample_data
from voxlane.bench import ranks
from voxlane.bench.loading import report as loading_report
from voxlane.bench.loading.measure import LoadingResult, RankEpoch
from voxlane.bench.loading.raw_scans import RawCase, WholeObjects, crop, decode_case, find_cases
from voxlane.bench.loading.settings import LoadingSettings
from voxlane.bench.step.settings import parse_patch
from voxlane.cli.main import main
from voxlane.errors import ConfigError, LayoutError, ScanError
from voxlane.store.listing import Manifest, list_objects
from voxlane.store.listing.manifest import SCHEMA
from voxlane.testing import Emulator, Faults
from voxlane.volume.patch_stream import PatchStream
from voxlane.volume.prepare import PrepareConfig, prepare
from voxlane.volume.prepared_dataset import Prepared

CASES = 6
SETTING = LoadingSettings(data=("gs://b/raw",), ranks=2, nodes=3, epochs=1, foreground_share=0.0, max_gap_bytes=0)


@pytest.fixture
def data(gcs: Bucket, emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """Provide `raw` in KiTS19's layout and `prepared` on the same grid, in a bucket set by the environment."""
    emulator.put_many("bkt", {f"raw/{name}": body for name, body in sample_data.make_kits19(CASES).items()})
    arguments = PrepareConfig(folds=2, workers=1, plan=sample_data.PLAN)
    prepare(f"{gcs.uri}/raw", f"{gcs.uri}/prepared", arguments, gcs.config, progress=False)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", emulator.url)
    emulator.reset_counters()
    return gcs


def bench(folder: Path, *words: str) -> dict[str, Any]:
    """Run the benchmark in this process and return its result file."""
    out = folder / "out.json"
    assert main(["bench", "loading", *words, "--out", str(out), "--no-plot"]) == 0
    result: dict[str, Any] = json.loads(out.read_text())
    return result


def manifest_of(*names: str) -> Manifest:
    rows = [{"key": f"raw/{name}", "size": 10, "etag": None, "version": None} for name in sorted(names)]
    return Manifest("gs://b/raw/", pa.Table.from_pylist(rows, SCHEMA))


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


# -- raw scans ---------------------------------------------------------------------------------------------------------


def test_arrays_are_paired_by_folder_and_by_ending() -> None:
    result = find_cases(
        manifest_of("images/b.npy", "images/a.npy", "labels/a.npy", "labels/b.npy", "images/c.npy"), None
    )
    keys = result.manifest.keys()
    assert [(c.id, keys[c.images[0]], keys[c.label]) for c in result.cases] == [
        ("a", "raw/images/a.npy", "raw/labels/a.npy"),
        ("b", "raw/images/b.npy", "raw/labels/b.npy"),
    ]
    assert result.sample_bytes == 20
    assert result.left_out == 1
    assert [c.id for c in find_cases(manifest_of("t/a_x.npy", "t/a_y.npy", "t/b_x.npy"), None).cases] == ["a"]
    public = find_cases(manifest_of("images/case_00000_x.npy", "labels/case_00000_y.npy"), None)  # Dataflux's demo
    assert [(c.id, c.images, c.label) for c in public.cases] == [("case_00000", (0,), 1)]


def test_layouts_that_prepare_takes_are_raw_sets_too() -> None:
    objects = sample_data.make_nnunet(3)
    result = find_cases(manifest_of(*objects), json.loads(objects["dataset.json"]))
    assert [(c.id, len(c.images)) for c in result.cases] == [("p_0", 2), ("p_1", 2), ("p_2", 2)]
    with pytest.raises(LayoutError, match="unknown dataset layout"):
        find_cases(manifest_of("readme.txt"), None)
    with pytest.raises(LayoutError, match="both an image and a label"):
        find_cases(manifest_of("case_00000/imaging.nii.gz"), None)


def test_arrays_have_channels_and_fit_their_label() -> None:
    case = RawCase("a", (0,), 1)
    image = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    for stored in (image, image[None], np.asfortranarray(image)):
        got, label = decode_case(case, ["a.npy", "b.npy"], [npy(stored), npy(np.ones((2, 3, 4), np.uint8))])
        assert got.shape == (1, 2, 3, 4)
        assert np.array_equal(got[0], image)
        assert label.shape == (2, 3, 4)
    with pytest.raises(ScanError, match=r"a: the image has \(2, 3, 4\)"):
        decode_case(case, ["a.npy", "b.npy"], [npy(image), npy(np.ones((2, 3, 5), np.uint8))])
    for body, message in ((npy(image)[:-1], "a.npy: truncated"), (b"not an array", r"not a \.npy file")):
        with pytest.raises(ScanError, match=message):
            decode_case(case, ["a.npy", "b.npy"], [body, npy(image)])
    with pytest.raises(ScanError, match="an array of 2 axes"):
        decode_case(case, ["a.npy", "b.npy"], [npy(image[0]), npy(image)])


def test_crops_reach_beyond_the_volume_with_zeros() -> None:
    array = np.arange(1, 61).reshape(1, 3, 4, 5)
    assert np.array_equal(crop(array, (1, 0, 2), (2, 3, 3)), array[:, 1:3, 0:3, 2:5])
    beyond = crop(array, (-1, 2, 0), (3, 4, 5))
    assert beyond.shape == (1, 3, 4, 5)
    assert np.array_equal(beyond[:, 1:, :2], array[:, :2, 2:])
    assert not beyond[:, 0].any()
    assert not beyond[:, :, 2:].any()


def test_cases_that_are_left_out_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "raw").mkdir()
    for name in ("a_x", "a_y", "b_x", "b_y", "c_x"):
        (tmp_path / "raw" / f"{name}.npy").write_bytes(npy(np.zeros((1, 8, 8, 8), np.uint8)))
    bench(
        tmp_path,
        f"{tmp_path}/raw",
        *["--patch", "8,8,8", "--batch", "2", "--steps", "1", "--workers", "0", "--epochs", "1"],
    )
    assert "/raw: 1 of 3 cases left out: no label, or no image" in capsys.readouterr().err


def test_both_modes_give_the_same_patches_of_the_same_cases(data: Bucket) -> None:
    prepared = Prepared.load(f"{data.uri}/prepared", data.config)
    raw = find_cases(list_objects(f"{data.uri}/raw/", config=data.config), None)
    assert [case.id for case in raw.cases] == prepared.ids
    arguments: dict[str, Any] = {
        "samples": 9,
        "patch": (16, 16, 16),
        "foreground_share": 0.0,
        "seed": 3,
        "in_flight": 3,
    }
    (ct,) = prepared.plan.normalisation
    whole, patches = WholeObjects(raw, data.config, **arguments), PatchStream(prepared, **arguments)
    for epoch in range(2):
        whole.set_epoch(epoch)
        patches.set_epoch(epoch)
        pairs = list(zip(whole, patches, strict=True))
        assert len(pairs) == 9
        for whole_sample, patch_sample in pairs:
            assert (whole_sample["row"], whole_sample["position"]) == (patch_sample["row"], patch_sample["position"])
            assert whole_sample["label"].equal(patch_sample["label"])
            normalised = (whole_sample["image"].clamp(ct.lower, ct.upper) - ct.mean) / ct.std
            inside = whole_sample["image"] != 0  # beyond the volume both are zero, normalised or not
            assert torch.allclose(normalised[inside], patch_sample["image"][inside], atol=0.01)


# -- settings ----------------------------------------------------------------------------------------------------------


def test_epoch_is_whole_steps() -> None:
    assert SETTING.samples_per_epoch(30) == 24
    assert dataclasses.replace(SETTING, samples=40).samples_per_epoch(5) == 36
    assert dataclasses.replace(SETTING, steps=5).samples_per_epoch(1) == 60
    with pytest.raises(
        ConfigError, match=r"12 samples, 2 on each of 6 ranks, but an epoch has 11 cases.*--samples 120"
    ):
        SETTING.samples_per_epoch(11)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"batch": 0}, "batch: .* 1, got 0"),
        ({"step_time_s": -1.0}, "step_time_s: .* 0, got -1"),
        ({"step_time_s": float("nan")}, "step_time_s: .*finite"),
        ({"workers": -1}, "workers: .* 0, got -1"),
        ({"foreground_share": 2.0}, "foreground_share: .* 1, got 2"),
        ({"patch": "0,1,1"}, "--patch"),
        ({"samples": 4, "steps": 2}, "--samples and --steps"),
        ({"data": ("a", "b", "c")}, "3 datasets"),
        ({"data": ("a", "b"), "manifest": "m"}, "--manifest"),
        ({"data": ("a", "b"), "listing_only": True}, "--listing-only with 2 datasets"),
        ({"manifest": "m", "listing_only": True}, "--listing-only with a saved listing"),
        ({"address": "auto"}, "--address"),
    ],
)
def test_settings_that_make_no_sense_are_named(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        dataclasses.replace(SETTING, **fields)


def test_patches_as_words() -> None:
    assert parse_patch("64") == (64, 64, 64)
    assert parse_patch("1,2,3") == (1, 2, 3)
    for text in ("", "1,2", "a", "1,2,3,4", "-1"):
        with pytest.raises(ConfigError, match="--patch"):
            parse_patch(text)


# -- what the figures mean ---------------------------------------------------------------------------------------------


def rank_epoch(**fields: Any) -> RankEpoch:
    values: dict[str, Any] = {
        "source": 0,
        "cache": "none",
        "epoch": 1,
        "rank": 0,
        "node": 0,
        "host": "h",
        "seconds": 2.0,
    }
    values |= {"steps": 10, "samples": 20, "first_batch_s": 0.1, "bytes": 10**9, "requests": 100}
    values |= {"retries": 0, "bucket_s": 3.0, "decode_s": 1.0, "cpu_s": 0.2, "memory_bytes": 1000, "server": None}
    return RankEpoch(**{**values, **fields})


def document(setting: LoadingSettings, *epochs: RankEpoch) -> dict[str, Any]:
    data = [{"uri": "gs://b/raw", "mode": "whole-object", "cases": 9, "sample_bytes": 5.0}]
    loading_result = LoadingResult(data=data, patch=(8, 8, 8), samples=[40], epochs=list(epochs), start={}, server=None)
    return loading_report.build_report(setting, loading_result)


def test_epochs_are_summed_over_ranks_and_over_each_nodes() -> None:
    served = {"bytes": 3 * 10**9, "requests": 301, "refused": 7, "cpu_s": 0.5}
    result = document(
        SETTING,
        rank_epoch(server=served),
        rank_epoch(rank=1, seconds=4.0, first_batch_s=0.3, retries=2),
        rank_epoch(rank=2, node=1, host="i"),
    )
    (epoch,) = result["epochs"]
    assert epoch["seconds"] == 4
    assert epoch["samples"] == 60
    assert epoch["samples_per_s"] == 15
    assert epoch["gbps"] == pytest.approx(6.0)
    assert epoch["requests_per_s"] == 75
    assert epoch["first_batch_s"] == 0.3
    # Ten steps of 0.1 s are half of 2 s and a quarter of 4 s.
    assert epoch["stall_share"] == pytest.approx(1 - (0.5 + 0.25 + 0.5) / 3)
    assert epoch["memory_bytes"] == 2000  # of the node that has most
    assert [(n["node"], n["host"], n["ranks"], n["samples"]) for n in epoch["nodes"]] == [
        (0, "h", 2, 40),
        (1, "i", 1, 20),
    ]
    assert (epoch["server_bytes"], epoch["server_requests"], epoch["server_refused"]) == (3 * 10**9, 301, 7)
    assert epoch["server_cpu_s"] == 0.5
    assert "the bucket refused 7 of 300 requests" in " ".join(loading_report.explain(result))
    text = loading_report.format_report(result)
    assert len(text.splitlines()) == 4
    assert "3,000.0" in text


@pytest.mark.parametrize(
    ("fields", "step_s", "bound"),
    [
        ({"seconds": 1.02}, 0.1, "step"),
        ({"seconds": 1.2, "first_batch_s": 0.19}, 0.1, "start"),
        ({}, 0.1, "bucket"),
        ({"bytes": 0}, 0.1, "disk"),
        ({"decode_s": 9.0}, 0.1, "decoding"),
        ({"cpu_s": 1e6}, 0.1, "processors"),
        ({}, 0.0, "bucket"),
    ],
)
def test_bottleneck_is_named(fields: dict[str, Any], step_s: float, bound: str) -> None:
    setting = dataclasses.replace(SETTING, ranks=1, nodes=1, step_time_s=step_s)
    result = document(setting, rank_epoch(**fields))
    assert result["summary"][0]["bound"] == bound
    output = " ".join(loading_report.explain(result))
    assert ("there is no stall" in output) == (step_s == 0)
    assert (result["summary"][0]["stall_share"] is None) == (step_s == 0)


# -- whole benchmarks --------------------------------------------------------------------------------------------------


def test_raw_scans_and_the_prepared_dataset_are_compared(
    data: Bucket, emulator: Emulator, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (f"{data.uri}/raw", f"{data.uri}/prepared", "--patch", "16", "--steps", "4", "--step-time", "0.01")
    result = bench(tmp_path, *words)
    assert [(e["mode"], e["epoch"], e["samples"]) for e in result["epochs"]] == [
        ("whole-object", 1, 8),
        ("patches", 1, 8),
        ("whole-object", 2, 8),
        ("patches", 2, 8),
    ]
    whole = sum(map(len, sample_data.make_kits19(CASES).values())) / CASES
    assert [(leg["cases"], leg["sample_bytes"]) for leg in result["data"]] == [(CASES, whole), (CASES, None)]
    for epoch in result["epochs"]:
        assert epoch["bytes"] == epoch["server_bytes"] > 0, "client and server count alike"
        assert epoch["requests"] == epoch["server_requests"]
        assert epoch["retries"] == epoch["server_refused"] == 0
        assert 0 <= epoch["stall_share"] <= 1
        assert epoch["memory_bytes"] > 10**6
        assert epoch["cpu_s"] > 0
    assert result["comparison"]["same_samples"]
    assert result["comparison"]["counted_by"] == "server"
    assert result["server"]["kind"] == "emulator"
    output = capsys.readouterr()
    assert "patches against whole-object, the same cases in the same order" in output.out
    assert "epoch 2 of 2" in output.err


def test_warm_cache_avoids_the_bucket_and_a_cold_cache_starts_empty(
    data: Bucket, emulator: Emulator, tmp_path: Path
) -> None:
    words = (f"{data.uri}/raw", f"{data.uri}/prepared", "--patch", "16", "--samples", "24", "--step-time", "0")
    result = bench(
        tmp_path, *words, "--cache", "none", "--cache", "cold", "--cache", "warm", "--cache-dir", str(tmp_path)
    )
    read = {
        (mode, cache): [e["server_bytes"] for e in result["epochs"] if (e["mode"], e["cache"]) == (mode, cache)]
        for mode in ("whole-object", "patches")
        for cache in ("none", "cold", "warm")
    }
    for mode in ("whole-object", "patches"):
        assert max(read[mode, "warm"]) < min(read[mode, "cold"]) < min(read[mode, "none"])
        assert min(read[mode, "cold"]) > 0
    assert read["whole-object", "warm"] == [0, 0]
    assert not list(tmp_path.glob("node-*/*")), "caches are removed"


def test_ranks_share_an_epoch_and_are_reported_by_node(data: Bucket, tmp_path: Path) -> None:
    words = ("--ranks", "1", "--nodes", "2", "--steps", "3", "--step-time", "0.01", "--epochs", "1", "--workers", "1")
    result = bench(tmp_path, f"{data.uri}/prepared", *words)
    (epoch,) = result["epochs"]
    assert epoch["samples"] == 12
    assert [(node["node"], node["ranks"], node["samples"]) for node in epoch["nodes"]] == [(0, 1, 6), (1, 1, 6)]
    assert sum(node["bytes"] for node in epoch["nodes"]) == epoch["bytes"] == epoch["server_bytes"]


def test_throttling_bucket_is_reported_with_its_figures(
    data: Bucket, emulator: Emulator, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    emulator.set_faults(Faults(error_rate=0.3, error_statuses=(429,), kinds=("get",), seed=1))
    result = bench(tmp_path, f"{data.uri}/prepared", "--steps", "4", "--step-time", "0", "--epochs", "1")
    (epoch,) = result["epochs"]
    assert epoch["samples"] == 8
    assert epoch["server_refused"] > 0
    assert epoch["retries"] == epoch["server_refused"]
    assert "the bucket refused" in capsys.readouterr().out


def test_listing_only_lists_and_stops(
    data: Bucket, emulator: Emulator, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = bench(tmp_path, f"{data.uri}/raw", "--listing-only")
    assert result["listing"]["keys"] == 2 * CASES
    assert result["epochs"] == []
    counted = emulator.counters()
    assert counted.list.requests == result["listing"]["requests"] >= 1
    assert counted.get.requests <= 1, "only the look for a header"
    assert "12 objects" in capsys.readouterr().out


def test_manifest_replaces_the_listing(data: Bucket, emulator: Emulator, tmp_path: Path) -> None:
    saved = str(tmp_path / "raw.parquet")
    assert main(["ls", f"{data.uri}/raw/", "--save", saved]) == 0
    emulator.reset_counters()
    words = (f"{data.uri}/raw", "--manifest", saved, "--patch", "16", "--step-time", "0", "--epochs", "1")
    assert bench(tmp_path, *words)["epochs"][0]["samples"] == CASES
    assert emulator.counters().list.requests == 0


def test_manifest_of_a_folder_with_the_same_name_prefix_is_rejected(
    data: Bucket, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = str(tmp_path / "raw.parquet")
    assert main(["ls", f"{data.uri}/raw/", "--save", saved]) == 0
    words = ["bench", "loading", f"{data.uri}/ra", "--manifest", saved, "--out", str(tmp_path / "a.json")]
    assert main(words) == 1
    assert "the manifest lists" in capsys.readouterr().err


def _last_for(device: object, folder: str) -> None:
    Path(folder, f"rank-{dist.get_rank()}").write_text(str(os.getpid()))
    time.sleep(60)


def test_ranks_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    command = multiprocessing.get_context("spawn").Process(target=ranks.run, args=(_last_for, 2, "cpu", str(tmp_path)))
    command.start()
    _until(lambda: len([p for p in tmp_path.glob("rank-*") if p.read_text()]) == 2)
    command.terminate()
    command.join()
    started = [int(path.read_text()) for path in tmp_path.glob("rank-*")]
    assert len(started) == 2
    _until(lambda: not any(_runs(pid) for pid in started))
    assert not any(_runs(pid) for pid in started)


def _until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _runs(pid: int) -> bool:
    """Return whether a process runs and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except FileNotFoundError:
        return False


def test_rank_that_fails_ends_all_of_them(
    data: Bucket, emulator: Emulator, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """This includes a cache, which the ranks otherwise remove together."""
    emulator.put("bkt", "raw/case_00003/imaging.nii.gz", b"no scan")
    words = [f"{data.uri}/raw", "--ranks", "2", "--batch", "1", "--cache", "cold", "--patch", "16", "--no-plot"]
    assert main(["bench", "loading", *words, "--out", str(tmp_path / "a.json")]) == 1
    assert "case_00003/imaging.nii.gz" in capsys.readouterr().err


def test_results_and_plot_go_to_a_bucket(data: Bucket, emulator: Emulator) -> None:
    words = [f"{data.uri}/prepared", "--steps", "2", "--step-time", "0.01", "--epochs", "1"]
    assert main(["bench", "loading", *words, "--out", f"{data.uri}/out/a.json"]) == 0
    assert emulator.keys("bkt", "out/") == ["out/a.json", "out/a.png"]
    assert json.loads(emulator.get("bkt", "out/a.json"))["epochs"][0]["samples"] == 4
    assert emulator.get("bkt", "out/a.png").startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("prepared", "--mode", "whole-object"), "mode whole-object needs raw scans.*Give the scans.*/raw"),
        (("raw", "--mode", "patches"), "mode patches needs a prepared dataset.*voxlane prepare SRC DST"),
        (("prepared", "--ranks", "4"), "8 samples, 2 on each of 4 ranks, but an epoch has 6 cases"),
        (("raw", "raw"), "both datasets are read as whole-object"),
        (("prepared", "--manifest", "x"), "Leave --manifest out"),
        (("nothing",), "the folder is empty"),
        (("prepared", "--out", "gs://none/a.json"), "no such bucket"),
        (("prepared", "--out", "gs://bkt/a.txt"), "the result file is JSON"),
        (("prepared", "--cache-bytes", "lots"), "--cache-bytes: expected a size.*'lots'"),
    ],
)
def test_mistakes_give_one_line(
    data: Bucket, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    arguments = [f"{data.uri}/{word}" if word in ("raw", "prepared", "nothing") else word for word in words]
    assert main(["bench", "loading", *arguments]) != 0
    output = capsys.readouterr().err
    assert len(output.strip().splitlines()) == 1
    assert re.search(message, output), output


def test_error_of_a_worker_has_no_traceback(
    data: Bucket, emulator: Emulator, capsys: pytest.CaptureFixture[str]
) -> None:
    for key in emulator.keys("bkt", "raw/"):
        emulator.put("bkt", key, b"no scan")
    words = [f"{data.uri}/raw", "--patch", "16", "--workers", "1", "--no-plot"]
    assert main(["bench", "loading", *words]) != 0
    output = capsys.readouterr().err
    assert "Traceback" not in output
    assert "not a NIfTI file" in output
    assert "gs://bkt/raw/case_" in output


def test_it_takes_part_in_a_job_that_torchrun_started(data: Bucket, emulator: Emulator, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "voxlane", "bench", "loading", f"{data.uri}/prepared", "--steps", "2", "--step-time", "0.01"]
    quiet = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    command += ["--out", f"{data.uri}/out/job.json", "--no-plot"]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **quiet}, timeout=400, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("samples/s") == 1, "one rank reports"
    result = json.loads(emulator.get("bkt", "out/job.json"))
    assert [epoch["samples"] for epoch in result["epochs"]] == [8, 8]
    assert result["epochs"][0]["nodes"][0]["ranks"] == 2


@pytest.mark.cluster
def test_ranks_on_ray(data: Bucket, tmp_path: Path) -> None:
    words = ("--launcher", "ray", "--ranks", "2", "--steps", "3", "--step-time", "0.01", "--epochs", "1")
    result = bench(tmp_path, f"{data.uri}/prepared", *words)
    assert result["epochs"][0]["samples"] == 12
    assert result["epochs"][0]["nodes"][0]["ranks"] == 2
