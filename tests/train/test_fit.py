"""Training: what a run leaves, going on exactly, on one rank and on two."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import Bucket
from tests.volume import sample_data
from voxlane.errors import ConfigError, PreparedError, RunError
from voxlane.store import StoreConfig
from voxlane.testing import Emulator
from voxlane.train.fit import fit as fit_rank
from voxlane.train.fit import train
from voxlane.train.local_ranks import run_on_local_ranks
from voxlane.train.run import Run
from voxlane.train.run_setup import prepare_run
from voxlane.volume.prepared_dataset import Prepared

TINY: dict[str, Any] = {
    "epochs": 3,
    "steps_per_epoch": 3,
    "batch": 2,
    "network": {"features": [4, 8], "strides": [[1, 1, 1], [2, 2, 2]], "kernels": [[3, 3, 3], [3, 3, 3]]},
    "validation": {"every_epochs": 2, "images": 1},
    "optimizer": {"name": "adamw", "lr": 0.01},
    "loader": {"in_flight": 3},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Six small prepared cases, some of them held out by fold 0."""
    root = tmp_path_factory.mktemp("fit")
    sample_data.prepare_dataset(sample_data.write_folder(root / "scans", sample_data.make_kits19()), str(root / "data"))
    prepared = Prepared.load(str(root / "data"))
    assert all(prepared.split(fold_with_cases(prepared)))
    return str(root / "data")


def fold_with_cases(prepared: Prepared) -> int:
    return int(prepared.table.column("fold")[0].as_py())


def fit(data: str, run: Path | str, resume: bool = False, **more: Any) -> dict[str, Any]:
    fold = fold_with_cases(Prepared.load(data))
    config_values = {**TINY, "fold": fold, **more} if not resume else more
    return train(data, str(run), config_values, resume=resume, progress=False, command=["voxlane", "train"])


def train_first_epoch(data: str, run: Path | str, config: dict[str, Any]) -> None:
    """Train one epoch of a run and stop there, without changing its schedule."""
    prepare_run(data, str(run), config)
    first_epoch = partial(fit_rank, str(run), None, False, False, until_epoch=1)
    if config.get("devices", 1) == 1:
        first_epoch()
    else:
        run_on_local_ranks(first_epoch, config["devices"], uri=str(run), fix="")


def weights(run: Path | str, name: str = "last") -> dict[str, torch.Tensor]:
    loaded: dict[str, torch.Tensor] = torch.load(f"{run}/checkpoints/{name}.ckpt", weights_only=True)["state_dict"]
    return loaded


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.fixture(scope="module")
def straight(data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three epochs without a pause."""
    run = tmp_path_factory.mktemp("straight") / "run"
    fit(data, run)
    return run


def test_run_writes_all_documented_files(data: str, straight: Path) -> None:
    facts = json.loads((straight / "run.json").read_text())
    assert facts["command"] == ["voxlane", "train"]
    assert facts["data"]["uri"] == f"file://{data}"
    assert not set(facts["cases"]["train"]) & set(facts["cases"]["validation"])
    assert facts["parameters"] > 1000
    history = json.loads((straight / "history.json").read_text())
    assert [entry["step"] for entry in history] == [3, 6, 9]
    assert all(math.isfinite(entry["loss"]) and entry["patches_per_s"] > 0 for entry in history)
    assert history[0]["dice"] is None
    assert set(history[1]["dice"]) == {"kidney", "tumour"}
    assert history[2]["mean_dice"] is not None, "the last epoch is always validated"
    stall = json.loads((straight / "stall.json").read_text())
    assert stall["patches"] == 18
    assert stall["bytes_read"] > 0
    assert stall["requests"] > 0
    assert stall["bottleneck"] in ("bucket", "decode", "augment", "step")
    assert sum(stall["shares"].values()) == pytest.approx(stall["seconds"], rel=0.05)
    assert {p.name for p in (straight / "checkpoints").glob("*.ckpt")} == {"last.ckpt", "best.ckpt"}


def test_tensorboard_has_scalars_and_rows_of_pictures(straight: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(straight / "tensorboard"))
    events.Reload()
    tags = events.Tags()
    assert {"loss", "lr", "mean_dice", "dice/kidney", "patches_per_s", "wait_share"} <= set(tags["scalars"])
    assert [event.step for event in events.Scalars("loss")] == [3, 6, 9]
    assert len(tags["images"]) == 1
    assert tags["images"][0].startswith("validation/case_")


def test_same_seed_trains_the_same_network(data: str, straight: Path, tmp_path: Path) -> None:
    fit(data, tmp_path / "again")
    assert same(weights(straight), weights(tmp_path / "again"))


def test_continued_run_equals_an_uninterrupted_run(data: str, straight: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train_first_epoch(data, run, {**TINY, "fold": fold_with_cases(Prepared.load(data))})
    assert [entry["epoch"] for entry in json.loads((run / "history.json").read_text())] == [0]
    fit(data, run, resume=True)
    assert same(weights(straight), weights(run))
    history = [json.loads((r / "history.json").read_text()) for r in (straight, run)]
    for entry, resumed_entry in zip(*history, strict=True):
        for name in ("epoch", "step", "lr", "loss", *(("dice",) if entry["epoch"] else ())):
            assert entry[name] == resumed_entry[name], name  # the end of a part is validated too
    assert history[1][1]["seconds"] > history[1][0]["seconds"]


def test_killed_run_continues_exactly(data: str, straight: Path, tmp_path: Path) -> None:
    """Killed in the middle of an epoch, it repeats that epoch from the last checkpoint."""
    run = tmp_path / "run"
    config_values = {**TINY, "fold": fold_with_cases(Prepared.load(data))}
    program = (
        "import sys, json, time\nimport torch\nfrom voxlane.train import segmenter, fit\n"
        "real = segmenter.Segmenter.training_step\n"
        "def slow(self, batch, index):\n"
        "    if self.trainer.current_epoch == 2 and index == 1:\n"
        "        print('here', flush=True)\n        time.sleep(60)\n"
        "    return real(self, batch, index)\n"
        "segmenter.Segmenter.training_step = slow\n"
        f"fit.train({data!r}, {str(run)!r}, json.loads(sys.argv[1]), progress=False)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, json.dumps(config_values)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert any(line.strip() == "here" for line in child.stdout)
    time.sleep(0.3)
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    fit(data, run, resume=True)
    assert same(weights(straight), weights(run))
    assert [e["epoch"] for e in json.loads((run / "history.json").read_text())] == [0, 1, 2]


def test_two_ranks_share_the_batch(data: str, tmp_path: Path) -> None:
    """The same patches, so nearly the same network; validated cases are shared out, none twice."""
    plain = {"augment": {"preset": "none"}, "optimizer": {"name": "sgd", "lr": 0.01, "momentum": 0.0}}
    single = fit(data, tmp_path / "one", **plain)
    double = fit(data, tmp_path / "two", **plain, devices=2)
    assert double["patches"] == single["patches"]
    a, b = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert a.keys() == b.keys()
    assert max(float((a[k] - b[k]).abs().max()) for k in a) < 1e-4
    dice = [json.loads((tmp_path / n / "history.json").read_text())[-1]["dice"] for n in ("one", "two")]
    assert dice[0].keys() == dice[1].keys()
    fit(data, tmp_path / "two", resume=True, epochs=4, devices=1)
    assert json.loads((tmp_path / "two" / "history.json").read_text())[-1]["epoch"] == 3


def test_early_stop_and_all_cases(data: str, tmp_path: Path) -> None:
    fit(
        data,
        tmp_path / "stop",
        epochs=20,
        early_stop=1,
        validation={"every_epochs": 1},
        optimizer={"name": "sgd", "lr": 1e-9},
    )
    assert len(json.loads((tmp_path / "stop" / "history.json").read_text())) < 20
    train(data, str(tmp_path / "all"), {**TINY, "fold": None, "epochs": 1}, progress=False)
    assert json.loads((tmp_path / "all" / "run.json").read_text())["cases"]["validation"] == []
    assert {p.name for p in (tmp_path / "all" / "checkpoints").glob("*.ckpt")} == {"last.ckpt"}


def test_run_in_a_bucket(bucket: Bucket, data: str) -> None:
    uri = f"{bucket.uri}/runs/first"
    config_values = {
        **TINY,
        "fold": fold_with_cases(Prepared.load(data)),
        "epochs": 1,
        "validation": {"every_epochs": 1},
    }
    train(data, uri, config_values, bucket.config, progress=False)
    run = Run(uri, bucket.config)
    assert run.read_json("history.json")[0]["dice"]
    assert run.store.exists(run.key("checkpoints/best.ckpt"))
    train(data, uri, {"epochs": 2}, bucket.config, resume=True, progress=False)
    assert len(run.read_json("history.json")) == 2


def test_resuming_reads_the_checkpoint_and_the_dataset_once(
    data: str, emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri, config = "gs://bkt/runs/first", StoreConfig(endpoint=emulator.url)
    wide = {"features": [32, 64], "strides": [[1, 1, 1], [2, 2, 2]], "kernels": [[3, 3, 3], [3, 3, 3]]}
    config_values = {**TINY, "network": wide, "fold": fold_with_cases(Prepared.load(data)), "epochs": 1}
    train(data, uri, config_values, config, progress=False)
    run = Run(uri, config)
    checkpoint_bytes = run.store.head(run.key("checkpoints/last.ckpt")).size
    loads = []
    original = Prepared.load

    def count_load(*arguments: Any) -> Prepared:
        loads.append(arguments)
        return original(*arguments)

    monkeypatch.setattr(Prepared, "load", count_load)
    emulator.reset_counters()
    train(data, uri, {"epochs": 2}, config, resume=True, progress=False)
    read_bytes = emulator.counters().get.bytes_out
    assert checkpoint_bytes <= read_bytes < 1.5 * checkpoint_bytes
    assert len(loads) == 1


def test_loader_processes_see_the_same_patches(data: str, straight: Path, tmp_path: Path) -> None:
    report = fit(data, tmp_path / "run", loader={"workers": 2, "in_flight": 4})
    assert same(weights(straight), weights(tmp_path / "run"))
    assert report["requests"] > 0
    assert report["decode_ms_a_patch"] > 0


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"batch": 3, "devices": 2}, ConfigError, "batch: 3 patches do not divide evenly.*batch=4"),
        ({"fold": 9}, ConfigError, "fold: expected 0 to 1, got 9"),
        ({"patch": [15, 16, 16]}, ConfigError, "15"),
        ({"accelerator": "gpu"}, ConfigError, "accelerator: torch finds no GPU"),
        ({"precision": "bfloat16"}, ConfigError, "precision: bfloat16 needs a GPU"),
        ({"fold": None, "early_stop": 2}, ConfigError, "early_stop"),
        ({"optimizer": {"name": "adamw", "capturable": True}}, ConfigError, "optimizer.capturable: only GPUs support"),
        ({"optimizer": {"fused": True}, "precision": "float16"}, ConfigError, "optimizer.fused: .* cannot clip them"),
        ({"epochs": 0}, ConfigError, "epochs: .*greater than or equal to 1"),
        ({"preset": "large"}, ConfigError, "preset: unknown preset 'large'. Choose from: nnunet, small, mlperf"),
        ({"optimizer": {"lrate": 1}}, ConfigError, "optimizer.lrate: no such field. Did you mean optimizer.lr"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_config_that_cannot_be_trained_is_rejected_before_anything_is_written(
    data: str, tmp_path: Path, changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        fit(data, tmp_path / "run", **changes)
    assert not (tmp_path / "run").exists()


def test_optimizer_arguments_survive_a_resume(data: str, tmp_path: Path) -> None:
    optimizer = {**TINY["optimizer"], "b2": 0.99, "amsgrad": True, "schedule": "constant"}
    fit(data, tmp_path / "whole", optimizer=optimizer, epochs=2)
    fit(data, tmp_path / "resumed", optimizer=optimizer, epochs=1)
    fit(data, tmp_path / "resumed", resume=True, epochs=2)
    state = torch.load(f"{tmp_path}/resumed/checkpoints/last.ckpt", weights_only=True)["optimizer_states"][0]
    assert state["param_groups"][0]["betas"] == (0.9, 0.99)
    assert "max_exp_avg_sq" in state["state"][0]
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "resumed"))


def test_run_is_never_overwritten(data: str, straight: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"a run already exists here.*--resume"):
        fit(data, straight)
    with pytest.raises(RunError, match="no run exists here"):
        fit(data, tmp_path / "none", resume=True)
    with pytest.raises(ConfigError, match="batch: cannot change when a run is resumed"):
        fit(data, straight, resume=True, batch=4)
    with pytest.raises(PreparedError, match="there is no prepared dataset at this URI"):
        fit_missing(tmp_path)


def fit_missing(folder: Path) -> None:
    train(str(folder / "nothing"), str(folder / "run"), TINY, progress=False)


def test_another_dataset_is_refused(data: str, straight: Path, tmp_path: Path) -> None:
    sample_data.prepare_dataset(
        sample_data.write_folder(tmp_path / "scans", sample_data.make_kits19(7)), str(tmp_path / "other")
    )
    words = r"other is not the dataset of the run: it has 1 more case, such as case_00006\. Name .* with --data URI"
    with pytest.raises(RunError, match=words):
        train(str(tmp_path / "other"), str(straight), {}, resume=True, progress=False)


def test_patch_larger_than_every_volume_is_padded(data: str, tmp_path: Path) -> None:
    report = fit(data, tmp_path / "run", epochs=1, patch=[32, 64, 64], validation={"every_epochs": 1})
    assert report["patches"] == 6
    assert json.loads((tmp_path / "run" / "history.json").read_text())[0]["mean_dice"] is not None


def test_finished_run_says_so_and_keeps_its_report(data: str, straight: Path) -> None:
    before = (straight / "stall.json").read_bytes()
    with pytest.raises(RunError, match=r"the run has finished its 3 epochs. Give a larger number with epochs=N"):
        fit(data, straight, resume=True)
    assert (straight / "stall.json").read_bytes() == before


def test_stall_report_covers_all_parts(data: str, tmp_path: Path) -> None:
    train_first_epoch(data, tmp_path / "run", {**TINY, "fold": fold_with_cases(Prepared.load(data))})
    report = fit(data, tmp_path / "run", resume=True)
    assert report["steps"] == 9
    assert report["patches"] == 18
    assert sum(report["shares"].values()) == pytest.approx(report["seconds"], rel=0.05)


def test_fewer_held_out_cases_than_ranks(data: str, tmp_path: Path) -> None:
    validation = {"every_epochs": 1, "max_cases": 1}
    fit(data, tmp_path / "run", epochs=1, steps_per_epoch=1, devices=2, validation=validation)
    assert json.loads((tmp_path / "run" / "history.json").read_text())[0]["mean_dice"] is not None


@pytest.mark.parametrize(
    ("number", "code", "words"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "SIGTERM")]
)
def test_stop_request_prints_how_to_continue(
    data: str, tmp_path: Path, number: signal.Signals, code: int, words: str
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**TINY, "fold": fold_with_cases(Prepared.load(data)), "epochs": 500}))
    command = ["-m", "voxlane.cli.main", "train", data, "--run", str(tmp_path / "run"), "--config", str(config)]
    child = subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert child.stdout is not None
    assert any(line.startswith("epoch 2 of 500: loss") for line in child.stdout)
    child.send_signal(number)
    _, stderr = child.communicate(timeout=300)
    assert child.returncode == code, stderr
    assert words in stderr
    assert "--resume continues from the last checkpoint" in stderr
    assert "Traceback" not in stderr


@pytest.mark.parametrize("end", [{"epochs": 3}, {"epochs": 9, "max_minutes": 1e-6}])
def test_last_step_is_saved_for_any_interval(data: str, tmp_path: Path, end: dict[str, Any]) -> None:
    fit(data, tmp_path / "run", checkpoint_every_epochs=2, validation={"every_epochs": 9}, **end)
    history = json.loads((tmp_path / "run" / "history.json").read_text())
    saved = torch.load(tmp_path / "run/checkpoints/last.ckpt", weights_only=True)
    assert saved["global_step"] == history[-1]["step"]
