"""Test space files: their meaning, and the errors before anything starts."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from tests.tune.spaces import space
from voxlane.errors import ConfigError
from voxlane.train import config as configs
from voxlane.tune.space import Distribution, TuneConfig, parse_space, rungs

FILE = """
preset: small
optimizer:
  lr: {loguniform: [1e-4, 1e-1]}
  name: {choice: [sgd, adamw]}
  weight_decay: {choice: [1e-3, 0]}
base_features: {logint: [4, 32]}
augment:
  strength: {quniform: [0, 1, 0.25]}
  preset: nnunet
patch: {choice: [[16, 16, 16], [32, 32, 32]]}
tune: {trials: 12, folds: [0, 1]}
"""


def test_space_file_is_a_config_file_with_distributions() -> None:
    parsed = parse_space(yaml.safe_load(FILE))
    assert list(parsed.fields) == [
        "optimizer.lr",
        "optimizer.name",
        "optimizer.weight_decay",
        "base_features",
        "augment.strength",
        "patch",
    ]
    assert parsed.fields["optimizer.lr"] == Distribution("loguniform", (0.0001, 0.1)), "YAML reads 1e-4 as text"
    assert parsed.fields["optimizer.weight_decay"].values == (0.001, 0.0)
    assert parsed.fixed == {"preset": "small", "augment": {"preset": "nnunet"}}
    assert (parsed.tune.trials, parsed.tune.folds, parsed.search, parsed.max_epochs) == (12, (0, 1), "optuna", 14)
    values = parsed.config_values({"optimizer.lr": 0.01, "patch": [16, 16, 16], "augment.strength": 0.5})
    config = configs.build_config(values)
    assert (config.optimizer.lr, config.patch, config.augment.strength) == (0.01, (16, 16, 16), 0.5)
    assert config.epochs == 14, "from the preset"
    assert parsed.fixed == {"preset": "small", "augment": {"preset": "nnunet"}}, "the shared fields do not change"


def test_drawn_numbers_stay_in_range_and_on_the_grid() -> None:
    assert Distribution("loguniform", (1e-4, 1e-1)).nearest(0.00123456789) == 0.0012346
    assert Distribution("uniform", (0.1, 0.33333333)).nearest(0.33333333) == 0.33333
    assert Distribution("uniform", (0.1, 0.333339)).nearest(0.333339) <= 0.333339
    assert Distribution("quniform", (0.0, 1.0, 0.1)).nearest(0.29999) == 0.3
    assert Distribution("int", (2, 5)).nearest(9.0) == 5


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"optimzer": {"lr": {"uniform": [0, 1]}}}, "optimzer: no such field.*Did you mean optimizer"),
        ({"optimizer": {"rate": {"uniform": [0.1, 1]}}}, "optimizer.rate: no such field"),
        ({"optimizer": {"lr": {"uniform": [-1, 1]}}}, r"optimizer.lr: .*greater than 0, got -1"),
        ({"optimizer": {"lr": {"uniform": [1, 0.1]}}}, "optimizer.lr: uniform from 1 to 0.1. Give the lower end first"),
        ({"optimizer": {"lr": {"loguniform": [0, 1]}}}, "optimizer.lr: loguniform from 0, which has no logarithm"),
        ({"optimizer": {"lr": {"uniform": [0.1]}}}, "optimizer.lr: uniform of 1 values. Write uniform: .low, high."),
        ({"optimizer": {"lr": {"uniform": ["a", 1]}}}, "which are not all numbers"),
        ({"optimizer": {"lr": {"uniform": 0.1}}}, "optimizer.lr: uniform takes a list, got 0.1"),
        (
            {"optimizer": {"lr": {"uniform": [0.1, 1], "int": [1, 2]}}},
            "A distribution has exactly one kind",
        ),
        ({"optimizer": {"name": {"choice": []}}}, "optimizer.name: choice of no values"),
        ({"optimizer": {"name": {"choice": ["sgd", "sgd"]}}}, "optimizer.name: choice lists a value twice"),
        ({"optimizer": {"name": {"choice": ["sgd", "lion"]}}}, "optimizer.name: .*'sgd' or 'adamw', got 'lion'"),
        ({"base_features": {"uniform": [4, 8]}}, "base_features: expected integers, got uniform. Use int"),
        ({"base_features": {"int": [1.5, 8]}}, "base_features: int from 1.5 to 8"),
        ({"augment": {"strength": {"quniform": [0, 1, 0.3]}}}, "in steps of 0.3. Choose a step that divides"),
        ({"epochs": 3}, "nothing to search"),
        ({"fold": {"choice": [0, 1]}}, "fold: this field cannot be searched. List the folds .* in tune.folds"),
        ({"base_features": {"int": [2, 4]}, "fold": None}, "fold: null holds out no cases"),
        ({"base_features": {"int": [2, 4]}, "devices": 2}, "devices: 2.*tune.workers_per_trial: 2"),
        (
            {"base_features": {"int": [2, 4]}, "tune": {"trails": 3}},
            "tune.trails: no such field. Did you mean tune.trials",
        ),
        ({"base_features": {"int": [2, 4]}, "tune": {"reduction": 1}}, "tune.reduction: .*greater than 1"),
        ({"base_features": {"int": [2, 4]}, "tune": {"folds": [0, 0]}}, "tune.folds: .*each fold once"),
        ({"base_features": {"int": [2, 4]}, "tune": 3}, "tune: expected fields"),
        ({"base_features": {"grid": [2, 4]}, "tune": {"search": "optuna"}}, "grid values need tune.search: grid"),
        ({"base_features": {"grid": [2, 4]}, "tune": {"trials": 1}}, "tune.trials: 1, but the grid has 2 combinations"),
        ({"base_features": {"grid": [2, 4]}, "tune": {"trials": 3}}, "the grid has only 2 combinations"),
    ],
)
def test_errors_name_the_field(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_space(values, origin="space.yaml")


def test_grid_has_every_combination_once() -> None:
    parsed = parse_space({"base_features": {"grid": [2, 4]}, "optimizer": {"name": {"choice": ["sgd", "adamw"]}}})
    assert (parsed.search, parsed.trials) == ("grid", 4)
    assert parsed.combinations() == [
        {"base_features": f, "optimizer.name": n} for f in (2, 4) for n in ("sgd", "adamw")
    ]


def test_small_space_has_fewer_trials() -> None:
    assert parse_space({"base_features": {"choice": [2, 4]}}).trials == 2
    assert parse_space({"base_features": {"choice": [2, 4]}, "tune": {"trials": 5}}).trials == 5


def test_rungs() -> None:
    assert rungs(TuneConfig(grace_epochs=1, reduction=3), 9) == [1, 3, 9]
    assert rungs(TuneConfig(grace_epochs=2, reduction=2.5), 20) == [2, 5, 13, 20]
    assert rungs(TuneConfig(), 250) == [27, 81, 243, 250]
    assert rungs(TuneConfig(scheduler="none"), 250) == [250]
    with pytest.raises(ConfigError, match=r"tune\.grace_epochs: 9, but a trial has only 4 epochs"):
        rungs(TuneConfig(grace_epochs=9), 4)


def test_space_of_the_other_tests_is_valid() -> None:
    assert parse_space(space({"trials": 3})).trials == 3
