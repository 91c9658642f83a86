"""Configs of DistMIS on the command line."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest

from tests.tune import made_search
from voxlane.cli.distmis import in_our_words
from voxlane.cli.main import main

THEIRS = {"lr": 1e-4, "epochs": 1, "batch_size": 2, "nodes": 1, "gpus": 2, "num_workers": 2, "use_gpu": False}


def options() -> Namespace:
    return Namespace(workers=None, nodes=None, gpus_per_worker=None, address=None, no_progress=False)


def test_a_config_of_ours_is_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    mine = {"preset": "small", "epochs": 3}
    assert in_our_words(mine, options(), "mine.yaml") is mine
    assert capsys.readouterr().err == ""


def test_what_was_understood_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    asked = options()
    said = in_our_words(dict(THEIRS), asked, "theirs.json")
    assert said["batch_per_worker"] == 2
    assert (asked.workers, asked.gpus_per_worker, asked.nodes, asked.address) == (2, 0.0, None, None)
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "theirs.json: a config of DistMIS, taken as"
    assert "optimizer.lr=1e-4 epochs=1 batch_per_worker=2 accelerator=cpu" in told[1]
    assert told[2] == "  --workers 2 --gpus-per-worker 0"
    assert all(line.startswith("  note: ") for line in told[3:])


def test_the_command_line_goes_before_the_file() -> None:
    asked = options()
    asked.workers = 1
    in_our_words(dict(THEIRS), asked, "theirs.json")
    assert asked.workers == 1


def test_a_launcher_has_made_the_ranks_already(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    asked = options()
    assert in_our_words(dict(THEIRS), asked, "theirs.json")["epochs"] == 1
    assert asked.workers is None
    assert capsys.readouterr().err == "", "rank 0 tells it"


def test_a_search_tells_its_distributions(capsys: pytest.CaptureFixture[str]) -> None:
    said = in_our_words({**THEIRS, "num_samples": 3}, options(), "theirs.json", searching=True)
    assert said["tune"]["trials"] == 3
    told = capsys.readouterr().err
    assert 'optimizer.lr={"loguniform": [0.0001, 0.01]}' in told
    assert "tune.search=random tune.trials=3" in told


def test_a_mistake_in_it_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**THEIRS, "lr": [0.1, 0.2]}), encoding="utf-8")
    assert main(["train", "data", "--run", str(tmp_path / "run"), "--config", str(file)]) == 1
    said = capsys.readouterr().err
    assert said.startswith("voxlane: lr: a list is a grid to search, not one training. Run: voxlane tune")
    assert not (tmp_path / "run").exists()


def test_report_of_a_search(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tune.json").write_text(made_search.search(4).to_json(), encoding="utf-8")
    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"file://{tmp_path}/report.html\n"
    assert "voxlane search report" in (tmp_path / "report.html").read_text(encoding="utf-8")
