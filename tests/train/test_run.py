"""Tests of a run's folder: creating it, reading it back, and errors for content that training did not write."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import Bucket
from tests.train import tiny_runs
from voxlane.checkpoint import Checkpoint
from voxlane.errors import ConfigError, RunError
from voxlane.train.predictor import PredictConfig, Predictor, load_weights
from voxlane.train.run import Run, TrainedRun, find_runs


@pytest.fixture(scope="module")
def folds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One tiny run per fold."""
    folder = tmp_path_factory.mktemp("runs")
    return tiny_runs.train_folds(folder / "cv", tiny_runs.prepare_balls(folder))


@pytest.fixture
def copy(folds: Path, tmp_path: Path) -> Path:
    """A copy of the runs, to damage."""
    return Path(shutil.copytree(folds, tmp_path / "cv"))


def edit_facts(run: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    facts = json.loads((run / "run.json").read_text())
    edit(facts)
    (run / "run.json").write_text(json.dumps(facts))


@pytest.mark.parametrize("kind", ["gcs", "s3_emulator", "folder"])
def test_run_with_results_is_created_once(kind: str, request: pytest.FixtureRequest) -> None:
    bucket: Bucket = request.getfixturevalue(kind)
    run = Run(f"{bucket.uri}/runs/first/", bucket.config)
    run.create({"fold": 0})
    assert run.read_facts() == {"version": 1, "fold": 0}
    run.write_bytes("tensorboard/events", b"of a first batch that failed")
    Run(f"{bucket.uri}/runs/first", bucket.config).create({"fold": 1})
    assert run.read_facts()["fold"] == 1
    assert not run.store.exists(run.key("tensorboard/events"))
    assert run.read_json("history.json") is None
    run.write_json("history.json", [1])
    assert run.read_json("history.json") == [1]
    with pytest.raises(RunError, match=r"runs/first: a run already exists here.*--resume"):
        Run(f"{bucket.uri}/runs/first", bucket.config).create({"fold": 2})
    assert run.read_facts()["fold"] == 1


def test_run_json_is_read_as_records(folds: Path) -> None:
    trained = TrainedRun.load(Run(str(folds / "fold_1")))
    assert trained.fold == 1
    assert trained.patch == (16, 16, 16)
    assert trained.description.targets == ("ball", "core")
    assert sorted(trained.held_out_cases + trained.training_cases) == tiny_runs.case_ids()


def test_store_is_opened_once(tmp_path: Path) -> None:
    run = Run(str(tmp_path))
    assert run.store is run.store
    assert pickle.loads(pickle.dumps(run)) == run


def test_find_runs(folds: Path, tmp_path: Path) -> None:
    assert [run.folder_uri for run in find_runs(str(folds))] == [f"file://{folds}/fold_{n}" for n in range(2)]
    assert [run.folder_uri for run in find_runs(f"{folds}/fold_1/")] == [f"file://{folds}/fold_1"]
    for folder in (tmp_path, tmp_path / "nowhere", folds.parent, folds / "fold_0" / "checkpoints"):
        with pytest.raises(RunError, match=r"no run exists here. Train one"):
            find_runs(str(folder))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "run.json: not JSON: the file is damaged. Restore it"),
        (b"\xff\xfe", "not JSON"),
        (b"[]", "run.json: the file does not have the content that training writes"),
        (b'"run"', "does not have the content"),
        (b'{"version": 1}', "does not have the content"),
        (b'{"version": 7}', r"another version of voxlane \(format 7; this version reads format 1\)"),
    ],
)
def test_damaged_run_json(body: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_bytes(body)
    with pytest.raises(RunError, match=message):
        TrainedRun.load(Run(str(tmp_path)))


def test_missing_and_unknown_fields(copy: Path) -> None:
    run = Run(str(copy / "fold_0"))
    for name in ("config", "plan", "description", "data", "cases", "fold"):
        before = (copy / "fold_0" / "run.json").read_bytes()
        edit_facts(copy / "fold_0", lambda facts, name=name: facts.pop(name))
        with pytest.raises(RunError, match="does not have the content"):
            TrainedRun.load(run)
        (copy / "fold_0" / "run.json").write_bytes(before)
    edit_facts(copy / "fold_0", lambda facts: facts["config"].update(epocs=3))
    with pytest.raises(ConfigError, match=r"run.json: epocs: no such field. Did you mean epochs"):
        TrainedRun.load(run)


def test_run_cannot_hold_out_what_it_trained_on(copy: Path) -> None:
    edit_facts(copy / "fold_0", lambda facts: facts["cases"]["validation"].append(facts["cases"]["train"][0]))
    with pytest.raises(RunError, match="does not have the content"):
        TrainedRun.load(Run(str(copy / "fold_0")))


def test_which_weights_are_loaded(copy: Path) -> None:
    run = Run(str(copy / "fold_0"))
    assert load_weights(run, "best").keys() == load_weights(run, "last").keys()
    (copy / "fold_0/checkpoints/best.ckpt").unlink()
    torch.testing.assert_close(load_weights(run, "best"), load_weights(run, "last"))
    (copy / "fold_0/checkpoints/last.ckpt").unlink()
    with pytest.raises(RunError, match=r"fold_0: the run has no checkpoint yet. .*--resume"):
        Predictor.load(find_runs(str(copy)))


@pytest.mark.parametrize("state", [{"network.x": torch.zeros(1)}, {}])
def test_checkpoint_of_another_network(state: dict[str, Any], copy: Path) -> None:
    Checkpoint(str(copy / "fold_0/checkpoints")).save({"state_dict": state}, "last.ckpt")
    with pytest.raises(RunError, match=r"does not match the network in run.json"):
        Predictor.load([Run(str(copy / "fold_0"))])
    Checkpoint(str(copy / "fold_0/checkpoints")).save([1], "last.ckpt")
    with pytest.raises(RunError, match="does not match"):
        Predictor.load([Run(str(copy / "fold_0"))])


def test_only_equal_networks_are_combined(copy: Path) -> None:
    assert len(Predictor.load(find_runs(str(copy))).networks) == 2
    before = (copy / "fold_1" / "run.json").read_bytes()

    def change_spacing(facts: dict[str, Any]) -> None:
        facts["plan"]["spacing"] = [9, 9, 9]

    def change_labels(facts: dict[str, Any]) -> None:
        facts["description"]["labels"] = {"background": 0, "lung": 1, "core": 2}

    def change_patch(facts: dict[str, Any]) -> None:
        facts["config"]["patch"] = [32, 16, 16]

    for edit, message in (
        (change_spacing, "by another plan"),
        (change_labels, "for other channels or labels"),
        (change_patch, "another patch"),
    ):
        edit_facts(copy / "fold_1", edit)
        with pytest.raises(ConfigError, match=f"fold_1: this run was trained .*{message} than .*fold_0"):
            Predictor.load(find_runs(str(copy)))
        (copy / "fold_1" / "run.json").write_bytes(before)


def test_missing_gpu(folds: Path) -> None:
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="accelerator: torch finds no GPU"):
            Predictor.load(find_runs(str(folds)), PredictConfig(accelerator="gpu"))
