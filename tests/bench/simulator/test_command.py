"""Test `voxlane bench simulate`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bench.simulator.test_measured_runs import result, saved
from voxlane.cli.main import main


def simulate(folder: Path, *words: str) -> dict[str, object]:
    out = folder / "scale.json"
    assert main(["bench", "simulate", *words, "--out", str(out)]) == 0
    document: dict[str, object] = json.loads(out.read_text())
    return document


def test_scenarios(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--nodes", "2,4", "--batch", "2", "--workers", "2", "--steps", "10", "--epochs", "2", "--cache", "100G"]
    document = simulate(tmp_path, *words)
    assert [(r["mode"], r["nodes"], r["epoch"]) for r in document["rows"]] == [  # type: ignore[index, attr-defined]
        (mode, nodes, epoch) for mode in ("whole-object", "patches") for nodes in (2, 4) for epoch in (1, 2)
    ]
    assert document["public"] is None
    assert (tmp_path / "scale.png").stat().st_size > 10_000
    assert "whole-object" in capsys.readouterr().out


def test_public_table_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = simulate(tmp_path, "--mode", "whole-object", "--nodes", "512", "--thin", "8", "--no-plot")
    assert [row["nodes"] for row in document["public"]["rows"]] == [512]  # type: ignore[index]
    message = capsys.readouterr().out
    assert "1,907 Gbps" in message
    assert "fitted to it" in message


def test_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = simulate(tmp_path, "--check", saved(tmp_path, result()))
    assert document["within"] == 1
    assert "1 of 1 within 15%" in capsys.readouterr().out


def test_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--plan", "--nodes", "4", "--batch", "2", "--step-time", "0.5", "--cores", "8", "--link-gbps", "2"]
    document = simulate(tmp_path, *words)
    assert [row["binds"] for row in document["rows"]] == ["link of a node", "step"]  # type: ignore[index, attr-defined]
    message = capsys.readouterr().out
    assert "read patches instead of whole objects" in message
    assert "30 days" in message


def test_step_time_of_zero(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--nodes", "1", "--batch", "2", "--workers", "0", "--steps", "8", "--step-time", "0", "--mode", "patches"]
    document = simulate(tmp_path, *words, "--no-plot")
    assert document["rows"][0]["stall_share"] is None  # type: ignore[index]
    assert simulate(tmp_path, *words, "--plan")["rows"][0]["stall_share"] is None  # type: ignore[index]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nodes", "0"], "--nodes 0"),
        (["--nodes", "some"], "--nodes some"),
        (["--step-time", "-1"], "--step-time: "),
        (["--batch", "0"], "--batch: "),
        (["--cores", "0"], "--cores: "),
        (["--link-gbps", "-2"], "--link-gbps: "),
        (["--latency-ms", "-1"], "--latency-ms: "),
        (["--latency-p99-ms", "1"], "99th percentile"),
        (["--volumes", "0"], "--volumes: "),
        (["--steps", "0"], "--steps: "),
        (["--cache", "much"], "--cache: expected a size such as 100Gi, got 'much'"),
        (["--image-bytes", "0"], "--image-bytes 0"),
        (["--workers", "-1"], "--workers: "),
        (["--prefetch", "0"], "workers without prefetch"),
        (["--thin", "0"], "--thin: "),
        (["--window", "0"], "--window: "),
        (["--patch-cpu-s", "-1"], "--patch-cpu-s: "),
        (["--usd-per-gb", "-1"], "--usd-per-gb: "),
        (["--seed", "-1"], "--seed: "),
        (["--plan"], "--nodes N"),
        (["--measured", "none.json"], "none.json"),
        (["--check", "none.json"], "none.json"),
        (["--out", "none/scale.json"], "cannot write"),
    ],
)
def test_invalid_settings_are_reported_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "simulate", *words]) != 0
    output = capsys.readouterr().err
    assert message in output
    assert "Traceback" not in output


def test_flag_changes_only_its_own_setting(tmp_path: Path) -> None:
    """The requests before a patch's chunks are counted once in the requests of a patch."""
    words = ["--mode", "patches", "--nodes", "1", "--batch", "2", "--workers", "0", "--steps", "8", "--no-plot"]
    plain = simulate(tmp_path, *words)["setting"]["patch"]  # type: ignore[index]
    larger = simulate(tmp_path, *words, "--patch-bytes", "5M")["setting"]["patch"]  # type: ignore[index]
    assert larger == pytest.approx({**plain, "bytes": 5e6})


def test_full_speed_on_any_number_of_cores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--plan", "--mode", "patches", "--nodes", "1", "--batch", "2", "--step-time", "0", "--no-plot"]
    assert simulate(tmp_path, *words, "--cores", "inf")["rows"][0]["samples_per_s"] > 0  # type: ignore[index]
    nothing = ["--latency-ms", "0", "--latency-p99-ms", "0", "--patch-cpu-s", "0", "--patch-bytes", "0"]
    assert main(["bench", "simulate", *words, *nothing, "--out", str(tmp_path / "scale.json")]) == 1
    assert "nothing to plan" in capsys.readouterr().err
