"""One SLURM cluster for the tests that need one; those run in `make test-slurm`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.slurm import rig
from tests.train import tiny_runs


@pytest.fixture(scope="session")
def slurm_allowed() -> None:
    """Skips a test that starts a cluster of its own where none is wanted."""
    if os.environ.get("VOXLANE_SLURM") != "1":
        pytest.skip("needs a SLURM of several nodes: `make test-slurm` starts one")
    if reason := rig.missing():
        pytest.fail(reason)


@pytest.fixture(scope="session")
def slurm(slurm_allowed: None) -> Iterator[rig.Rig]:
    """A cluster of four nodes."""
    with rig.cluster(nodes=4, cpus=4) as running:
        yield running


@pytest.fixture(scope="session")
def data(slurm: rig.Rig) -> str:
    """A tiny prepared dataset on the shared disk."""
    return tiny_runs.prepare_balls(slurm.folder / "data")


@pytest.fixture
def shared(slurm: rig.Rig, request: pytest.FixtureRequest) -> Path:
    """A folder on the shared disk for a test; no job is left when it ends."""
    folder = slurm.folder / "tests" / request.node.name.replace("[", "-").replace("]", "")
    folder.mkdir(parents=True)
    return folder


@pytest.fixture(autouse=True)
def _clean(request: pytest.FixtureRequest) -> Iterator[None]:
    """Cancel what a failed test has left, so that the next one has the nodes."""
    yield
    if "slurm" in request.fixturenames and os.environ.get("VOXLANE_SLURM") == "1":
        running: rig.Rig = request.getfixturevalue("slurm")
        running.run("scancel", "--me")
        rig.until(lambda: not running.run("squeue", "-h"), 120, "the queue to be empty")
