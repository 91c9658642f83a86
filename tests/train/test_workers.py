"""Several ranks as one: the same batch, the same network, the same patches, whoever starts them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.test_fit import TINY, fold_with_cases, weights
from tests.volume import made
from voxlane import settings
from voxlane.errors import ConfigError, NoMemoryError, RunError
from voxlane.model.networks import build as build_network
from voxlane.train import fit as fitting
from voxlane.train.config import TrainConfig, build, learning_rate, network_for, share_of, with_batch
from voxlane.train.fit import begin, fit, train
from voxlane.train.recorder import mark
from voxlane.train.run import Run
from voxlane.volume.plan import Network, Plan
from voxlane.volume.prepared import Prepared

PLAIN: dict[str, Any] = {
    **TINY,
    "batch": 4,
    "augment": {"preset": "none"},
    "optimizer": {"name": "sgd", "lr": 0.01, "momentum": 0.9},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("workers")
    made.prepared(made.save(root / "scans", made.kits()), str(root / "data"))
    return str(root / "data")


def said(data: str, **more: Any) -> dict[str, Any]:
    return {**PLAIN, "fold": fold_with_cases(Prepared.load(data)), **more}


@pytest.fixture(scope="module")
def alone(data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process that others are held against."""
    run = tmp_path_factory.mktemp("alone") / "run"
    train(data, str(run), said(data), progress=False)
    return run


def difference(a: Path, b: Path) -> float:
    one, two = weights(a), weights(b)
    assert one.keys() == two.keys()
    return max(float((one[k].float() - two[k].float()).abs().max()) for k in one)


def history(run: Path) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = json.loads((run / "history.json").read_text())
    return entries


def orders(run: Path) -> list[str]:
    return [entry["order"] for entry in history(run)]


def test_history_accounts_for_every_patch(alone: Path) -> None:
    assert [entry["patches"] for entry in history(alone)] == [12, 12, 12]
    assert [entry["ranks"] for entry in history(alone)] == [1, 1, 1]
    for entry in history(alone):
        epoch, first = entry["epoch"], entry["step"] - 3
        whole = sum(mark(epoch, first + 1 + position // 4, position) for position in range(12))
        assert entry["order"] == f"{whole % (1 << 64):016x}"


def test_two_ranks_are_one(data: str, alone: Path, tmp_path: Path) -> None:
    train(data, str(tmp_path / "run"), said(data, devices=2), progress=False)
    assert difference(alone, tmp_path / "run") < 1e-5
    assert orders(tmp_path / "run") == orders(alone)
    assert [entry["ranks"] for entry in history(tmp_path / "run")] == [2, 2, 2]


def test_two_ranks_are_one_with_dice_over_the_batch(data: str, tmp_path: Path) -> None:
    made.prepared(made.save(tmp_path / "scans", made.kits()), str(tmp_path / "data"))
    facts = tmp_path / "data" / "prepared.json"
    prepared = json.loads(facts.read_text())
    assert prepared["plan"]["batch_dice"] is False
    prepared["plan"]["batch_dice"] = True
    facts.write_text(json.dumps(prepared))
    for name, devices in (("one", 1), ("two", 2)):
        train(str(tmp_path / "data"), str(tmp_path / name), said(data, devices=devices), progress=False)
    assert json.loads((tmp_path / "one" / "run.json").read_text())["plan"]["batch_dice"]
    assert difference(tmp_path / "one", tmp_path / "two") < 1e-5


@pytest.mark.parametrize("at_once", [1, 3])
def test_parts_of_a_batch_add_up(data: str, alone: Path, tmp_path: Path, at_once: int) -> None:
    train(data, str(tmp_path / "run"), said(data, device_batch=at_once), progress=False)
    assert difference(alone, tmp_path / "run") < 1e-5
    assert [e["loss"] for e in history(tmp_path / "run")] == pytest.approx([e["loss"] for e in history(alone)])
    assert [e["step"] for e in history(tmp_path / "run")] == [3, 6, 9]


@pytest.mark.cluster
def test_parts_on_two_ranks(data: str, alone: Path, tmp_path: Path) -> None:
    train(data, str(tmp_path / "run"), said(data, devices=2, device_batch=1), progress=False)
    assert difference(alone, tmp_path / "run") < 1e-5


def test_a_run_goes_on_with_fewer_ranks_and_the_same_batch(data: str, alone: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(data, str(run), said(data, devices=2, max_minutes=1e-6), progress=False)
    train(data, str(run), {"devices": 1, "max_minutes": None}, resume=True, progress=False)
    assert [entry["ranks"] for entry in history(run)] == [2, 1, 1]
    assert orders(run) == orders(alone)
    assert difference(alone, run) < 1e-5


@pytest.mark.cluster
def test_fsdp_is_the_same_run(data: str, alone: Path, tmp_path: Path) -> None:
    """Also handed over: begun with sharded weights and ended without, and the other way round."""
    sharded, whole = {"devices": 2, "strategy": "fsdp"}, {"devices": 1, "strategy": "ddp"}
    for name, first, then in (("a", sharded, whole), ("b", whole, sharded)):
        run = tmp_path / name
        train(data, str(run), said(data, **first, max_minutes=1e-6), progress=False)
        assert len(history(run)) == 1
        train(data, str(run), {**then, "max_minutes": None}, resume=True, progress=False)
        assert orders(run) == orders(alone)
        assert difference(alone, run) < 1e-5


def test_until_stops_and_the_schedule_goes_on(data: str, alone: Path, tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    begin(data, run, said(data))
    fit(run, progress=False, until=1)
    assert len(history(tmp_path / "run")) == 1
    assert history(tmp_path / "run")[0]["mean_dice"] is not None
    fit(run, resume=True, progress=False, until=1)
    fit(run, resume=True, progress=False, until=2)
    assert len(history(tmp_path / "run")) == 2
    fit(run, resume=True, progress=False)
    assert difference(alone, tmp_path / "run") == 0
    with pytest.raises(RunError, match="has done its 3 epochs"):
        fit(run, resume=True, progress=False)


def test_a_watcher_sees_every_epoch_and_may_stop(data: str, alone: Path, tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    begin(data, run, said(data, checkpoint_every_epochs=5))
    seen: list[int] = []

    def watch(entry: dict[str, Any]) -> bool:
        seen.append(entry["epoch"])
        return entry["epoch"] == 1

    fit(run, progress=False, watch=watch)
    assert seen == [0, 1]
    fit(run, resume=True, progress=False)
    assert len(history(tmp_path / "run")) == 3
    assert difference(alone, tmp_path / "run") == 0


def test_a_run_is_done_when_its_end_is_saved(data: str, alone: Path, tmp_path: Path) -> None:
    """Killed after the last epoch's history and before its checkpoint, or after that and before it could say so."""
    path = tmp_path / "run"
    run = Run(str(path))
    begin(data, str(path), said(data))
    assert not run.done
    fit(str(path), progress=False, until=2)
    assert not run.done
    before = (path / "checkpoints" / "last.ckpt").read_bytes()
    fit(str(path), resume=True, progress=False)
    assert run.done
    (path / "done.json").unlink()
    (path / "checkpoints" / "last.ckpt").write_bytes(before)
    assert not run.done
    fit(str(path), resume=True, progress=False)
    assert run.done
    assert difference(alone, path) == 0
    (path / "done.json").unlink()
    assert fit(str(path), resume=True, progress=False)["steps"]
    assert run.done


def test_a_run_that_stopped_by_itself_is_done(data: str, tmp_path: Path) -> None:
    values = said(data, early_stop=1, epochs=9, validation={"every_epochs": 1}, optimizer={"name": "sgd", "lr": 1e-9})
    train(data, str(tmp_path / "run"), values, progress=False)
    assert len(history(tmp_path / "run")) < 9
    assert Run(str(tmp_path / "run")).done


def test_parts_do_not_change_a_dice_over_the_batch(data: str, tmp_path: Path) -> None:
    """Two ranks became one, which then does its share at once."""
    made.prepared(made.save(tmp_path / "scans", made.kits()), str(tmp_path / "data"))
    facts = tmp_path / "data" / "prepared.json"
    prepared = json.loads(facts.read_text())
    prepared["plan"]["batch_dice"] = True
    facts.write_text(json.dumps(prepared))
    where = str(tmp_path / "data")
    begin(where, str(tmp_path / "one"), said(data))
    begin(where, str(tmp_path / "two"), said(data), ranks=2)
    for name in ("one", "two"):
        fit(str(tmp_path / name), progress=False)
    assert difference(tmp_path / "one", tmp_path / "two") == 0


def test_an_error_of_the_watcher_ends_the_run(data: str, tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    begin(data, run, said(data))

    def watch(entry: dict[str, Any]) -> bool:
        raise RunError("enough")

    with pytest.raises(RunError, match="enough"):
        fit(run, progress=False, watch=watch)


def voxlane(*words: str, launcher: tuple[str, ...] = ("-m",)) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *launcher, "voxlane", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)


def config_file(folder: Path, data: str) -> str:
    (folder / "config.json").write_text(json.dumps(said(data)))
    return str(folder / "config.json")


TORCHRUN = ("-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=2", "--standalone", "-m", "--")


@pytest.mark.cluster
def test_torchrun(data: str, alone: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ("train", data, "--run", str(run), "--config", config_file(tmp_path, data), "--auto-resume")
    done = voxlane(*words, launcher=TORCHRUN)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("next: voxlane evaluate") == 1
    assert done.stdout.count("epoch 1 of 3") == 1
    assert difference(alone, run) < 1e-5
    assert json.loads((run / "run.json").read_text())["ranks"] == 2
    again = voxlane(*words, launcher=TORCHRUN)
    assert again.returncode == 0
    assert "done before" in again.stdout
    assert len(history(run)) == 3


def test_what_torchrun_cannot_begin_is_said_once(data: str, tmp_path: Path) -> None:
    done = voxlane("train", data, "--run", str(tmp_path / "run"), "batch=3", launcher=TORCHRUN)
    assert done.returncode != 0
    assert done.stderr.count("3 patches do not share out evenly over 2 workers") == 1
    assert not (tmp_path / "run" / "run.json").exists()


def test_auto_resume_starts_goes_on_and_ends(data: str, tmp_path: Path) -> None:
    words = ("train", data, "--run", str(tmp_path / "run"), "--config", config_file(tmp_path, data), "--auto-resume")
    for so_far, more in ((1, ["max_minutes=0.000001"]), (3, ["max_minutes=null"])):
        done = voxlane(*words, *more)
        assert done.returncode == 0, done.stderr
        assert len(history(tmp_path / "run")) == so_far
    assert "done before" in voxlane(*words).stdout


PLAN = Plan(spacing=(1, 1, 1), normalisation=(), patch=(32, 32, 32), batch=2, network=Network())


@pytest.mark.parametrize(("rule", "batch", "rate"), [("none", 8, 0.01), ("linear", 8, 0.04), ("sqrt", 8, 0.02)])
def test_the_learning_rate_follows_the_batch(rule: str, batch: int, rate: float) -> None:
    config = build({"batch": batch, "optimizer": {"lr": 0.01, "lr_scaling": rule}})
    assert learning_rate(config, PLAN) == pytest.approx(rate)
    meant = build({"batch": batch, "optimizer": {"lr": 0.01, "lr_scaling": rule, "lr_batch": batch}})
    assert learning_rate(meant, PLAN) == pytest.approx(0.01)


def test_the_learning_rate_that_is_trained_with(data: str, tmp_path: Path) -> None:
    plan_batch = Prepared.load(data).plan.batch
    optimizer = {"name": "sgd", "lr": 0.001, "lr_scaling": "linear", "schedule": "constant"}
    values = said(data, batch=2 * plan_batch, optimizer=optimizer, epochs=1, steps_per_epoch=1, fold=None)
    train(data, str(tmp_path / "run"), values, progress=False)
    assert history(tmp_path / "run")[0]["lr"] == pytest.approx(0.002)


def test_a_batch_for_each_worker() -> None:
    assert with_batch(build({"batch_per_worker": 3}), PLAN, 4).batch == 12
    assert with_batch(build({}), PLAN, 2).batch == 2
    with pytest.raises(ConfigError, match="twice"):
        with_batch(build({"batch_per_worker": 3, "batch": 4}), PLAN, 4)


@pytest.mark.cluster
def test_a_batch_for_each_worker_stays_when_they_become_fewer(data: str, tmp_path: Path) -> None:
    values = said(data, batch=None, batch_per_worker=2, devices=2, max_minutes=1e-6)
    train(data, str(tmp_path / "run"), values, progress=False)
    same = {**values, "devices": 1, "max_minutes": None}
    train(data, str(tmp_path / "run"), {k: v for k, v in same.items() if k != "batch"}, resume=True, progress=False)
    assert [(e["ranks"], e["patches"]) for e in history(tmp_path / "run")] == [(2, 12), (1, 12), (1, 12)]


def test_a_batch_that_does_not_divide() -> None:
    assert share_of(6, 3) == 2
    with pytest.raises(ConfigError, match=r"4 patches .* over 3 workers. Give batch=6, or 2 workers"):
        share_of(4, 3)
    with pytest.raises(ConfigError, match=r"Give batch=5, or 1 worker$"):
        share_of(1, 5)


@pytest.mark.parametrize("norm", ["instance", "batch", "group"])
def test_norms_train(data: str, tmp_path: Path, norm: str) -> None:
    train(data, str(tmp_path / "run"), said(data, norm=norm, epochs=1), progress=False)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["network"]["norm"] == norm


def test_depth_cuts_and_adds_resolutions() -> None:
    five = network_for(build({}), PLAN)
    assert network_for(build({"depth": 3}), PLAN).features == five.features[:3]
    six = network_for(build({"depth": 6, "base_features": 8}), PLAN)
    assert six.features == (8, 16, 32, 64, 80, 80)
    assert six.strides[-1] == (2, 2, 2)
    with torch.device("meta"):
        assert build_network(six, 1, 3)
    with pytest.raises(ConfigError, match="fixed"):
        network_for(build({"preset": "mlperf", "depth": 3}), PLAN)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"),
    ],
)
def test_too_little_memory_has_its_own_name(error: BaseException) -> None:
    with pytest.raises(NoMemoryError, match="ran out of memory"), fitting._spoken(TrainConfig(), PLAN):
        raise error
    with pytest.raises(RuntimeError, match="else"), fitting._spoken(TrainConfig(), PLAN):
        raise RuntimeError("something else")


def test_devices_and_workers_contradict(data: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Leave devices out"):
        begin(data, str(tmp_path / "run"), said(data, devices=2), ranks=4)
    assert not Run(str(tmp_path / "run")).begun


def test_an_older_run_has_no_ranks(data: str, alone: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    begin(data, str(run), said(data))
    facts = json.loads((run / "run.json").read_text())
    del facts["ranks"]
    del facts["network"]["norm"]
    facts["config"] = {k: v for k, v in facts["config"].items() if k not in ("device_batch", "strategy", "norm")}
    (run / "run.json").write_text(json.dumps(facts))
    fit(str(run), progress=False)
    assert difference(alone, run) == 0
    assert settings.plain(build({}))["strategy"] == "ddp"
