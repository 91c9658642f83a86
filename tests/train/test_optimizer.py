"""The config of the optimizer and the arguments that torch's optimizer gets from it."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.train.test_step import DESCRIPTION, PLAN
from voxlane import settings
from voxlane.errors import ConfigError
from voxlane.train.config import build_config
from voxlane.train.segmenter import Segmenter
from voxlane.tune.space import parse_space

CLASSES: dict[str, Any] = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}


def make_optimizer(**fields: Any) -> torch.optim.Optimizer:
    module = Segmenter(build_config({"optimizer": fields, "epochs": 1}), PLAN, DESCRIPTION)
    module._trainer = SimpleNamespace()  # type: ignore[assignment]
    optimizer: torch.optim.Optimizer = module.configure_optimizers()["optimizer"]
    return optimizer


@pytest.mark.parametrize("name", CLASSES)
def test_every_argument_of_torch_has_a_field(name: str) -> None:
    arguments = set(inspect.signature(CLASSES[name]).parameters)
    own_arguments = set(build_config({"optimizer": {"name": name}}).optimizer.torch_arguments())
    # The weights are the network's. A differentiable step updates weights in place that autograd does not allow it to.
    assert arguments - own_arguments == {"params", "lr", "fused", "differentiable"}
    assert own_arguments <= arguments


def test_defaults_are_those_of_runs_before_the_fields_existed() -> None:
    weight = [torch.nn.Parameter(torch.zeros(1))]
    sgd = torch.optim.SGD(weight, lr=0.01, weight_decay=3e-5, fused=False, momentum=0.99, nesterov=True)
    assert make_optimizer().defaults == sgd.defaults
    adamw = torch.optim.AdamW(weight, lr=0.01, weight_decay=3e-5, fused=False)
    assert make_optimizer(name="adamw").defaults == adamw.defaults


def test_fields_reach_torch() -> None:
    adamw = {"eps": 1e-6, "amsgrad": True, "maximize": True, "foreach": True, "betas": [0.8, 0.95]}
    defaults = make_optimizer(name="adamw", b2=0.99, **adamw).defaults
    assert {name: defaults[name] for name in adamw} == {**adamw, "betas": (0.8, 0.99)}
    assert make_optimizer(name="adamw", b1=0.7).defaults["betas"] == (0.7, 0.999)
    sgd = {"momentum": 0.5, "dampening": 0.1, "nesterov": False, "fused": True}
    defaults = make_optimizer(**sgd).defaults
    assert {name: defaults[name] for name in sgd} == sgd
    assert make_optimizer(momentum=0).defaults["nesterov"] is False


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"amsgrad": True}, "optimizer: sgd has no argument amsgrad. Leave it out, or use optimizer.name=adamw"),
        ({"b2": 0.9}, "optimizer: sgd has no argument b2"),
        ({"name": "adamw", "dampening": 0.5}, "optimizer: adamw has no argument dampening"),
        (
            {"dampening": 0.5},
            "optimizer: dampening is not possible with Nesterov momentum. Use",
        ),
        ({"foreach": True, "fused": True}, "optimizer: foreach and fused exclude each other"),
        ({"name": "adamw", "b2": 1}, "optimizer.b2: expected a value less than 1, got 1"),
        ({"name": "adamw", "betas": [0.9]}, "optimizer.betas: expected 2 values, got 1"),
        ({"name": "adamw", "eps": -1}, "optimizer.eps: expected a value greater than or equal to 0"),
        ({"name": "adamw", "amsgrad": "perhaps"}, "optimizer.amsgrad: expected true or false"),
        ({"name": "adamw", "beta2": 0.9}, "optimizer.beta2: no such field. Did you mean optimizer.betas"),
    ],
)
def test_mistakes_name_the_argument(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        build_config({"optimizer": fields})
    assert str(raised.value).startswith(message)


def test_configs_that_compare_optimizers_keep_sgds_momentum() -> None:
    config = build_config({"preset": "mlperf", "optimizer": {"name": "adamw"}})
    assert "momentum" not in config.optimizer.torch_arguments()


def test_config_of_an_older_run_is_the_same() -> None:
    config = build_config({"optimizer": {"name": "adamw", "lr": 0.1}})
    plain = settings.to_plain(config)
    new_fields = ("dampening", "betas", "b1", "b2", "eps", "amsgrad", "capturable", "maximize", "foreach", "fused")
    for name in new_fields:
        del plain["optimizer"][name]
    assert build_config(plain) == config


def test_arguments_are_axes_of_a_search() -> None:
    space = parse_space(
        {
            "optimizer": {
                "name": "adamw",
                "b2": {"uniform": [0.9, 0.999]},
                "amsgrad": {"choice": [True, False]},
                "betas": {"choice": [[0.9, 0.99], [0.8, 0.99]]},
                "eps": {"loguniform": [1e-9, 1e-6]},
            }
        }
    )
    config = build_config(space.config_values({**space.first_probe, "optimizer.betas": [0.8, 0.99]}))
    assert config.optimizer.torch_arguments()["betas"] == (0.8, 0.9)
    assert config.optimizer.torch_arguments()["amsgrad"] is True
    with pytest.raises(ConfigError, match="optimizer: sgd has no argument amsgrad"):
        parse_space({"optimizer": {"name": "sgd", "amsgrad": {"grid": [True, False]}}})
