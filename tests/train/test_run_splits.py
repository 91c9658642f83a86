"""The split of a run: from the dataset or from a file, stored when the run starts, and used ever after."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.train import tiny_runs
from voxlane.cli.main import main
from voxlane.errors import ConfigError, RunError
from voxlane.train.evaluate import EvaluateConfig, evaluate
from voxlane.train.fit import fit, train
from voxlane.train.report import report
from voxlane.train.run import Run, TrainedRun
from voxlane.train.run_setup import check_config, prepare_run
from voxlane.volume.prepare import PrepareConfig, prepare
from voxlane.volume.prepared_dataset import Prepared

CASES = tiny_runs.case_ids(6)


@pytest.fixture
def data(tmp_path: Path) -> str:
    """A prepared dataset of six cases in two folds."""
    return tiny_runs.prepare_balls(tmp_path)


def write_split(folder: Path, *folds: tuple[list[str], list[str]]) -> str:
    file = folder / "splits_final.json"
    file.write_text(json.dumps([{"train": train, "val": held_out} for train, held_out in folds]))
    return str(file)


def prepare_again(data: str, **changes: Any) -> Prepared:
    """Prepare the dataset again, with another split."""
    scans = Path(data.removeprefix("file://")).parent / "scans" / "list.json"
    config = PrepareConfig(workers=1, plan=tiny_runs.PLAN, **changes)
    return prepare(str(scans), data, config, progress=False, isolate=False).prepared


def read_curve(run: Path) -> list[Any]:
    """Return loss and Dice of every epoch, which no two splits have in common."""
    return [
        (entry["epoch"], entry["loss"], entry.get("dice")) for entry in json.loads((run / "history.json").read_text())
    ]


def test_resume_keeps_the_split_of_the_run(data: str, tmp_path: Path) -> None:
    """A run that continues after the dataset got another split is the run that was never interrupted."""
    config = {**tiny_runs.CONFIG, "fold": 0}
    train(data, str(tmp_path / "whole"), {**config, "epochs": 2}, progress=False)
    prepare_run(data, str(tmp_path / "run"), {**config, "epochs": 2})
    fit(str(tmp_path / "run"), progress=False, until_epoch=1)
    before = TrainedRun.load(Run(str(tmp_path / "run")))
    assert len(json.loads((tmp_path / "run" / "history.json").read_text())) == 1
    changed = prepare_again(data, folds=3)
    assert changed.split(0)[1] != Prepared.find_rows(changed, before.held_out_cases)
    train(data, str(tmp_path / "run"), resume=True, progress=False)
    after = TrainedRun.load(Run(str(tmp_path / "run")))
    assert (after.training_cases, after.held_out_cases) == (before.training_cases, before.held_out_cases)
    assert read_curve(tmp_path / "run") == read_curve(tmp_path / "whole")
    result = evaluate([Run(str(tmp_path / "run"))], config=EvaluateConfig(masks=False), progress=False)
    assert [case["case"] for case in result.cases] == before.held_out_cases
    report(str(tmp_path / "run"))
    page = (tmp_path / "run" / "report.html").read_text()
    assert "balanced, fold 0 of 2" in page


def test_split_of_a_file(data: str, tmp_path: Path) -> None:
    file = write_split(tmp_path, (CASES[:2], CASES[2:3]), (CASES[1:3], CASES[4:]))
    run = str(tmp_path / "run")
    train(data, run, {**tiny_runs.CONFIG, "fold": 1, "split": file}, progress=False)
    Path(file).unlink()
    trained = TrainedRun.load(Run(run))
    assert (trained.training_cases, trained.held_out_cases) == (CASES[1:3], CASES[4:])
    assert trained.facts["split"] == {"method": "file", "source": f"file://{file}", "folds": 2}
    train(data, run, {"epochs": 2, "split": file}, resume=True, progress=False)
    assert TrainedRun.load(Run(run)).held_out_cases == CASES[4:]
    result = evaluate([Run(run)], config=EvaluateConfig(masks=False), progress=False)
    assert [case["case"] for case in result.cases] == CASES[4:]
    with pytest.raises(ConfigError, match="split: cannot change when a run is resumed"):
        train(data, run, {"epochs": 3, "split": "another.json"}, resume=True, progress=False)


def test_mistakes_are_found_before_the_run_starts(data: str, tmp_path: Path) -> None:
    file = write_split(tmp_path, (CASES[:2], ["case_999"]))
    for start in (lambda c: train(data, str(tmp_path / "run"), c), lambda c: check_config(Prepared.load(data), c)):
        with pytest.raises(ConfigError, match=r"splits_final.json: val names 1 unknown case: case_999"):
            start({**tiny_runs.CONFIG, "split": file})
    file = write_split(tmp_path, (CASES[:2], CASES[2:]))
    with pytest.raises(ConfigError, match=r"fold: expected 0 to 0, got 1. Choose one of \[0\]"):
        train(data, str(tmp_path / "run"), {**tiny_runs.CONFIG, "split": file, "fold": 1})
    assert not (tmp_path / "run").exists()


def test_run_whose_cases_are_gone(data: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(data, str(run), {**tiny_runs.CONFIG, "fold": 0}, progress=False)
    facts = json.loads((run / "run.json").read_text())
    facts["cases"]["train"] = ["case_999"]
    (run / "run.json").write_text(json.dumps(facts))
    with pytest.raises(RunError, match=r"run.json: the file does not have the content that training writes"):
        train(data, str(run), {"epochs": 2}, resume=True, progress=False)


def test_folds_of_a_file_on_the_command_line(data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_split(tmp_path, (CASES[:3], CASES[3:]), (CASES[3:], CASES[:3]))
    config = tmp_path / "config.json"
    config.write_text(json.dumps(tiny_runs.CONFIG))
    words = ["train", data, "--run", str(tmp_path / "cv"), "--config", str(config), f"split={file}", "--no-progress"]
    assert main([*words, "--folds", "all"]) == 0
    assert TrainedRun.load(Run(str(tmp_path / "cv/fold_1"))).held_out_cases == CASES[:3]
    assert main([*words, "--folds", "2"]) == 1
    assert "--folds 2: fold 2 has no cases. Choose from 0, 1" in capsys.readouterr().err


def test_few_cases_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three cases make three folds of five; one makes none."""
    listed = tiny_runs.write_cases(tmp_path / "scans", CASES[:3])
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"workers": 1, "plan": tiny_runs.PLAN}))
    words = ["--config", str(config), "--no-progress"]
    assert main(["prepare", str(listed), str(tmp_path / "data"), *words]) == 0
    printed = capsys.readouterr().out
    assert "split: folds 0, 1, 2 (balanced): 1 case held out; there are too few patients for folds=5" in printed
    listed = tiny_runs.write_cases(tmp_path / "alone", CASES[:1])
    assert main(["prepare", str(listed), str(tmp_path / "one"), *words]) == 0
    assert "no folds: all cases belong together, so none can be held out" in capsys.readouterr().out
    assert main(["train", str(tmp_path / "one"), "--run", str(tmp_path / "run"), "--folds", "all"]) == 1
    assert "--folds all: the dataset has no folds" in capsys.readouterr().err
