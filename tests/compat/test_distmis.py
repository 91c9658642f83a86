"""Configs of DistMIS as configs of voxlane."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from voxlane import settings
from voxlane.compat.distmis import KEYS, is_distmis, translate
from voxlane.errors import ConfigError
from voxlane.train import config as configs
from voxlane.tune.space import parse_space

# Copied from the repository and the README of DistMIS.
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
def test_files_of_distmis_are_translated_to_a_config(text: str, tmp_path: Path) -> None:
    values = read(text, tmp_path)
    assert is_distmis(values)
    config = configs.build_config(translate(values).fields)
    assert config.optimizer.name == "adamw"
    assert config.optimizer.weight_decay == 0, "AdamW without decay is Adam"
    assert config.optimizer.schedule == "constant"
    assert config.batch_per_worker == 2


def test_configs_of_voxlane_are_not_translated() -> None:
    assert not is_distmis({})
    assert not is_distmis({"preset": "small", "epochs": 5, "norm": "batch", "fold": 1})
    assert not is_distmis({"lr": 0.1}), "a typo in a config of voxlane"
    shared = {"epochs", "norm", "b2", "amsgrad"}
    fields = {name.split(".")[0] for name, _, _ in settings.iterate_fields(configs.TrainConfig)}
    assert fields & KEYS <= shared, "a field that DistMIS has too must not identify a file as DistMIS's"


def test_data_parallel_in_pytorch(tmp_path: Path) -> None:
    translation = translate(read(DATA_PARALLEL_TORCH, tmp_path))
    config = configs.build_config(translation.fields)
    assert config.optimizer.lr == 0.00014783819855127426
    assert config.optimizer.lr_scaling == "none", "its PyTorch script takes the rate as it is"
    assert config.epochs == 10
    assert config.accelerator == "gpu"
    assert translation.options == {"workers": 4, "gpus_per_worker": 1.0}
    assert "tune" not in translation.fields


def test_data_parallel_in_tensorflow(tmp_path: Path) -> None:
    translation = translate(read(DATA_PARALLEL_TF, tmp_path))
    config = configs.build_config(translation.fields)
    assert translation.options == {"workers": 4}
    assert config.epochs == 20
    assert (config.optimizer.lr_scaling, config.optimizer.lr_batch) == ("linear", 2), "it multiplies by num_replicas"
    assert any(note.startswith("lr:") for note in translation.notes), "the file has none"


def test_several_machines() -> None:
    values = {"lr": 1e-3, "batch_size": 2, "nodes": 2, "gpus": 4, "multinode": True, "use_gpu": False}
    translation = translate(values)
    assert translation.options == {"workers": 8, "nodes": 2, "gpus_per_worker": 0.0, "address": "auto"}
    assert configs.build_config(translation.fields).accelerator == "cpu"
    uneven = translate({**values, "num_workers": 5})
    assert uneven.options == {"workers": 5, "gpus_per_worker": 0.0, "address": "auto"}
    assert any("5" in note and "nodes" in note for note in uneven.notes)


def test_one_worker_needs_no_cluster() -> None:
    assert translate({"lr": 1e-3, "batch_size": 2, "num_workers": 1, "nodes": 1, "gpus": 1}).options == {}


def test_search_in_pytorch(tmp_path: Path) -> None:
    translation = translate(read(EXPERIMENTS_TORCH, tmp_path), searching=True)
    assert translation.fields["tune"] == {
        "scheduler": "none",
        "search": "random",
        "trials": 24,
        "cpus_per_trial": 10,
        "gpus_per_trial": 1,
    }
    assert translation.fields["optimizer"]["lr"] == {"loguniform": [1e-4, 1e-2]}, "its script ignores the file's"
    assert translation.options == {}
    several = translate({**read(EXPERIMENTS_TORCH, tmp_path), "multinode": True}, searching=True)
    assert several.options == {"address": "auto"}


def test_search_in_tensorflow_is_the_grid_of_its_script(tmp_path: Path) -> None:
    translation = translate(read(EXPERIMENTS_TF, tmp_path), searching=True)
    assert translation.fields["optimizer"]["lr"] == {"grid": [1e-4, 5e-4, 1e-3, 5e-3]}
    assert translation.fields["norm"] == {"grid": ["batch", "group"]}
    assert translation.fields["optimizer"]["b2"] == {"grid": [0.99, 0.999]}
    assert translation.fields["optimizer"]["amsgrad"] == {"grid": [True, False]}
    assert translation.fields["tune"] == {"scheduler": "none", "search": "grid"}
    assert parse_space(translation.fields).trials == 32, "as many as its script trains"


def test_adams_arguments() -> None:
    values = {"lr": 1e-3, "batch_size": 2, "b2": 0.99, "amsgrad": True}
    config = configs.build_config(translate(values).fields)
    assert config.optimizer.torch_arguments()["betas"] == (0.9, 0.99)
    assert config.optimizer.amsgrad
    search = translate({**values, "b2": [0.9, 0.99], "amsgrad": [True, False]}, searching=True)
    assert search.fields["optimizer"]["b2"] == {"grid": [0.9, 0.99]}
    assert search.fields["optimizer"]["amsgrad"] == {"grid": [True, False]}


def test_lists_are_grids_and_replicas_are_workers_of_a_trial() -> None:
    values = {"lr": ["1e-4", 0.001], "norm": ["bn", "gn"], "num_replicas": 2, "batch_size_per_replica": [1, 2]}
    translation = translate(values, searching=True)
    assert translation.fields["optimizer"]["lr"] == {"grid": [1e-4, 0.001]}
    assert translation.fields["norm"] == {"grid": ["batch", "group"]}
    assert translation.fields["batch_per_worker"] == {"grid": [1, 2]}
    assert translation.fields["tune"] == {"scheduler": "none", "search": "grid", "workers_per_trial": 2}


def test_fields_of_voxlane_take_precedence() -> None:
    values = {"lr": 1e-3, "batch_size": 2, "preset": "small", "optimizer": {"lr": 0.5}, "tune": {"scheduler": "asha"}}
    translation = translate(values, searching=True)
    assert translation.fields["preset"] == "small"
    assert translation.fields["optimizer"]["lr"] == 0.5
    assert translation.fields["optimizer"]["name"] == "adamw"
    assert translation.fields["tune"]["scheduler"] == "asha"
    assert translation.fields["tune"]["search"] == "random"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lr": [0.1, 0.2], "batch_size": 2}, "lr: a list is a grid to search"),
        ({"lr": -1, "batch_size": 2}, "lr: expected a number above 0, got -1"),
        ({"lr": "fast", "batch_size": 2}, "lr: expected a number above 0, got 'fast'"),
        ({"lr": 0.1, "batch_size": 0}, "batch_size: expected an integer of at least 1, got 0"),
        ({"lr": 0.1, "batch_size": 2.5}, "batch_size: expected an integer"),
        ({"num_replicas": "4", "num_epochs": 2}, "num_replicas: expected an integer"),
        ({"num_epochs": 2, "epochs": 3, "debug": True}, "num_epochs and epochs differ. Leave one of them out"),
        ({"use_gpu": "yes", "batch_size": 2}, "use_gpu: expected true or false, got 'yes'"),
        ({"b2": 1, "batch_size": 2, "lr": 1}, "b2: expected a number from 0 to less than 1, got 1"),
        ({"amsgrad": "yes", "batch_size": 2, "lr": 1}, "amsgrad: expected true or false, got 'yes'"),
        ({"nodes": 0, "batch_size": 2}, "nodes: expected an integer"),
        ({"norm": "xn", "batch_size": 2, "lr": 1}, "norm: expected bn, gn or in, got 'xn'"),
    ],
)
def test_errors_name_the_key(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        translate(values)
    assert str(error.value).startswith(message)


def test_repeated_grid_is_an_error() -> None:
    with pytest.raises(ConfigError, match="num_samples: 3 repetitions of the same grid"):
        translate({"lr": [0.1, 0.2], "batch_size": 2, "num_samples": 3}, searching=True)
    with pytest.raises(ConfigError, match="lr: the list is empty"):
        translate({"lr": [], "batch_size": 2}, searching=True)


def test_keys_of_a_search_are_noted() -> None:
    notes = translate({"lr": 0.1, "batch_size": 2, "num_samples": 3, "cpu_per_trial": 1}).notes
    assert "cpu_per_trial, num_samples: only voxlane tune takes these" in notes


def test_verbose_0_hides_progress() -> None:
    assert translate({"lr": 0.1, "batch_size": 2, "verbose": 0}).options == {"no_progress": True}
