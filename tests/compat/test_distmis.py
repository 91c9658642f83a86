"""DistMIS's configs mean here what they mean there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from voxlane import settings
from voxlane.compat.distmis import KEYS, is_distmis, translate
from voxlane.errors import ConfigError
from voxlane.train import config as configs

# As they stand in its repository and its README.
DATA_PARALLEL_TORCH = """{"lr": 0.00014783819855127426, "epochs": 10, "verbose": 2, "nodes": 1, "gpus": 4,
 "batch_size": 2, "num_workers": 4, "use_gpu": true}"""
DATA_PARALLEL_TF = '{"num_replicas": 4, "batch_size_per_replica": 2, "num_epochs": 20, "debug": false}'
EXPERIMENTS_TORCH = """{"lr": 1e-04, "epochs": 10, "verbose": 2, "nodes": 1, "gpus": 4, "batch_size": 2,
 "num_workers": 4, "use_gpu": true, "multinode": false, "cpu_per_trial": 10, "gpu_per_trial": 1, "num_samples": 24}"""
EXPERIMENTS_TF = '{"batch_size_per_replica": 2, "num_epochs": 20, "debug": false}'


def read(text: str, folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    file.write_text(text, encoding="utf-8")
    return settings.read_file(file)


@pytest.mark.parametrize("text", [DATA_PARALLEL_TORCH, DATA_PARALLEL_TF, EXPERIMENTS_TORCH, EXPERIMENTS_TF])
def test_its_files_are_known_and_make_a_config(text: str, tmp_path: Path) -> None:
    values = read(text, tmp_path)
    assert is_distmis(values)
    said = translate(values).said
    made = configs.build(said)
    assert made.optimizer.name == "adamw"
    assert made.optimizer.weight_decay == 0, "AdamW without decay is Adam"
    assert made.optimizer.schedule == "constant"
    assert made.batch_per_worker == 2


def test_a_config_of_ours_is_not_taken_for_one() -> None:
    assert not is_distmis({})
    assert not is_distmis({"preset": "small", "epochs": 5, "norm": "batch", "fold": 1})
    assert not is_distmis({"lr": 0.1}), "a slip in ours"
    shared = {"epochs", "norm", "b2", "amsgrad"}
    ours = {name.split(".")[0] for name, _, _ in settings.fields(configs.TrainConfig)}
    assert ours & KEYS <= shared, "a field of ours that DistMIS has too must not make a file of ours one of its"


def test_data_parallel_in_pytorch(tmp_path: Path) -> None:
    found = translate(read(DATA_PARALLEL_TORCH, tmp_path))
    made = configs.build(found.said)
    assert made.optimizer.lr == 0.00014783819855127426
    assert made.optimizer.lr_scaling == "none", "its PyTorch script takes the rate as it is"
    assert made.epochs == 10
    assert made.accelerator == "gpu"
    assert found.options == {"workers": 4, "gpus_per_worker": 1.0}
    assert found.tune == {}


def test_data_parallel_in_tensorflow(tmp_path: Path) -> None:
    found = translate(read(DATA_PARALLEL_TF, tmp_path))
    made = configs.build(found.said)
    assert found.options == {"workers": 4}
    assert made.epochs == 20
    assert (made.optimizer.lr_scaling, made.optimizer.lr_batch) == ("linear", 2), "it multiplies by num_replicas"
    assert any(note.startswith("lr:") for note in found.notes), "the file has none"


def test_several_machines() -> None:
    values = {"lr": 1e-3, "batch_size": 2, "nodes": 2, "gpus": 4, "multinode": True, "use_gpu": False}
    found = translate(values)
    assert found.options == {"workers": 8, "nodes": 2, "gpus_per_worker": 0.0, "address": "auto"}
    assert configs.build(found.said).accelerator == "cpu"
    uneven = translate({**values, "num_workers": 5})
    assert uneven.options == {"workers": 5, "gpus_per_worker": 0.0, "address": "auto"}
    assert any("5" in note and "nodes" in note for note in uneven.notes)


def test_one_worker_needs_no_cluster() -> None:
    assert translate({"lr": 1e-3, "batch_size": 2, "num_workers": 1, "nodes": 1, "gpus": 1}).options == {}


def test_a_search_in_pytorch(tmp_path: Path) -> None:
    found = translate(read(EXPERIMENTS_TORCH, tmp_path), searching=True)
    assert found.tune == {
        "scheduler": "none",
        "search": "random",
        "trials": 24,
        "cpus_per_trial": 10,
        "gpus_per_trial": 1,
    }
    assert found.said["tune"] == found.tune
    assert found.said["optimizer"]["lr"] == {"loguniform": [1e-4, 1e-2]}, "its script ignores the file's"
    assert found.options == {}
    several = translate({**read(EXPERIMENTS_TORCH, tmp_path), "multinode": True}, searching=True)
    assert several.options == {"address": "auto"}


def test_a_search_in_tensorflow_is_the_grid_of_its_script(tmp_path: Path) -> None:
    found = translate(read(EXPERIMENTS_TF, tmp_path), searching=True)
    assert found.said["optimizer"]["lr"] == {"grid": [1e-4, 5e-4, 1e-3, 5e-3]}
    assert found.said["norm"] == {"grid": ["batch", "group"]}
    assert found.tune == {"scheduler": "none", "search": "grid"}
    assert any("amsgrad" in note for note in found.notes)


def test_lists_are_grids_and_replicas_are_workers_of_a_trial() -> None:
    values = {"lr": ["1e-4", 0.001], "norm": ["bn", "gn"], "num_replicas": 2, "batch_size_per_replica": [1, 2]}
    found = translate(values, searching=True)
    assert found.said["optimizer"]["lr"] == {"grid": [1e-4, 0.001]}
    assert found.said["norm"] == {"grid": ["batch", "group"]}
    assert found.said["batch_per_worker"] == {"grid": [1, 2]}
    assert found.tune == {"scheduler": "none", "search": "grid", "workers_per_trial": 2}


def test_fields_of_ours_beside_its_keys_go_first() -> None:
    values = {"lr": 1e-3, "batch_size": 2, "preset": "small", "optimizer": {"lr": 0.5}, "tune": {"scheduler": "asha"}}
    found = translate(values, searching=True)
    assert found.said["preset"] == "small"
    assert found.said["optimizer"]["lr"] == 0.5
    assert found.said["optimizer"]["name"] == "adamw"
    assert found.said["tune"]["scheduler"] == "asha"
    assert found.said["tune"]["search"] == "random"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"lr": [0.1, 0.2], "batch_size": 2}, "lr: a list is a grid to search"),
        ({"lr": -1, "batch_size": 2}, "lr: a number above 0 is wanted, not -1"),
        ({"lr": "fast", "batch_size": 2}, "lr: a number above 0 is wanted, not 'fast'"),
        ({"lr": 0.1, "batch_size": 0}, "batch_size: a whole number from 1 is wanted, not 0"),
        ({"lr": 0.1, "batch_size": 2.5}, "batch_size: a whole number"),
        ({"num_replicas": "4", "num_epochs": 2}, "num_replicas: a whole number"),
        ({"num_epochs": 2, "epochs": 3, "debug": True}, "num_epochs and epochs differ. Leave one of them out"),
        ({"use_gpu": "yes", "batch_size": 2}, "use_gpu: true or false is wanted, not 'yes'"),
        ({"nodes": 0, "batch_size": 2}, "nodes: a whole number"),
        ({"norm": "xn", "batch_size": 2, "lr": 1}, "norm: bn, gn or in is wanted, not 'xn'"),
    ],
)
def test_what_is_wrong_is_said_by_its_own_name(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        translate(values)
    assert str(error.value).startswith(said)


def test_a_search_that_would_train_the_same_again() -> None:
    with pytest.raises(ConfigError, match="num_samples: 3 times the same grid"):
        translate({"lr": [0.1, 0.2], "batch_size": 2, "num_samples": 3}, searching=True)
    with pytest.raises(ConfigError, match="lr: the list is empty"):
        translate({"lr": [], "batch_size": 2}, searching=True)


def test_what_only_a_search_takes_is_named() -> None:
    notes = translate({"lr": 0.1, "batch_size": 2, "num_samples": 3, "cpu_per_trial": 1}).notes
    assert "cpu_per_trial, num_samples: only voxlane tune takes these" in notes


def test_silence() -> None:
    assert translate({"lr": 0.1, "batch_size": 2, "verbose": 0}).options == {"no_progress": True}
