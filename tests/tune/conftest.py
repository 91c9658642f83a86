"""Fixtures of searches: a prepared dataset, and Ray clusters whose workers can import the tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.train import tiny_runs
from voxlane.cluster.ray.cluster import open_cluster

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="package")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_runs.prepare_balls(tmp_path_factory.mktemp("tune"))


@contextmanager
def start_ray(cpus: int) -> Iterator[None]:
    """Start a Ray with `cpus` logical CPUs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
        patch.setenv("OMP_WAIT_POLICY", "PASSIVE")
        with open_cluster(cpus=cpus):
            yield


@pytest.fixture(scope="module")
def ray_2_cpus() -> Iterator[None]:
    with start_ray(2):
        yield


@pytest.fixture
def ray_4_cpus() -> Iterator[None]:
    """Start a Ray for a single test, with twice the CPUs that its trials need.

    Nothing that an earlier test left behind on a shared Ray can then keep the trials' workers waiting.
    """
    with start_ray(4):
        yield
