"""Tests of several ranks: the same batch, network and patches as one rank, whoever starts them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.test_fit import TINY, fold_with_cases, train_first_epoch, weights
from tests.volume import sample_data
from voxlane import settings
from voxlane.errors import ConfigError, NoMemoryError, RunError
from voxlane.model.networks import build as build_network
from voxlane.train import fit as fitting
from voxlane.train.config import (
    TrainConfig,
    build_config,
    resolve_batch,
    resolve_learning_rate,
    resolve_network,
    split_batch,
)
from voxlane.train.fit import fit, train
from voxlane.train.recorder import hash_patch
from voxlane.train.run import Run
from voxlane.train.run_setup import prepare_run
from voxlane.volume.dataset_index import encode_header
from voxlane.volume.plan import Network, Plan
from voxlane.volume.prepared_dataset import Prepared

PLAIN: dict[str, Any] = {
    **TINY,
    "batch": 4,
    "augment": {"preset": "none"},
    "optimizer": {"name": "sgd", "lr": 0.01, "momentum": 0.9},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("workers")
    sample_data.prepare_dataset(sample_data.write_folder(root / "scans", sample_data.make_kits19()), str(root / "data"))
    return str(root / "data")


def make_config(data: str, **changes: Any) -> dict[str, Any]:
    return {**PLAIN, "fold": fold_with_cases(Prepared.load(data)), **changes}


@pytest.fixture(scope="module")
def alone(data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process, to compare others with."""
    run = tmp_path_factory.mktemp("alone") / "run"
    train(data, str(run), make_config(data), progress=False)
    return run


def max_difference(a: Path, b: Path) -> float:
    first, second = weights(a), weights(b)
    assert first.keys() == second.keys()
    return max(float((first[k].float() - second[k].float()).abs().max()) for k in first)


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
        total = sum(hash_patch(epoch, first + 1 + position // 4, position) for position in range(12))
        assert entry["order"] == f"{total % (1 << 64):016x}"


def test_two_ranks_equal_one(data: str, alone: Path, tmp_path: Path) -> None:
    train(data, str(tmp_path / "run"), make_config(data, devices=2), progress=False)
    assert max_difference(alone, tmp_path / "run") < 1e-5
    assert orders(tmp_path / "run") == orders(alone)
    assert [entry["ranks"] for entry in history(tmp_path / "run")] == [2, 2, 2]


def plan_dice_over_the_batch(dataset: Path) -> None:
    header = json.loads((dataset / "prepared.json").read_text())
    assert header["plan"]["batch_dice"] is False
    header["plan"]["batch_dice"] = True
    del header["checksum"]
    (dataset / "prepared.json").write_bytes(encode_header(header))


def test_two_ranks_equal_one_with_dice_over_the_batch(data: str, tmp_path: Path) -> None:
    sample_data.prepare_dataset(
        sample_data.write_folder(tmp_path / "scans", sample_data.make_kits19()), str(tmp_path / "data")
    )
    plan_dice_over_the_batch(tmp_path / "data")
    for name, devices in (("one", 1), ("two", 2)):
        train(str(tmp_path / "data"), str(tmp_path / name), make_config(data, devices=devices), progress=False)
    assert json.loads((tmp_path / "one" / "run.json").read_text())["plan"]["batch_dice"]
    assert max_difference(tmp_path / "one", tmp_path / "two") < 1e-5


@pytest.mark.parametrize("at_once", [1, 3])
def test_batch_in_parts_trains_the_same_network(data: str, alone: Path, tmp_path: Path, at_once: int) -> None:
    train(data, str(tmp_path / "run"), make_config(data, device_batch=at_once), progress=False)
    assert max_difference(alone, tmp_path / "run") < 1e-5
    assert [e["loss"] for e in history(tmp_path / "run")] == pytest.approx([e["loss"] for e in history(alone)])
    assert [e["step"] for e in history(tmp_path / "run")] == [3, 6, 9]


@pytest.mark.cluster
def test_batch_in_parts_on_two_ranks(data: str, alone: Path, tmp_path: Path) -> None:
    train(data, str(tmp_path / "run"), make_config(data, devices=2, device_batch=1), progress=False)
    assert max_difference(alone, tmp_path / "run") < 1e-5


def test_run_resumes_on_fewer_ranks_with_the_same_batch(data: str, alone: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train_first_epoch(data, run, make_config(data, devices=2))
    train(data, str(run), {"devices": 1}, resume=True, progress=False)
    assert [entry["ranks"] for entry in history(run)] == [2, 1, 1]
    assert orders(run) == orders(alone)
    assert max_difference(alone, run) < 1e-5


@pytest.mark.cluster
def test_fsdp_is_the_same_run(data: str, alone: Path, tmp_path: Path) -> None:
    """Also if it starts with sharded weights and resumes without, and the other way round."""
    sharded, unsharded = {"devices": 2, "strategy": "fsdp"}, {"devices": 1, "strategy": "ddp"}
    for name, first, second in (("a", sharded, unsharded), ("b", unsharded, sharded)):
        run = tmp_path / name
        train_first_epoch(data, run, make_config(data, **first))
        assert len(history(run)) == 1
        train(data, str(run), second, resume=True, progress=False)
        assert orders(run) == orders(alone)
        assert max_difference(alone, run) < 1e-5


def test_until_epoch_pauses_a_run_without_changing_its_schedule(data: str, alone: Path, tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    prepare_run(data, run, make_config(data))
    fit(run, progress=False, until_epoch=1)
    assert len(history(tmp_path / "run")) == 1
    assert history(tmp_path / "run")[0]["mean_dice"] is not None
    fit(run, resume=True, progress=False, until_epoch=1)
    fit(run, resume=True, progress=False, until_epoch=2)
    assert len(history(tmp_path / "run")) == 2
    fit(run, resume=True, progress=False)
    assert max_difference(alone, tmp_path / "run") == 0
    with pytest.raises(RunError, match="has finished its 3 epochs"):
        fit(run, resume=True, progress=False)


def test_on_epoch_gets_every_epoch_and_may_stop_the_run(data: str, alone: Path, tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    prepare_run(data, run, make_config(data, checkpoint_every_epochs=5))
    epochs: list[int] = []

    def stop_after_two(entry: dict[str, Any]) -> bool:
        epochs.append(entry["epoch"])
        return entry["epoch"] == 1

    fit(run, progress=False, on_epoch=stop_after_two)
    assert epochs == [0, 1]
    fit(run, resume=True, progress=False)
    assert len(history(tmp_path / "run")) == 3
    assert max_difference(alone, tmp_path / "run") == 0


def test_run_is_done_once_its_last_checkpoint_is_saved(data: str, alone: Path, tmp_path: Path) -> None:
    """Killed after the last epoch's history and before its checkpoint, or after both and before done.json."""
    path = tmp_path / "run"
    run = Run(str(path))
    prepare_run(data, str(path), make_config(data))
    assert not run.is_done
    fit(str(path), progress=False, until_epoch=2)
    assert not run.is_done
    before = (path / "checkpoints" / "last.ckpt").read_bytes()
    fit(str(path), resume=True, progress=False)
    assert run.is_done
    (path / "done.json").unlink()
    (path / "checkpoints" / "last.ckpt").write_bytes(before)
    assert not run.is_done
    fit(str(path), resume=True, progress=False)
    assert run.is_done
    assert max_difference(alone, path) == 0
    (path / "done.json").unlink()
    assert fit(str(path), resume=True, progress=False)["steps"]
    assert run.is_done


def test_run_that_stops_early_is_done(data: str, tmp_path: Path) -> None:
    values = make_config(
        data, early_stop=1, epochs=9, validation={"every_epochs": 1}, optimizer={"name": "sgd", "lr": 1e-9}
    )
    train(data, str(tmp_path / "run"), values, progress=False)
    assert len(history(tmp_path / "run")) < 9
    assert Run(str(tmp_path / "run")).is_done


def test_parts_do_not_change_a_dice_over_the_batch(data: str, tmp_path: Path) -> None:
    """A run of two ranks continues on one, which then computes its share at once."""
    sample_data.prepare_dataset(
        sample_data.write_folder(tmp_path / "scans", sample_data.make_kits19()), str(tmp_path / "data")
    )
    plan_dice_over_the_batch(tmp_path / "data")
    dataset = str(tmp_path / "data")
    prepare_run(dataset, str(tmp_path / "one"), make_config(data))
    prepare_run(dataset, str(tmp_path / "two"), make_config(data), ranks=2)
    for name in ("one", "two"):
        fit(str(tmp_path / name), progress=False)
    assert max_difference(tmp_path / "one", tmp_path / "two") == 0


def test_error_of_on_epoch_ends_the_run(data: str, tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    prepare_run(data, run, make_config(data))

    def fail(entry: dict[str, Any]) -> bool:
        raise RunError("enough")

    with pytest.raises(RunError, match="enough"):
        fit(run, progress=False, on_epoch=fail)


def run_voxlane(*arguments: str, launcher: tuple[str, ...] = ("-m",)) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *launcher, "voxlane", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


def write_config(folder: Path, data: str) -> str:
    (folder / "config.json").write_text(json.dumps(make_config(data)))
    return str(folder / "config.json")


TORCHRUN = ("-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=2", "--standalone", "-m", "--")


@pytest.mark.cluster
def test_torchrun(data: str, alone: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = ("train", data, "--run", str(run), "--config", write_config(tmp_path, data), "--auto-resume")
    done = run_voxlane(*arguments, launcher=TORCHRUN)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("next: voxlane evaluate") == 1
    assert done.stdout.count("epoch 1 of 3") == 1
    assert max_difference(alone, run) < 1e-5
    assert json.loads((run / "run.json").read_text())["ranks"] == 2
    again = run_voxlane(*arguments, launcher=TORCHRUN)
    assert again.returncode == 0
    assert "done before" in again.stdout
    assert len(history(run)) == 3


def test_error_under_torchrun_is_printed_once(data: str, tmp_path: Path) -> None:
    done = run_voxlane("train", data, "--run", str(tmp_path / "run"), "batch=3", launcher=TORCHRUN)
    assert done.returncode != 0
    assert done.stderr.count("3 patches do not divide evenly over 2 workers") == 1
    assert not (tmp_path / "run" / "run.json").exists()


def test_auto_resume_starts_resumes_and_ends(data: str, tmp_path: Path) -> None:
    arguments = (
        "train",
        data,
        "--run",
        str(tmp_path / "run"),
        "--config",
        write_config(tmp_path, data),
        "--auto-resume",
    )
    for epochs, overrides in ((1, ["max_minutes=0.000001"]), (3, ["max_minutes=null"])):
        done = run_voxlane(*arguments, *overrides)
        assert done.returncode == 0, done.stderr
        assert len(history(tmp_path / "run")) == epochs
    assert "done before" in run_voxlane(*arguments).stdout


PLAN = Plan(spacing=(1, 1, 1), normalisation=(), patch=(32, 32, 32), batch=2, network=Network())


@pytest.mark.parametrize(("rule", "batch", "rate"), [("none", 8, 0.01), ("linear", 8, 0.04), ("sqrt", 8, 0.02)])
def test_learning_rate_follows_the_batch(rule: str, batch: int, rate: float) -> None:
    config = build_config({"batch": batch, "optimizer": {"lr": 0.01, "lr_scaling": rule}})
    assert resolve_learning_rate(config, PLAN) == pytest.approx(rate)
    for_this_batch = build_config({"batch": batch, "optimizer": {"lr": 0.01, "lr_scaling": rule, "lr_batch": batch}})
    assert resolve_learning_rate(for_this_batch, PLAN) == pytest.approx(0.01)


def test_scaled_learning_rate_is_used(data: str, tmp_path: Path) -> None:
    plan_batch = Prepared.load(data).plan.batch
    optimizer = {"name": "sgd", "lr": 0.001, "lr_scaling": "linear", "schedule": "constant"}
    values = make_config(data, batch=2 * plan_batch, optimizer=optimizer, epochs=1, steps_per_epoch=1, fold=None)
    train(data, str(tmp_path / "run"), values, progress=False)
    assert history(tmp_path / "run")[0]["lr"] == pytest.approx(0.002)


def test_batch_per_worker() -> None:
    assert resolve_batch(build_config({"batch_per_worker": 3}), PLAN, 4).batch == 12
    assert resolve_batch(build_config({}), PLAN, 2).batch == 2
    with pytest.raises(ConfigError, match="exclude each other"):
        resolve_batch(build_config({"batch_per_worker": 3, "batch": 4}), PLAN, 4)


@pytest.mark.cluster
def test_batch_per_worker_keeps_the_batch_on_fewer_workers(data: str, tmp_path: Path) -> None:
    values = make_config(data, batch=None, batch_per_worker=2, devices=2)
    train_first_epoch(data, tmp_path / "run", values)
    resumed = {**values, "devices": 1}
    train(data, str(tmp_path / "run"), {k: v for k, v in resumed.items() if k != "batch"}, resume=True, progress=False)
    assert [(e["ranks"], e["patches"]) for e in history(tmp_path / "run")] == [(2, 12), (1, 12), (1, 12)]


def test_batch_that_does_not_divide() -> None:
    assert split_batch(6, 3) == 2
    with pytest.raises(ConfigError, match=r"4 patches .* over 3 workers. Give batch=6, or 2 workers"):
        split_batch(4, 3)
    with pytest.raises(ConfigError, match=r"Give batch=5, or 1 worker$"):
        split_batch(1, 5)


@pytest.mark.parametrize("norm", ["instance", "batch", "group"])
def test_norms_train(data: str, tmp_path: Path, norm: str) -> None:
    train(data, str(tmp_path / "run"), make_config(data, norm=norm, epochs=1), progress=False)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["network"]["norm"] == norm


def test_depth_cuts_and_adds_resolutions() -> None:
    five = resolve_network(build_config({}), PLAN)
    assert resolve_network(build_config({"depth": 3}), PLAN).features == five.features[:3]
    six = resolve_network(build_config({"depth": 6, "base_features": 8}), PLAN)
    assert six.features == (8, 16, 32, 64, 80, 80)
    assert six.strides[-1] == (2, 2, 2)
    with torch.device("meta"):
        assert build_network(six, 1, 3)
    with pytest.raises(ConfigError, match="fixed"):
        resolve_network(build_config({"preset": "mlperf", "depth": 3}), PLAN)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"),
    ],
)
def test_running_out_of_memory_is_explained(error: BaseException) -> None:
    with pytest.raises(NoMemoryError, match="ran out of memory"), fitting._explain_out_of_memory(TrainConfig(), PLAN):
        raise error
    with pytest.raises(RuntimeError, match="else"), fitting._explain_out_of_memory(TrainConfig(), PLAN):
        raise RuntimeError("something else")


def test_devices_and_workers_exclude_each_other(data: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Leave devices out"):
        prepare_run(data, str(tmp_path / "run"), make_config(data, devices=2), ranks=4)
    assert not Run(str(tmp_path / "run")).exists


def test_older_run_without_newer_fields_still_trains(data: str, alone: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    prepare_run(data, str(run), make_config(data))
    facts = json.loads((run / "run.json").read_text())
    del facts["ranks"]
    del facts["network"]["norm"]
    facts["config"] = {k: v for k, v in facts["config"].items() if k not in ("device_batch", "strategy", "norm")}
    (run / "run.json").write_text(json.dumps(facts))
    fit(str(run), progress=False)
    assert max_difference(alone, run) == 0
    assert settings.to_plain(build_config({}))["strategy"] == "ddp"
