"""A tiny prepared dataset."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.volume import made
from voxlane.volume.prepared import Prepared


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six prepared CT cases, with labels 1 and 2, in patches of 16 voxels; not to be changed."""
    root = tmp_path_factory.mktemp("tiny")
    made.prepared(made.save(root / "scans", made.kits()), str(root / "data"))
    return root / "data"


@pytest.fixture(scope="session")
def tiny(tiny_folder: Path) -> Prepared:
    return Prepared.load(str(tiny_folder))
