"""Fixtures: one Ray cluster of three nodes for all tests, and a run on one process to compare with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.test_fit import fold_with_cases
from tests.volume import sample_data
from voxlane.train.fit import train
from voxlane.volume.prepared_dataset import Prepared

NETWORK = {"features": [4, 8], "strides": [[1, 1, 1], [2, 2, 2]], "kernels": [[3, 3, 3], [3, 3, 3]]}
TINY: dict[str, Any] = {
    "epochs": 4,
    "steps_per_epoch": 12,
    "batch": 6,
    "network": NETWORK,
    "validation": {"every_epochs": 2, "images": 0},
    # Not Adam: it makes full steps out of gradients that are zero except for rounding.
    "optimizer": {"name": "sgd", "lr": 0.01},
    "loader": {"in_flight": 3},
}
NODE = {"num_cpus": 2, "object_store_memory": 100 << 20}


@pytest.fixture(scope="session")
def ray_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Three nodes of two CPUs each, on this machine."""
    from voxlane.cluster.ray.cluster import set_defaults

    set_defaults()
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    for _ in range(2):
        cluster.add_node(**NODE)
    cluster.wait_for_nodes()
    yield cluster
    cluster.shutdown()


@pytest.fixture(scope="session")
def ray_data(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """A prepared dataset, and the config to train on it."""
    root = tmp_path_factory.mktemp("launch")
    sample_data.prepare_dataset(sample_data.write_folder(root / "scans", sample_data.make_kits19()), str(root / "data"))
    fold = fold_with_cases(Prepared.load(str(root / "data")))
    return str(root / "data"), {**TINY, "fold": fold}


@pytest.fixture(scope="session")
def straight(ray_data: tuple[str, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run on one process, without a pause."""
    data, config_values = ray_data
    run = tmp_path_factory.mktemp("straight") / "run"
    train(data, str(run), config_values, progress=False)
    return run


def history(run: Path | str) -> list[dict[str, Any]]:
    try:
        entries: list[dict[str, Any]] = json.loads((Path(run) / "history.json").read_text())
    except FileNotFoundError:
        return []
    return entries


def attempts(run: Path | str) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = json.loads((Path(run) / "workers.json").read_text())
    return entries


def assert_same_run(run: Path | str, expected: Path | str) -> None:
    """Check that every patch came once, in the same step, and that weights are equal except for rounding."""
    entries, expected_entries = history(run), history(expected)
    for name in ("epoch", "step", "patches", "order"):
        assert [entry[name] for entry in entries] == [entry[name] for entry in expected_entries], name
    for a, b in zip(entries, expected_entries, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-4)
    a, b = (
        torch.load(f"{folder}/checkpoints/last.ckpt", weights_only=True)["state_dict"] for folder in (run, expected)
    )
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-3, atol=1e-4, msg=lambda text, n=name: f"{n}: {text}")
