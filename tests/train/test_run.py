"""A run's folder: made once, read back as records, and what is said when it is not what training wrote."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import Bucket
from tests.train import made
from voxlane.checkpoint import Checkpoint
from voxlane.errors import ConfigError, RunError
from voxlane.train.predictor import PredictConfig, Predictor, weights
from voxlane.train.run import Run, Trained, runs_at


@pytest.fixture(scope="module")
def folds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One tiny run a fold."""
    folder = tmp_path_factory.mktemp("runs")
    return made.trained(folder / "cv", made.prepared(folder))


@pytest.fixture
def copy(folds: Path, tmp_path: Path) -> Path:
    """The runs again, to spoil."""
    return Path(shutil.copytree(folds, tmp_path / "cv"))


def change(run: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    facts = json.loads((run / "run.json").read_text())
    edit(facts)
    (run / "run.json").write_text(json.dumps(facts))


@pytest.mark.parametrize("kind", ["gcs", "s3_emulator", "folder"])
def test_a_run_is_made_once(kind: str, request: pytest.FixtureRequest) -> None:
    bucket: Bucket = request.getfixturevalue(kind)
    run = Run(f"{bucket.uri}/runs/first/", bucket.config)
    run.create({"fold": 0})
    assert run.facts() == {"version": 1, "fold": 0}
    with pytest.raises(RunError, match=r"runs/first: a run is here already.*--resume"):
        Run(f"{bucket.uri}/runs/first", bucket.config).create({"fold": 1})
    assert run.facts()["fold"] == 0
    assert run.read_json("history.json") is None
    run.write_json("history.json", [1])
    assert run.read_json("history.json") == [1]


def test_records(folds: Path) -> None:
    one = Trained.of(Run(str(folds / "fold_1")))
    assert one.fold == 1
    assert one.patch == (16, 16, 16)
    assert one.description.targets == ("ball", "core")
    assert sorted(one.held_out + one.trained_on) == made.ids()


def test_runs_of_a_folder(folds: Path, tmp_path: Path) -> None:
    assert [run.where for run in runs_at(str(folds))] == [f"file://{folds}/fold_{n}" for n in range(2)]
    assert [run.where for run in runs_at(f"{folds}/fold_1/")] == [f"file://{folds}/fold_1"]
    for place in (tmp_path, tmp_path / "nowhere", folds.parent, folds / "fold_0" / "checkpoints"):
        with pytest.raises(RunError, match=r"no run is here. Train one"):
            runs_at(str(place))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "run.json: not JSON: the file is damaged. Restore it"),
        (b"\xff\xfe", "not JSON"),
        (b"[]", "run.json: it does not hold what training writes"),
        (b'"run"', "does not hold"),
        (b'{"version": 1}', "does not hold"),
        (b'{"version": 7}', r"another voxlane \(format 7, this one reads 1\)"),
    ],
)
def test_damaged(body: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_bytes(body)
    with pytest.raises(RunError, match=said):
        Trained.of(Run(str(tmp_path)))


def test_fields_that_are_not_training_s(copy: Path) -> None:
    run = Run(str(copy / "fold_0"))
    for name in ("config", "plan", "description", "data", "cases", "fold"):
        before = (copy / "fold_0" / "run.json").read_bytes()
        change(copy / "fold_0", lambda facts, name=name: facts.pop(name))
        with pytest.raises(RunError, match="does not hold"):
            Trained.of(run)
        (copy / "fold_0" / "run.json").write_bytes(before)
    change(copy / "fold_0", lambda facts: facts["config"].update(epocs=3))
    with pytest.raises(ConfigError, match=r"run.json: epocs: no such field. Did you mean epochs"):
        Trained.of(run)


def test_a_run_cannot_hold_out_what_it_trained_on(copy: Path) -> None:
    change(copy / "fold_0", lambda facts: facts["cases"]["validation"].append(facts["cases"]["train"][0]))
    with pytest.raises(RunError, match="does not hold"):
        Trained.of(Run(str(copy / "fold_0")))


def test_which_weights(copy: Path) -> None:
    run = Run(str(copy / "fold_0"))
    assert weights(run, "best").keys() == weights(run, "last").keys()
    (copy / "fold_0/checkpoints/best.ckpt").unlink()
    torch.testing.assert_close(weights(run, "best"), weights(run, "last"))
    (copy / "fold_0/checkpoints/last.ckpt").unlink()
    with pytest.raises(RunError, match=r"fold_0: the run has no checkpoint yet. .*--resume"):
        Predictor.load(runs_at(str(copy)))


@pytest.mark.parametrize("state", [{"network.x": torch.zeros(1)}, {}])
def test_a_checkpoint_of_another_network(state: dict[str, Any], copy: Path) -> None:
    Checkpoint(str(copy / "fold_0/checkpoints")).save({"state_dict": state}, "last.ckpt")
    with pytest.raises(RunError, match=r"does not fit the network that run.json describes"):
        Predictor.load([Run(str(copy / "fold_0"))])
    Checkpoint(str(copy / "fold_0/checkpoints")).save([1], "last.ckpt")
    with pytest.raises(RunError, match="does not fit"):
        Predictor.load([Run(str(copy / "fold_0"))])


def test_networks_that_do_not_go_together(copy: Path) -> None:
    assert len(Predictor.load(runs_at(str(copy))).networks) == 2
    before = (copy / "fold_1" / "run.json").read_bytes()

    def spacing(facts: dict[str, Any]) -> None:
        facts["plan"]["spacing"] = [9, 9, 9]

    def name(facts: dict[str, Any]) -> None:
        facts["description"]["labels"] = {"background": 0, "lung": 1, "core": 2}

    def patch(facts: dict[str, Any]) -> None:
        facts["config"]["patch"] = [32, 16, 16]

    for edit, said in ((spacing, "by another plan"), (name, "for other channels or labels"), (patch, "another patch")):
        change(copy / "fold_1", edit)
        with pytest.raises(ConfigError, match=f"fold_1: this run was trained .*{said} than .*fold_0"):
            Predictor.load(runs_at(str(copy)))
        (copy / "fold_1" / "run.json").write_bytes(before)


def test_no_gpu_here(folds: Path) -> None:
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="accelerator: no GPU"):
            Predictor.load(runs_at(str(folds)), PredictConfig(accelerator="gpu"))
