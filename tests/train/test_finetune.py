"""Fine-tuning: runs that start from the weights of others, with frozen encoders and several learning rates."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.model.test_cuda_graphs import RecomputedStep
from tests.train import tiny_models, tiny_runs
from tests.train.test_fit import TINY, fit, fold_with_cases, same, train_first_epoch, weights
from tests.train.test_step import DESCRIPTION, PLAN
from tests.volume import sample_data
from voxlane.checkpoint import Checkpoint
from voxlane.errors import ConfigError, CorruptError, RunError, VoxlaneError
from voxlane.store import StoreConfig
from voxlane.testing import Emulator
from voxlane.train import segmenter
from voxlane.train.config import build_config
from voxlane.train.fit import fit as fit_rank
from voxlane.train.fit import train
from voxlane.train.initial_weights import compute_digest
from voxlane.train.report import report
from voxlane.train.run import Run
from voxlane.train.run_setup import _describe_run
from voxlane.train.segmenter import Segmenter, learning_rate_factor
from voxlane.tune.runner import tune
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


def finetune_first_epoch(data: str, run: Path, source: Path | str, **more: Any) -> None:
    values = {**PLAIN, "fold": fold_with_cases(Prepared.load(data)), "init_from": str(source), **more}
    train_first_epoch(data, run, values)


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
    assert start["digest"] == compute_digest(network_weights(source))
    assert same(network_weights(source), torch.load(tmp_path / "run/initial.ckpt", weights_only=True))
    assert set(start["taken"]) == set(network_weights(source))
    printed = capsys.readouterr().err
    assert f"voxlane: starts from file://{source} (last checkpoint, weights {start['digest'][:12]})" in printed
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
        fit_rank(str(tmp_path / "paused"), None, False, False, until_epoch=1)  # before the first checkpoint
        assert len(losses(tmp_path / "paused")) == 1
        finetune(data, tmp_path / "paused", source, resume=True, init_from=str(source))
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
    finetune(data, tmp_path / "alone", source, finetune=values, optimizer=optimizer)
    two, single = {"devices": 2, "strategy": strategy}, {"devices": 1, "strategy": "ddp"}
    orders = [("a", two, single)] if strategy == "ddp" else [("a", two, single), ("b", single, two), ("c", two, two)]
    for name, first, second in orders:
        run = tmp_path / name
        finetune_first_epoch(data, run, source, finetune=values, optimizer=optimizer, **first)
        finetune(data, run, source, resume=True, **second)
        expected, trained = weights(tmp_path / "alone"), weights(run)
        assert max(float((expected[k] - trained[k]).abs().max()) for k in expected) < 1e-4, name
        assert changed_tensors(run).isdisjoint(encoder(run)) == ("freeze_steps" not in values)


@pytest.mark.cluster
@pytest.mark.parametrize("steps", [3, 4])
def test_sharded_states_of_frozen_weights_begin_when_they_are_trained(
    data: str, source: Path, tmp_path: Path, steps: int
) -> None:
    """The run is stopped after three steps. Loading the checkpoint makes up states for all weights."""
    values = {"freeze_encoder": True, "freeze_steps": steps}
    two = {"devices": 2, "strategy": "fsdp"}
    finetune_first_epoch(data, tmp_path / "run", source, finetune=values, **two)
    finetune(data, tmp_path / "run", source, resume=True, **two)
    saved = torch.load(tmp_path / "run/checkpoints/last.ckpt", weights_only=True)["optimizer_states"][0]
    names = list(network_weights(tmp_path / "run"))
    counts = {names[number]: int(state["step"]) for number, state in saved["state"].items()}
    assert counts == {name: 9 - steps if name.startswith("down.") else 9 for name in names}


# -- steps on a GPU ----------------------------------------------------------------------------------------------------


def test_recorded_steps_leave_out_frozen_weights(
    data: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step is recorded again once the encoder is trained."""
    values = {"epochs": 2, "finetune": {"freeze_encoder": True, "freeze_steps": 2}}
    finetune(data, tmp_path / "plain", source, **values)
    recorded = []

    class Counted(RecomputedStep):
        def _record(self, buffers: Any) -> None:
            recorded.append(len(self._parameters))
            super()._record(buffers)

    def start_recording(self: Segmenter) -> None:
        original(self)
        self._step = self._record_step

    original = Segmenter.on_fit_start
    monkeypatch.setattr(Segmenter, "on_fit_start", start_recording)
    monkeypatch.setattr(segmenter, "RecordedStep", Counted)
    finetune(data, tmp_path / "recorded", source, **values)
    names = network_weights(tmp_path / "plain")
    assert recorded == [len(names) - len(encoder(tmp_path / "plain")), len(names)]
    plain, trained = weights(tmp_path / "plain"), weights(tmp_path / "recorded")
    for name, weight in plain.items():
        torch.testing.assert_close(trained[name], weight, rtol=1e-5, atol=1e-6)


# -- learning rates ----------------------------------------------------------------------------------------------------


def make_module(**fields: Any) -> Segmenter:
    config = build_config({"init_from": "gs://b/r", "epochs": 2, "steps_per_epoch": 5, **fields})
    module = Segmenter(config, PLAN, DESCRIPTION, starting_anew={"down.0.0.weight", "down.0.0.bias"})
    module._trainer = SimpleNamespace()  # type: ignore[assignment]
    return module


@pytest.mark.parametrize("fused", [False, True])
def test_every_group_follows_the_schedule(fused: bool) -> None:
    """Parameters that start anew train at the full rate, and frozen ones are in no group."""
    module = make_module(finetune={"encoder_lr_factor": 0.1, "layer_decay": 0.5}, optimizer={"fused": fused})
    configured = module.configure_optimizers()
    optimizer, schedule = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    names = {weight: name for name, weight in module.network.named_parameters()}
    groups = [{names[weight] for weight in group["params"]} for group in optimizer.param_groups]
    assert {"heads.0.weight", "down.0.0.weight", "down.0.0.bias"} == groups[0] - {"heads.0.bias"}
    assert sum(map(len, groups)) == len(names)
    rates = [0.01 * factor for factor in (1, 0.5, 0.1 / 4, 0.1 / 8)]
    for step in range(10):
        expected = [rate * learning_rate_factor(step, 10, module.settings.optimizer) for rate in rates]
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(expected)
        for weight in module.network.parameters():
            weight.grad = torch.zeros_like(weight)
        optimizer.step()
        schedule.step()
    frozen = make_module(finetune={"freeze_encoder": True})
    groups = frozen.configure_optimizers()["optimizer"].param_groups
    trained = {weight for group in groups for weight in group["params"]}
    left_out = {name for name, weight in frozen.network.named_parameters() if weight not in trained}
    assert left_out == {name for name in names.values() if name.startswith("down.")} - {
        "down.0.0.weight",
        "down.0.0.bias",
    }


# -- other datasets and networks ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def balls(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A dataset with other labels and a network of its own."""
    return tiny_runs.prepare_balls(tmp_path_factory.mktemp("balls"), tiny_runs.case_ids(4))


ONE_STEP: dict[str, Any] = {
    **tiny_runs.CONFIG,
    "steps_per_epoch": 1,
    "validation": {"every_epochs": 1, "max_cases": 1, "images": 0},
}


def test_model_of_another_network_is_trained_on_a_new_dataset(
    balls: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = {"network": {**TINY["network"], "features": [6, 12]}}
    with pytest.raises(ConfigError) as raised:
        train(balls, str(tmp_path / "run"), {**ONE_STEP, **other, "init_from": str(source)}, progress=False)
    assert str(raised.value) == (
        f"file://{source}: init_from: no layer of this network (unet, features 6, 12) fits that of the source (unet, "
        "features 4, 8). Train the source's network: finetune.network=source"
    )
    values = {"preset": "small", **ONE_STEP, "init_from": str(source), "finetune": {"network": "source"}}
    train(balls, str(tmp_path / "run"), values, progress=False)
    network = facts(tmp_path / "run")["network"]
    assert (network["features"], network["convs"]) == ([4, 8], 2), "not the plan's, and not 8 features of the preset"
    assert "note: the labels differ (kidney, tumour became ball, core)" in capsys.readouterr().err
    for name in ("network", "depth"):
        clash = {**values, name: 3 if name == "depth" else TINY["network"]}
        with pytest.raises(ConfigError, match=f"{name}: finetune.network=source takes the source's network"):
            train(balls, str(tmp_path / "clash"), clash, progress=False)
    with pytest.raises(ConfigError, match="patch: 17 along z is not a multiple of 2"):
        train(balls, str(tmp_path / "clash"), {**values, "patch": [17, 16, 16]}, progress=False)
    assert not (tmp_path / "clash").exists()


def test_exported_model_is_fine_tuned(balls: str, tmp_path: Path) -> None:
    """Its only network, or the one that is named; the page lists every tensor."""
    model = tiny_models.export_tiny_model(tmp_path / "model.zip")
    values = {**ONE_STEP, "init_from": str(tmp_path / "model.zip")}
    with pytest.raises(
        ConfigError, match=r"the model has 2 networks \(fold_0, fold_1\). Choose one: finetune.member=fold_0"
    ):
        train(balls, str(tmp_path / "run"), values, progress=False)
    with pytest.raises(ConfigError, match=r"the model has no network fold_9\. Choose from: fold_0, fold_1"):
        train(balls, str(tmp_path / "run"), {**values, "finetune": {"member": "fold_9"}}, progress=False)
    train(balls, str(tmp_path / "run"), {**values, "finetune": {"member": "fold_1", "new_heads": True}}, progress=False)
    start = facts(tmp_path / "run")["init"]
    expected = tiny_models.make_weights(model.facts.members[1])
    taken = torch.load(tmp_path / "run/initial.ckpt", weights_only=True)
    assert same(taken, {name: tensor for name, tensor in expected.items() if not name.startswith("heads.")})
    assert (start["origin"], start["digest"]) == ("network fold_1", compute_digest(expected))
    assert [entry["name"] for entry in start["replaced"]] == ["heads.0.weight", "heads.0.bias"]
    report(str(tmp_path / "run"))
    page = (tmp_path / "run/report.html").read_text()
    assert f"<code>{model.uri}</code>" in page or f"<code>file://{tmp_path}/model.zip</code>" in page
    assert start["digest"] in page
    assert "2 tensors replaced, started anew" in page
    assert "heads.0.weight 3 × 4 × 1 × 1 × 1 (source: 3 × 4 × 1 × 1 × 1)" in page


def test_tampered_model_is_refused(balls: str, tmp_path: Path) -> None:
    member = tiny_models.make_member("only")
    tiny_models.export_tiny_model(tmp_path / "model", member)
    file = tmp_path / "model" / member.weights_file
    body = bytearray(file.read_bytes())
    body[-5] ^= 1
    file.write_bytes(body)
    with pytest.raises(CorruptError, match=r"only\.safetensors: not the file that was exported"):
        train(balls, str(tmp_path / "run"), {**ONE_STEP, "init_from": str(tmp_path / "model")}, progress=False)
    assert not (tmp_path / "run").exists()


# -- mistakes ----------------------------------------------------------------------------------------------------------


def test_source_that_cannot_be_used(data: str, source: Path, tmp_path: Path) -> None:
    for missing in (tmp_path / "nothing", source / "checkpoints"):
        with pytest.raises(RunError, match=f"^file://{missing}: init_from: there is neither a run nor an exported"):
            finetune(data, tmp_path / "run", missing)
    copy = tmp_path / "copy"
    shutil.copytree(source, copy)
    checkpoint = copy / "checkpoints/last.ckpt"
    state = torch.load(checkpoint, weights_only=True)
    names = list(state["state_dict"])
    changes: tuple[tuple[str, Any], ...] = (
        ("do not match the network", lambda weights: weights.pop(names[0])),
        ("do not match the network", lambda weights: weights.update({names[0]: torch.zeros(3)})),
        ("do not match the network", lambda weights: weights.update({names[0]: 3})),
        ("of the last checkpoint are not all finite", lambda weights: weights[names[0]].fill_(torch.nan)),
    )
    for words, change in changes:
        changed = {**state, "state_dict": {name: tensor.clone() for name, tensor in state["state_dict"].items()}}
        change(changed["state_dict"])
        Checkpoint(str(copy / "checkpoints")).save(changed, "last.ckpt")
        with pytest.raises(RunError, match=words):
            finetune(data, tmp_path / "run", copy)
    body = bytearray(checkpoint.read_bytes())
    body[len(body) // 2] ^= 1
    checkpoint.write_bytes(body)
    with pytest.raises(CorruptError, match=r"last.ckpt"):
        finetune(data, tmp_path / "run", copy)
    for file in (copy / "checkpoints").iterdir():
        file.unlink()
    with pytest.raises(RunError, match=r"init_from: the run has no checkpoint yet\. Continue that run first"):
        finetune(data, tmp_path / "run", copy)
    (tmp_path / "cv").mkdir()
    copy.rename(tmp_path / "cv/fold_0")
    with pytest.raises(
        ConfigError, match=r"a folder of runs \(fold_0\). Start from one of them: init_from=.*/cv/fold_0"
    ):
        finetune(data, tmp_path / "run", tmp_path / "cv")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"finetune": {"freeze_encoder": True}},
            "finetune.freeze_encoder: without init_from all weights are random. Give init_from=RUN",
        ),
        ({"init_from": "r", "finetune": {"freeze_steps": 3}}, "finetune.freeze_steps: nothing is frozen. Give"),
        ({"init_from": "r", "finetune": {"layer_decay": 0}}, "finetune.layer_decay: expected a value greater than 0"),
        ({"init_from": "r", "finetune": {"freeze": True}}, "finetune.freeze: no such field. Did you mean finetune.fre"),
        ({"init_from": 3}, "init_from: expected a valid string, got 3"),
    ],
)
def test_wrong_fields_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        build_config(fields)
    assert str(raised.value).startswith(message)


def test_another_source_is_refused_on_resume(data: str, source: Path, tmp_path: Path) -> None:
    finetune(data, tmp_path / "run", source, epochs=1)
    with pytest.raises(ConfigError, match="init_from: cannot change when a run is resumed"):
        finetune(data, tmp_path / "run", source, resume=True, epochs=2, init_from=str(tmp_path / "other"))
    with pytest.raises(ConfigError, match="finetune: cannot change when a run is resumed"):
        finetune(data, tmp_path / "run", source, resume=True, epochs=2, finetune={"layer_decay": 0.5})
    for name in ("run.json", "initial.ckpt", "initial.ckpt.sums"):
        (tmp_path / "other").mkdir(exist_ok=True)
        (tmp_path / "other" / name).write_bytes((tmp_path / "run" / name).read_bytes())
    Checkpoint(str(tmp_path / "other")).save({"other": torch.zeros(1)}, "initial.ckpt")
    with pytest.raises(RunError, match=r"other/initial.ckpt: the weights do not match the network in run.json"):
        finetune(data, tmp_path / "other", source, resume=True)


# -- places ------------------------------------------------------------------------------------------------------------


def test_best_checkpoint_and_relative_path(
    data: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(source.parent)
    values = {"epochs": 1, "steps_per_epoch": 1, "finetune": {"checkpoint": "best"}}
    finetune(data, tmp_path / "run", "run/", **values)
    assert facts(tmp_path / "run")["config"]["init_from"] == str(source)
    best = {n.removeprefix("network."): t for n, t in weights(source, "best").items() if n.startswith("network.")}
    assert facts(tmp_path / "run")["init"]["digest"] == compute_digest(best)
    assert facts(tmp_path / "run")["init"]["origin"] == "best checkpoint"


def test_source_in_a_bucket_is_read_once(data: str, emulator: Emulator) -> None:
    """Not again to resume, so that it may be gone by then."""
    config = StoreConfig(endpoint=emulator.url)
    wide = {"features": [32, 64], "strides": [[1, 1, 1], [2, 2, 2]], "kernels": [[3, 3, 3], [3, 3, 3]]}
    values = {**PLAIN, "network": wide, "fold": fold_with_cases(Prepared.load(data)), "epochs": 1, "steps_per_epoch": 1}
    train(data, "gs://bkt/source", values, config, progress=False)
    store = Run("gs://bkt/source", config).store
    emulator.reset_counters()
    train(data, "gs://bkt/runs/a", {**values, "init_from": "gs://bkt/source"}, config, progress=False)
    expected_bytes = sum(store.head(key).size for key in ("source/checkpoints/last.ckpt", "runs/a/initial.ckpt"))
    assert expected_bytes <= emulator.counters().get.bytes_out < 1.5 * expected_bytes
    store.delete_prefix("source/")
    train(data, "gs://bkt/runs/a", {"epochs": 2}, config, resume=True, progress=False)


def test_searches_check_their_sources_first(data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    values = {**PLAIN, "fold": fold_with_cases(Prepared.load(data)), "init_from": {"choice": [None, "nothing"]}}
    with pytest.raises(RunError, match=f"^file://{tmp_path}/nothing: init_from: there is neither a run"):
        tune(values, data, str(tmp_path / "search"))


def test_secrets_in_uris_are_not_stored(data: str, source: Path, tmp_path: Path) -> None:
    config = build_config({"init_from": "s3://id:hidden-word@bucket/run"})
    described = _describe_run(config, Prepared.load(data), 1, [])
    assert described["config"]["init_from"] == "s3://***@bucket/run"
    with pytest.raises(VoxlaneError) as raised:
        finetune(data, tmp_path / "run", "https://id:hidden-word@host/run")
    assert "hidden-word" not in str(raised.value)
