"""What works where only `pip install voxlane` was run, without any extra."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import nibabel
import numpy as np
import pytest
from packaging.requirements import Requirement

from tests.train.tiny_models import export_tiny_model

REPOSITORY = Path(__file__).parents[2]
BLOCK = """
import sys
from importlib.machinery import PathFinder

BLOCKED = {blocked!r}


class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in BLOCKED else super().find_spec(name, path, target)


sys.meta_path[:] = [Finder if finder is PathFinder else finder for finder in sys.meta_path]
"""


def base_distributions() -> set[str]:
    """Names of the packages that `pip install voxlane` installs."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    pending = [Requirement(line) for line in project["dependencies"]]
    names: set[str] = set()
    while pending:
        requirement = pending.pop()
        name = requirement.name.lower().replace("_", "-")
        if name in names or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        names.add(name)
        try:
            pending += [Requirement(line) for line in importlib.metadata.requires(name) or ()]
        except importlib.metadata.PackageNotFoundError:
            continue
    return names


def make_environment(folder: Path) -> dict[str, str]:
    """Return variables of processes in which all other installed packages cannot be imported; `folder` is for a file
    that blocks them."""
    allowed = base_distributions() | {"voxlane"}
    modules = importlib.metadata.packages_distributions()
    blocked = {
        module
        for module, names in modules.items()
        if not allowed & {name.lower().replace("_", "-") for name in names} and module not in sys.stdlib_module_names
    }
    assert {"lightning", "zarr", "numcodecs", "matplotlib", "monai", "safetensors", "onnx"} <= blocked
    assert not {"torch", "numpy", "nibabel", "scipy", "obstore", "pydantic"} & blocked
    (folder / "sitecustomize.py").write_text(BLOCK.format(blocked=blocked))
    path = os.pathsep.join([str(folder), str(REPOSITORY / "src")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return make_environment(tmp_path_factory.mktemp("base"))


def run(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, env=environment, timeout=500)


def test_predict_needs_only_the_exported_model(environment: dict[str, str], tmp_path: Path) -> None:
    export_tiny_model(tmp_path / "model.zip")
    (tmp_path / "scans").mkdir()
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        image = nibabel.Nifti1Image(rng.normal(50, 80, (18, 17, 16)).astype(np.int16), np.diag([1.1, 1, 1.7, 1]))
        nibabel.save(image, tmp_path / "scans" / f"{name}.nii.gz")
    words = [str(tmp_path / "model.zip"), str(tmp_path / "scans"), "-o", str(tmp_path / "masks"), "--no-progress"]
    done = run(environment, "-m", "voxlane.cli.main", "predict", *words)
    assert done.returncode == 0, done.stderr
    for name in ("a", "b"):
        mask = nibabel.load(tmp_path / "masks" / f"{name}.nii.gz")
        assert mask.shape == (18, 17, 16)
        assert set(np.unique(np.asarray(mask.dataobj))) <= {0, 1, 2}


def test_other_packages_are_out_of_reach(environment: dict[str, str]) -> None:
    done = run(environment, "-c", "import voxlane, torch, nibabel; import lightning")
    assert "No module named 'lightning'" in done.stderr


def test_missing_extra_is_named(environment: dict[str, str], tmp_path: Path) -> None:
    export_tiny_model(tmp_path / "model")
    words = ["export", str(tmp_path / "model"), str(tmp_path / "graph"), "--format", "onnx"]
    done = run(environment, "-m", "voxlane.cli.main", *words)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("Run: pip install 'voxlane[onnx]'")
