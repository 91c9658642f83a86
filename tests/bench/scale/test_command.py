"""`voxlane bench simulate`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bench.scale.test_measured import result, saved
from voxlane.cli.main import main


def simulate(folder: Path, *words: str) -> dict[str, object]:
    out = folder / "scale.json"
    assert main(["bench", "simulate", *words, "--out", str(out)]) == 0
    found: dict[str, object] = json.loads(out.read_text())
    return found


def test_scenarios(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--nodes", "2,4", "--batch", "2", "--workers", "2", "--steps", "10", "--epochs", "2", "--cache", "100G"]
    found = simulate(tmp_path, *words)
    assert [(r["mode"], r["nodes"], r["epoch"]) for r in found["rows"]] == [  # type: ignore[index, attr-defined]
        (mode, nodes, epoch) for mode in ("whole-object", "patches") for nodes in (2, 4) for epoch in (1, 2)
    ]
    assert found["public"] is None
    assert (tmp_path / "scale.png").stat().st_size > 10_000
    assert "whole-object" in capsys.readouterr().out


def test_the_public_table_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = simulate(tmp_path, "--mode", "whole-object", "--nodes", "512", "--thin", "8", "--no-plot")
    assert [row["nodes"] for row in found["public"]["rows"]] == [512]  # type: ignore[index]
    said = capsys.readouterr().out
    assert "1,907 Gbps" in said
    assert "fitted to it" in said


def test_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = simulate(tmp_path, "--check", saved(tmp_path, result()))
    assert found["within"] == 1
    assert "1 of 1 within 15%" in capsys.readouterr().out


def test_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--plan", "--nodes", "4", "--batch", "2", "--step-time", "0.5", "--cores", "8", "--link-gbps", "2"]
    found = simulate(tmp_path, *words)
    assert [row["binds"] for row in found["rows"]] == ["link of a node", "step"]  # type: ignore[index, attr-defined]
    said = capsys.readouterr().out
    assert "patches instead of whole objects" in said
    assert "30 days" in said


def test_a_step_of_no_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--nodes", "1", "--batch", "2", "--workers", "0", "--steps", "8", "--step-time", "0", "--mode", "patches"]
    found = simulate(tmp_path, *words, "--no-plot")
    assert found["rows"][0]["stall_share"] is None  # type: ignore[index]
    assert simulate(tmp_path, *words, "--plan")["rows"][0]["stall_share"] is None  # type: ignore[index]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nodes", "0"], "--nodes 0"),
        (["--nodes", "some"], "--nodes some"),
        (["--step-time", "-1"], "--step-time -1"),
        (["--batch", "0"], "--batch 0"),
        (["--cores", "0"], "--cores 0"),
        (["--link-gbps", "-2"], "rate of -2"),
        (["--latency-ms", "-1"], "a latency of"),
        (["--latency-p99-ms", "1"], "99th percentile"),
        (["--volumes", "0"], "--volumes 0"),
        (["--steps", "0"], "--steps 0"),
        (["--cache", "much"], "--cache: 'much' is no size"),
        (["--image-bytes", "0"], "--image-bytes 0"),
        (["--workers", "-1"], "--workers -1"),
        (["--prefetch", "0"], "workers without prefetch"),
        (["--thin", "0"], "--thin 0"),
        (["--window", "0"], "--window 0"),
        (["--patch-cpu-s", "-1"], "processor seconds"),
        (["--usd-per-gb", "-1"], "price below zero"),
        (["--seed", "-1"], "--seed -1"),
        (["--plan"], "--nodes N"),
        (["--measured", "none.json"], "none.json"),
        (["--check", "none.json"], "none.json"),
        (["--out", "none/scale.json"], "cannot write"),
    ],
)
def test_nonsense_is_told_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "simulate", *words]) != 0
    told = capsys.readouterr().err
    assert said in told
    assert "Traceback" not in told


def test_a_flag_changes_only_what_it_says(tmp_path: Path) -> None:
    """What comes before a patch's chunks is in the requests of a patch once."""
    words = ["--mode", "patches", "--nodes", "1", "--batch", "2", "--workers", "0", "--steps", "8", "--no-plot"]
    plain = simulate(tmp_path, *words)["setting"]["patch"]  # type: ignore[index]
    larger = simulate(tmp_path, *words, "--patch-bytes", "5M")["setting"]["patch"]  # type: ignore[index]
    assert larger == pytest.approx({**plain, "bytes": 5e6})


def test_as_fast_as_it_goes_on_any_number_of_cores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--plan", "--mode", "patches", "--nodes", "1", "--batch", "2", "--step-time", "0", "--no-plot"]
    assert simulate(tmp_path, *words, "--cores", "inf")["rows"][0]["samples_per_s"] > 0  # type: ignore[index]
    nothing = ["--latency-ms", "0", "--latency-p99-ms", "0", "--patch-cpu-s", "0", "--patch-bytes", "0"]
    assert main(["bench", "simulate", *words, *nothing, "--out", str(tmp_path / "scale.json")]) == 1
    assert "nothing to plan" in capsys.readouterr().err
