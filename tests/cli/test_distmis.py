"""Configs of DistMIS on the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tune import fake_search
from voxlane.cli.main import main
from voxlane.cli.segmentation import RayOptions, fill_unset, translate_distmis

DISTMIS = {"lr": 1e-4, "epochs": 1, "batch_size": 2, "nodes": 1, "gpus": 2, "num_workers": 2, "use_gpu": False}


def test_other_configs_are_not_translated(capsys: pytest.CaptureFixture[str]) -> None:
    values = {"preset": "small", "epochs": 3}
    assert translate_distmis(values, "own.json") == (values, {})
    assert capsys.readouterr().err == ""


def test_translation_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    fields, options = translate_distmis(dict(DISTMIS), "config.json")
    assert fields["batch_per_worker"] == 2
    assert options == {"workers": 2, "gpus_per_worker": 0.0}
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "config.json: a config of DistMIS, translated to"
    assert "optimizer.lr=1e-4 epochs=1 batch_per_worker=2 accelerator=cpu" in lines[1]
    assert lines[2] == "  --workers 2 --gpus-per-worker 0"
    assert all(line.startswith("  note: ") for line in lines[3:])


def test_flags_take_precedence_over_the_file() -> None:
    _, launch = translate_distmis(dict(DISTMIS), "config.json")
    assert fill_unset(RayOptions(workers=1), launch) == RayOptions(workers=1, gpus_per_worker=0.0)
    assert fill_unset(RayOptions(), launch) == RayOptions(workers=2, gpus_per_worker=0.0)


def test_ranks_of_a_launcher_ignore_the_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    fields, options = translate_distmis(dict(DISTMIS), "config.json")
    assert fields["epochs"] == 1
    assert options == {}
    assert capsys.readouterr().err == "", "only rank 0 prints"


def test_search_prints_its_distributions(capsys: pytest.CaptureFixture[str]) -> None:
    fields, _ = translate_distmis({**DISTMIS, "num_samples": 3}, "config.json", searching=True)
    assert fields["tune"]["trials"] == 3
    printed = capsys.readouterr().err
    assert 'optimizer.lr={"loguniform": [0.0001, 0.01]}' in printed
    assert "tune.search=random tune.trials=3" in printed


def test_mistake_in_the_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**DISTMIS, "lr": [0.1, 0.2]}), encoding="utf-8")
    assert main(["train", "data", "--run", str(tmp_path / "run"), "--config", str(file)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("voxlane: lr: a list is a grid to search, not a value to train with. Run: voxlane tune")
    assert not (tmp_path / "run").exists()


def test_runs_without_a_json_config_do_not_import_the_translation(tmp_path: Path) -> None:
    code = (
        "import sys; from voxlane.cli.main import main; "
        f"main(['train', '{tmp_path}', '--run', '{tmp_path}/run']); print('voxlane.compat.distmis' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_report_of_a_search(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tune.json").write_text(fake_search.search(4).to_json(), encoding="utf-8")
    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"file://{tmp_path}/report.html\n"
    assert "voxlane search report" in (tmp_path / "report.html").read_text(encoding="utf-8")
