"""Fixtures with a tiny prepared dataset."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.volume import sample_data
from voxlane.volume.prepared_dataset import Prepared


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of six prepared CT cases with labels 1 and 2 and a patch of 16 voxels. Do not change it."""
    root = tmp_path_factory.mktemp("tiny")
    sample_data.prepare_dataset(sample_data.write_folder(root / "scans", sample_data.make_kits19()), str(root / "data"))
    return root / "data"


@pytest.fixture(scope="session")
def tiny(tiny_folder: Path) -> Prepared:
    return Prepared.load(str(tiny_folder))
