"""Fine-tuning: runs that start from the weights of others, with frozen encoders and several learning rates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.test_fit import TINY, fit, fold_with_cases, same, weights
from tests.volume import sample_data
from voxlane.train.fit import train
from voxlane.train.initial_weights import digest_weights
from voxlane.volume.prepared_dataset import Prepared

PLAIN: dict[str, Any] = {
    **TINY,
    "augment": {"preset": "none"},
    "validation": {"every_epochs": 9, "max_cases": 1, "images": 0},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("finetune")
    sample_data.prepare_dataset(sample_data.write_folder(root / "scans", sample_data.make_kits19()), str(root / "data"))
    return str(root / "data")


@pytest.fixture(scope="module")
def source(data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has learned something."""
    run = tmp_path_factory.mktemp("source") / "run"
    fit(data, run, **{**PLAIN, "epochs": 4, "steps_per_epoch": 10})
    return run


def finetune(data: str, run: Path, source: Path | str, resume: bool = False, **more: Any) -> dict[str, Any]:
    if resume:
        return train(data, str(run), more, resume=True, progress=False)
    values = {**PLAIN, "fold": fold_with_cases(Prepared.load(data)), "init_from": str(source), **more}
    return train(data, str(run), values, progress=False)


def losses(run: Path) -> list[float]:
    return [entry["loss"] for entry in json.loads((run / "history.json").read_text())]


def facts(run: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run / "run.json").read_text())
    return content


def network_weights(run: Path) -> dict[str, torch.Tensor]:
    prefix = "network."
    return {name.removeprefix(prefix): t for name, t in weights(run).items() if name.startswith(prefix)}


def test_run_starts_at_the_loss_of_its_source(
    data: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one_step = {"epochs": 1, "steps_per_epoch": 1, "optimizer": {"name": "sgd", "lr": 1e-12}}
    fit(data, tmp_path / "scratch", **{**PLAIN, **one_step})
    finetune(data, tmp_path / "run", source, **one_step)
    (scratch,), (first,), last = losses(tmp_path / "scratch"), losses(tmp_path / "run"), losses(source)[-1]
    assert abs(first - last) < 0.1 * (scratch - last), (scratch, first, last)
    start = facts(tmp_path / "run")["init"]
    assert start["digest"] == digest_weights(network_weights(source))
    assert same(network_weights(source), torch.load(tmp_path / "run/initial.ckpt", weights_only=True))
    assert set(start["taken"]) == set(network_weights(source))
    printed = capsys.readouterr().err
    assert f"voxlane: starts from file://{source} (last checkpoint, {start['digest'][:19]})" in printed
    assert "voxlane: taken: 28 of 28 tensors, 100.0% of the parameters" in printed


def changed_tensors(run: Path) -> set[str]:
    """Return the names of the tensors that are not those that the run started from."""
    before, after = torch.load(run / "initial.ckpt", weights_only=True), network_weights(run)
    return {name for name in before if not torch.equal(before[name], after[name])}


def encoder(run: Path) -> set[str]:
    return {name for name in network_weights(run) if name.startswith("down.")}


FROZEN: dict[str, Any] = {"finetune": {"freeze_encoder": True}}


@pytest.mark.parametrize("more", [{}, {"norm": "batch"}, {"device_batch": 1}])
def test_frozen_encoder_keeps_its_bits(data: str, tmp_path: Path, source: Path, more: dict[str, Any]) -> None:
    """Also the running statistics of batch norms. Nothing of the encoder has a state of the optimizer."""
    if "norm" in more:
        fit(data, tmp_path / "source", **PLAIN, **more)
        source = tmp_path / "source"
    finetune(data, tmp_path / "run", source, epochs=2, **FROZEN, **more)
    names = set(network_weights(tmp_path / "run"))
    assert changed_tensors(tmp_path / "run") == names - encoder(tmp_path / "run")
    saved = torch.load(tmp_path / "run/checkpoints/last.ckpt", weights_only=True)["optimizer_states"][0]
    trained = [name for name in sorted(names - encoder(tmp_path / "run")) if name.endswith(("weight", "bias"))]
    assert len(saved["state"]) == len(trained)


@pytest.mark.parametrize("steps", [None, 2, 4])
def test_fine_tuning_resumes_exactly(data: str, source: Path, tmp_path: Path, steps: int | None) -> None:
    """Also before, at and after the step at which the encoder is trained too; the source may be gone by then."""
    values = {"freeze_encoder": True, "freeze_steps": steps, "encoder_lr_factor": 0.5, "layer_decay": 0.9}
    finetune(data, tmp_path / "whole", source, finetune=values)
    gone = tmp_path / "gone"
    source.rename(gone)
    try:
        (tmp_path / "paused").mkdir()
        for name in ("run.json", "initial.ckpt", "initial.ckpt.sums"):
            (tmp_path / "paused" / name).write_bytes((tmp_path / "whole" / name).read_bytes())
        finetune(data, tmp_path / "paused", source, resume=True, max_minutes=1e-6)  # before the first checkpoint
        assert len(losses(tmp_path / "paused")) == 1
        finetune(data, tmp_path / "paused", source, resume=True, max_minutes=None, init_from=str(source))
    finally:
        gone.rename(source)
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "paused"))
    assert losses(tmp_path / "whole") == losses(tmp_path / "paused")
    is_frozen = changed_tensors(tmp_path / "whole").isdisjoint(encoder(tmp_path / "whole"))
    assert is_frozen == (steps is None)


def test_encoder_is_trained_after_its_frozen_steps(data: str, source: Path, tmp_path: Path) -> None:
    values = {"freeze_encoder": True, "freeze_steps": 3}
    finetune(data, tmp_path / "run", source, finetune=values, epochs=1)
    assert changed_tensors(tmp_path / "run").isdisjoint(encoder(tmp_path / "run"))
    finetune(data, tmp_path / "run", source, resume=True, epochs=2)
    assert encoder(tmp_path / "run") <= changed_tensors(tmp_path / "run")


@pytest.mark.parametrize("values", [{"freeze_encoder": True}, {"freeze_encoder": True, "freeze_steps": 2}])
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.cluster)])
def test_two_ranks_fine_tune_the_same_network(
    data: str, source: Path, tmp_path: Path, values: dict[str, Any], strategy: str
) -> None:
    """Also if the run resumes on one rank, and the other way round."""
    values = {**values, "layer_decay": 0.5}
    optimizer = {"name": "sgd", "lr": 0.01, "momentum": 0.9}
    finetune(data, tmp_path / "one", source, finetune=values, optimizer=optimizer)
    two, one = {"devices": 2, "strategy": strategy}, {"devices": 1, "strategy": "ddp"}
    orders = [("a", two, one)] if strategy == "ddp" else [("a", two, one), ("b", one, two), ("c", two, two)]
    for name, first, second in orders:
        run = tmp_path / name
        finetune(data, run, source, finetune=values, optimizer=optimizer, max_minutes=1e-6, **first)
        finetune(data, run, source, resume=True, max_minutes=None, **second)
        expected, found = weights(tmp_path / "one"), weights(run)
        assert max(float((expected[k] - found[k]).abs().max()) for k in expected) < 1e-4, name
        assert changed_tensors(run).isdisjoint(encoder(run)) == ("freeze_steps" not in values)
