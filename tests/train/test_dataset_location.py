"""Tests of runs that find their dataset after it, they or both were moved, and of scores that name their weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Bucket
from tests.train import tiny_runs
from tests.train.test_report import Outline
from tests.train.test_run import edit_facts
from voxlane.cli.main import main
from voxlane.errors import RunError
from voxlane.train.dataset_location import describe_location, explain_difference, load_dataset, possible_locations
from voxlane.train.evaluate import EvaluateConfig, evaluate
from voxlane.train.fit import train
from voxlane.train.predictor import Predictor
from voxlane.train.report import report
from voxlane.train.run import Run, TrainedRun
from voxlane.train.run_setup import change_command, find_changes
from voxlane.volume.prepare import PrepareConfig, prepare


@pytest.fixture(scope="module")
def trained_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the dataset `prepared` and the run `runs/first`."""
    folder = tmp_path_factory.mktemp("location") / "work"
    command = ["voxlane", "train", "prepared", "--run", "runs/first", "epochs=1"]
    train(
        tiny_runs.prepare_balls(folder), str(folder / "runs/first"), tiny_runs.CONFIG, progress=False, command=command
    )
    return folder


@pytest.fixture
def root(trained_root: Path, tmp_path: Path) -> Path:
    """The folder, to move and to damage; hard links keep the versions of its volumes."""
    copy = Path(shutil.copytree(trained_root, tmp_path / "work", copy_function=link))
    edit_facts(copy / "runs/first", lambda facts: facts["data"].update(uri=f"file://{copy}/prepared"))
    return copy


def link(source: str, target: str) -> str:
    if source.endswith(".json"):
        return shutil.copy2(source, target)
    Path(target).hardlink_to(source)
    return target


def read_facts(run: Path) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((run / "run.json").read_text())
    return facts


def read_page(run: Path) -> str:
    report(str(run))
    return Outline((run / "report.html").read_text()).text


@pytest.mark.parametrize(
    ("run", "data", "path"),
    [
        ("gs://bkt/runs/a", "gs://bkt/prepared", "../../prepared"),
        ("gs://bkt/prepared/run", "gs://bkt/prepared", ".."),
        ("s3://bkt/a", "s3://bkt/b/c d", "../b/c d"),
        ("gs://bkt/runs/a", "gs://other/prepared", None),
        ("gs://bkt/runs/a", "s3://bkt/prepared", None),
        ("/home/me/runs/a", "/home/me/data", "../../data"),
        ("/home/me/runs/a", "/scratch/data", None),
        ("/home/me/runs/a", "gs://bkt/home/me", None),
    ],
)
def test_path_is_stored_within_one_bucket_or_folder(run: str, data: str, path: str | None) -> None:
    uri = data if "://" in data else f"file://{data}"
    location = describe_location(Run(run), uri)
    assert location.get("path_from_run") == path
    assert possible_locations(Run(run), location) == [uri]


def test_path_leads_from_the_run_as_it_is_now() -> None:
    location = describe_location(Run("/home/me/runs/a"), "file:///home/me/data")
    assert possible_locations(Run("/mnt/all/runs/b"), location) == ["file:///mnt/all/data", "file:///home/me/data"]
    assert possible_locations(Run("gs://bkt/all/runs/b"), location) == ["gs://bkt/all/data", "file:///home/me/data"]
    assert possible_locations(Run("gs://bkt/b"), location) == ["file:///home/me/data"], "it would leave the bucket"
    assert possible_locations(Run("/mnt/b"), {"uri": "file:///data", "fingerprint": "0"}) == ["file:///data"]


def test_renamed_root_needs_no_word(root: Path) -> None:
    moved = root.rename(root.with_name("renamed"))
    run = moved / "runs/first"
    assert evaluate([Run(str(run))], config=EvaluateConfig(space="prepared"), progress=False).cases
    train(None, str(run), {"epochs": 2}, resume=True, progress=False)
    assert read_facts(run)["data"]["uri"] == f"file://{moved}/prepared"


def test_run_is_told_the_new_place_and_keeps_it(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, data = root / "runs/first", (root / "prepared").rename(tmp_path / "elsewhere")
    words = ["train", "--run", str(run), "--resume", "epochs=2", "--no-progress"]
    for command in (words, ["evaluate", str(run), "--no-progress"]):
        assert main(command) == 1
        error = capsys.readouterr().err
        assert "the run's dataset is not where it was: " in error
        assert f"file://{root}/prepared: there is no prepared dataset at this URI" in error
        assert error.endswith("If it was moved, say where it is now: --data URI\n")
        assert error.count("\n") == 1
    assert main(["evaluate", str(run), "--data", str(data), "space=prepared", "--no-progress"]) == 0
    assert main(["report", str(run), "--data", str(data)]) == 0
    page = Outline((run / "report.html").read_text()).text
    assert f"Prepared data file://{data}" in page
    assert f"voxlane train file://{data} --run runs/first epochs=1" in page
    assert main([*words, "--data", str(data)]) == 0
    assert read_facts(run)["command"] == ["voxlane", "train", f"file://{data}", "--run", "runs/first", "epochs=2"]
    assert main(["train", "--run", str(run), "--auto-resume", "epochs=3", "--no-progress"]) == 0
    assert len(json.loads((run / "history.json").read_text())) == 3


def test_ranks_read_the_new_place(root: Path, tmp_path: Path) -> None:
    run, data = root / "runs/first", (root / "prepared").rename(tmp_path / "elsewhere")
    train(str(data), str(run), {"epochs": 2, "devices": 2}, resume=True, progress=False)
    assert len(json.loads((run / "history.json").read_text())) == 2


def test_other_dataset_is_refused_and_the_difference_named(root: Path, tmp_path: Path) -> None:
    run = Run(str(root / "runs/first"))
    names = tiny_runs.case_ids()
    other_plan = {**tiny_runs.PLAN, "patch": [8, 16, 16]}
    for number, (ids, plan, seed, words) in enumerate(
        (
            (names[1:], tiny_runs.PLAN, 0, rf"1 of the run's 6 cases are not in it, such as {names[0]}"),
            (names, other_plan, 0, r"it was prepared with another plan"),
            (
                names,
                tiny_runs.PLAN,
                1,
                r"it(s cases have other content, or it was prepared again|\swas prepared with another plan)",
            ),
        )
    ):
        listed = tiny_runs.write_cases(tmp_path / f"scans{number}", ids, seed)
        config = PrepareConfig(folds=tiny_runs.FOLDS, workers=1, plan=plan)
        other = prepare(str(listed), str(tmp_path / f"other{number}"), config, progress=False).prepared
        expected = rf"other{number} is not the dataset of the run: {words}.*Name the run's dataset with --data URI"
        with pytest.raises(RunError, match=expected):
            train(other.uri, run.uri, {"epochs": 2}, resume=True, progress=False)
        with pytest.raises(RunError, match=expected):
            evaluate([run], data=other.uri, progress=False)
        with pytest.raises(RunError, match=expected):
            report(run.uri, data=other.uri)
    assert read_facts(root / "runs/first")["config"]["epochs"] == 1


def test_dataset_at_the_old_place_is_used_if_another_is_nearer(root: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(root / "runs", tmp_path / "new/runs")) / "first"
    listed = tiny_runs.write_cases(tmp_path / "scans", tiny_runs.case_ids()[1:])
    prepare(str(listed), str(tmp_path / "new/prepared"), PrepareConfig(folds=2, workers=1), progress=False)
    opened = Run(str(run))
    assert load_dataset(opened, TrainedRun.load(opened)).uri == f"file://{root}/prepared"


def test_run_of_an_earlier_version_resumes(root: Path) -> None:
    run = root / "runs/first"

    def make_old(facts: dict[str, Any]) -> None:
        facts["data"] = {"uri": facts["data"]["uri"], "name": "Balls", "fingerprint": "0123"}

    edit_facts(run, make_old)
    train(None, str(run), {"epochs": 2}, resume=True, progress=False)
    data = read_facts(run)["data"]
    assert data["path_from_run"] == "../../prepared"
    assert len(data["fingerprint"]) > 4


def test_dataset_in_a_bucket_is_found_in_another(root: Path, gcs: Bucket) -> None:
    for folder in ("runs/first", "prepared"):
        for path in (root / folder).rglob("*"):
            if path.is_file():
                gcs.store.put(f"moved/{path.relative_to(root)}", path.read_bytes())
    run = Run("gs://bkt/moved/runs/first", gcs.config)
    trained = TrainedRun.load(run)
    prepared = load_dataset(run, trained)
    assert prepared.uri == "gs://bkt/moved/prepared"
    assert not explain_difference(trained, prepared)


def test_new_run_without_a_dataset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--run", str(tmp_path / "run")]) == 2
    assert "voxlane train: missing DATA" in capsys.readouterr().err
    assert main(["train", "--run", str(tmp_path / "run"), "--auto-resume"]) == 1
    assert "a new run needs the URI of a prepared dataset" in capsys.readouterr().err


# -- scores and their weights, commands and their overrides ------------------------------------------------------------


def test_scores_name_their_weights_and_become_stale(root: Path) -> None:
    run = root / "runs/first"
    summary = evaluate([Run(str(run))], config=EvaluateConfig(space="prepared"), progress=False).summary
    (checkpoint,) = summary["checkpoints"]
    (loaded,) = Predictor.load([Run(str(run))]).checkpoints
    assert (checkpoint["name"], checkpoint["step"], checkpoint["digest"]) == ("last", 2, loaded.digest)
    page = read_page(run)
    assert f"Scored: last weights, of step 2 (digest {loaded.digest[:12]})." in page
    assert "These scores are of step" not in page
    command = ["voxlane", "train", "--run", "runs/first", "--resume", "epochs=2"]
    train(None, str(run), {"epochs": 2}, resume=True, progress=False, command=command)
    assert Predictor.load([Run(str(run))]).checkpoints[0].digest != loaded.digest
    page = read_page(run)
    stale = f"These scores are of step 2; the run has since trained to step 4. Run voxlane evaluate file://{run} again."
    assert stale in page
    assert "cases, validation, of earlier weights" in page
    assert "voxlane train prepared --run runs/first epochs=2 " in page
    assert "voxlane train --run runs/first --resume epochs=2" in page
    evaluate([Run(str(run))], config=EvaluateConfig(space="prepared"), progress=False)
    page = read_page(run)
    assert "Scored: last weights, of step 4" in page
    assert "These scores are of step" not in page


def test_scores_of_folds_become_stale(trained_root: Path, tmp_path: Path) -> None:
    folds = tiny_runs.train_folds(tmp_path / "cv", f"{trained_root}/prepared")
    runs = [Run(str(folds / f"fold_{fold}")) for fold in range(tiny_runs.FOLDS)]
    evaluate(runs, Run(str(folds)), EvaluateConfig(space="prepared"), progress=False)
    assert "These scores are of step" not in read_page(folds)
    train(None, runs[1].uri, {"epochs": 2}, resume=True, progress=False)
    page = read_page(folds)
    assert "These scores are of step 2; fold_1 has since trained to step 4." in page
    assert "; fold_0 has" not in page


def test_evaluation_of_an_earlier_version_names_no_weights(root: Path) -> None:
    run = root / "runs/first"
    evaluate([Run(str(run))], config=EvaluateConfig(space="prepared"), progress=False)
    file = run / "evaluation/validation/summary.json"
    summary = json.loads(file.read_text())
    del summary["checkpoints"]
    file.write_text(json.dumps(summary))
    assert "This evaluation does not name the weights that it scored" in read_page(run)


def test_command_has_the_fields_that_a_resume_changed() -> None:
    changes = find_changes(
        {"epochs": 6, "loader": {"workers": None, "in_flight": 16}, "max_minutes": None},
        {"epochs": 7, "loader": {"workers": 2, "in_flight": 16}, "max_minutes": 3.5},
    )
    assert changes == {"epochs": 7, "loader.workers": 2, "max_minutes": 3.5}
    command = ["voxlane", "train", "data/prepared", "--run", "prepared", "epochs=6", "seed=1"]
    same = "file:///x/data/prepared"
    assert change_command(command, changes, same, same) == [
        "voxlane", "train", "data/prepared", "--run", "prepared", "seed=1", "epochs=7", "loader.workers=2",
        "max_minutes=3.5",
    ]  # fmt: skip
    moved = change_command(["voxlane", "train", "--run", "prepared", "./data/prepared/"], {}, same, "gs://b/new")
    assert moved == ["voxlane", "train", "--run", "prepared", "gs://b/new"]
    moved = change_command(["voxlane", "train", "--resume", "train"], {}, "gs://b/train", "gs://b/new")
    assert moved == ["voxlane", "train", "--resume", "gs://b/new"]
    assert change_command([], changes, same, "gs://b/new") == []
