"""One walk through everything: a dataset, a run and a model that move, as a user of the command line moves them."""

from __future__ import annotations

import html
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch

from tests.cli.test_base_install import make_environment
from tests.conftest import Bucket
from tests.train import tiny_runs
from voxlane.cli.main import main
from voxlane.testing import Emulator
from voxlane.train.predictor import compute_digest, load_weights
from voxlane.train.run import Run

CASES = tiny_runs.case_ids()
EXTERNAL = ("site2_a", "site2_b")
RUN, DATA = "gs://bkt/2026/runs/a", "gs://bkt/2026/balls"
"""Where run and dataset end."""


@pytest.fixture
def voxlane(
    emulator: Emulator, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    """Run a command in `tmp_path` against the emulator; return its output."""
    monkeypatch.chdir(tmp_path)

    def run(line: str, *more: str) -> str:
        words = [*line.split(), *more, "--endpoint", emulator.url]
        monkeypatch.setattr(sys, "argv", ["voxlane", *words])
        assert main(words) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    return run


def write_external(folder: Path) -> None:
    """Write `images` and `labels` of scans from another site."""
    tiny_runs.write_cases(folder / "all", list(EXTERNAL), seed=7)
    for kind, ending in (("images", ".nii.gz"), ("labels", "-label.nii.gz")):
        (folder / kind).mkdir()
        for name in EXTERNAL:
            (folder / "all" / f"{name}{ending}").rename(folder / kind / f"{name}.nii.gz")


def read_text(page: bytes) -> str:
    """Return the words of a page, without pictures, styles and tags."""
    text = re.sub(r"(?s)<(script|style|svg)[^>]*>.*?</\1>", "", page.decode())
    return html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", "", text)))


def read_masks(folder: Path) -> dict[str, np.ndarray]:
    return {path.name: np.asarray(nibabel.load(path).dataobj) for path in folder.glob("*.nii.gz")}


def test_datasets_runs_and_models_move(gcs: Bucket, voxlane: Callable[..., str], tmp_path: Path) -> None:
    digest = train_in_two_places(gcs, voxlane, tmp_path)
    weights = continue_after_the_move(gcs, voxlane)
    export_and_predict(gcs, voxlane, tmp_path, weights, digest)
    read_pages(gcs, voxlane, tmp_path, weights, digest)
    start_from_the_model(voxlane, weights)


def train_in_two_places(gcs: Bucket, voxlane: Callable[..., str], tmp_path: Path) -> str:
    """Prepare here, copy to the bucket, and train in both places: to the same bits. Return the dataset's digest."""
    tiny_runs.write_cases(tmp_path / "scans", CASES)
    write_external(tmp_path / "site2")
    prepare = {"folds": tiny_runs.FOLDS, "workers": 1, "plan": tiny_runs.PLAN}
    Path("prepare.json").write_text(json.dumps(prepare))
    Path("train.json").write_text(json.dumps(tiny_runs.CONFIG))
    voxlane("prepare scans/list.json prepared --config prepare.json --no-progress")
    copied = voxlane("cp prepared gs://bkt/balls")
    digest = re.search(r"digest ([0-9a-f]{64})", copied)[1]  # type: ignore[index]
    assert f"all sizes agree; digest {digest}" in voxlane("check prepared")
    assert f"every byte compared; digest {digest}" in voxlane("check gs://bkt/balls --bytes")
    voxlane("train gs://bkt/balls --run gs://bkt/a --config train.json --no-progress")
    voxlane("train prepared --run here --config train.json --no-progress")
    assert_equal_weights(Run("gs://bkt/a", gcs.config), Run("here"))
    return digest


def continue_after_the_move(gcs: Bucket, voxlane: Callable[..., str]) -> str:
    """Move run and dataset apart, and continue: to the bits of the run that stayed. Page and table name the weights
    that were scored, until they are scored again. Return the digest of the weights."""
    voxlane("evaluate gs://bkt/a --no-progress masks=false")
    earlier = read_checkpoint(gcs, "gs://bkt/a", "validation")
    voxlane(f"cp gs://bkt/a {RUN}")
    voxlane(f"cp gs://bkt/balls {DATA}")
    for prefix in ("a/", "balls/"):
        gcs.store.delete_prefix(prefix)
    voxlane(f"train --resume --run {RUN} --data {DATA} epochs=2 --no-progress")
    voxlane("train --resume --run here epochs=2 --no-progress")
    weights = assert_equal_weights(Run(RUN, gcs.config), Run("here"))
    voxlane(f"report {RUN}")
    page = read_text(bytes(gcs.store.get("2026/runs/a/report.html")))
    assert f"These scores are of step 2; the run has since trained to step 4. Run voxlane evaluate {RUN} again." in page
    assert f"Scored: last weights, of step 2 (digest {earlier['digest'][:12]})" in page
    table = voxlane(f"evaluate {RUN} --no-progress masks=false")
    assert f"scored: last weights of step 4 of {RUN} (digest {weights[:12]})" in table
    scored = read_checkpoint(gcs, RUN, "validation")
    assert scored == {"run_uri": RUN, "name": "last", "step": 4, "digest": weights}
    assert scored["digest"] != earlier["digest"]
    voxlane("evaluate here --no-progress masks=false")
    voxlane(f"compare {RUN} here -o compared")
    compared = json.loads(Path("compared/compare.json").read_text())
    assert {row["dice"]["difference"] for row in compared["targets"].values()} == {0}
    assert not [note for note in compared["notes"] if "step" in note]
    return weights


def export_and_predict(gcs: Bucket, voxlane: Callable[..., str], tmp_path: Path, weights: str, digest: str) -> None:
    """Score scans of another site with the run, and with its exported model where only voxlane is installed."""
    voxlane(f"evaluate {RUN} --images site2/images --labels site2/labels --no-progress -o .")
    voxlane(f"evaluate {RUN} --images site2/images --labels site2/labels --no-progress masks=false --name site2")
    assert read_checkpoint(gcs, RUN, "site2")["digest"] == weights
    voxlane(f"export {RUN} model --licence CC-BY-4.0")
    model = json.loads(Path("model/model.json").read_text())
    origin = model["members"][0]["provenance"]
    assert (origin["step"], origin["digest"], origin["data_digest"]) == (4, weights, digest)
    assert f"| 4 | {weights[:12]} |" in Path("model/README.md").read_text()
    for path in Path("model").rglob("*.*"):
        assert not any(text in path.read_bytes() for text in (b"gs://", b"http://", str(tmp_path).encode()))
    predict_in_base_install(tmp_path)
    own, exported = read_masks(Path("evaluation/external-site2/masks")), read_masks(Path("masks"))
    assert set(exported) == {f"{name}.nii.gz" for name in EXTERNAL}
    for name, mask in exported.items():
        np.testing.assert_array_equal(mask, own[name])
    printed = json.loads(voxlane("score masks site2/labels --json", "labels={ball: 1, core: 2}"))
    external = json.loads(bytes(gcs.store.get("2026/runs/a/evaluation/site2/summary.json")))
    assert printed["targets"] == external["targets"]


def read_pages(gcs: Bucket, voxlane: Callable[..., str], tmp_path: Path, weights: str, digest: str) -> None:
    """The page has all of it. One more epoch makes the scores of the other site stale too."""
    voxlane(f"report {RUN}")
    page = read_text(bytes(gcs.store.get("2026/runs/a/report.html")))
    assert "These scores are of step" not in page
    assert page.count(f"Scored: last weights, of step 4 (digest {weights[:12]})") == 2
    assert f"Prepareddata{DATA}Digest{digest}" in page.replace(" ", "")
    assert "balanced, fold 0 of 2" in page
    assert f"voxlane train {DATA} --run gs://bkt/a --config train.json" in page
    assert "epochs=2" in page
    voxlane(f"train --resume --run {RUN} epochs=3 --no-progress")
    voxlane(f"report {RUN}")
    page = read_text(bytes(gcs.store.get("2026/runs/a/report.html")))
    again = f"--images file://{tmp_path}/site2/images --labels file://{tmp_path}/site2/labels --name site2"
    assert f"Run voxlane evaluate {RUN} {again} again." in page
    voxlane(f"compare {RUN} here -o compared")
    notes = json.loads(Path("compared/compare.json").read_text())["notes"]
    assert "A's scores are of step 4, and the run has weights of step 6 now: evaluate it again" in notes


def start_from_the_model(voxlane: Callable[..., str], weights: str) -> None:
    """Start another run from the model, which is not needed after that."""
    voxlane(f"train {DATA} --run tuned --config train.json --no-progress init_from=model fold=1")
    start = json.loads(Path("tuned/run.json").read_text())["init"]
    assert (start["digest"], start["parameters_taken"]) == (weights, start["parameters"])
    Path("model").rename("elsewhere")
    voxlane("train --resume --run tuned --no-progress epochs=2")
    voxlane("report tuned")
    assert f"Digest{weights}" in read_text(Path("tuned/report.html").read_bytes())


def assert_equal_weights(first: Run, second: Run) -> str:
    """Return the digest of the last weights of two runs, which are equal."""
    weights, others = load_weights(first, "last"), load_weights(second, "last")
    assert weights.keys() == others.keys()
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    return compute_digest(weights)


def read_checkpoint(gcs: Bucket, run_uri: str, evaluation: str) -> dict[str, Any]:
    """Return the checkpoint that an evaluation of a run names."""
    summary = bytes(gcs.store.get(f"{run_uri.removeprefix('gs://bkt/')}/evaluation/{evaluation}/summary.json"))
    (checkpoint,) = json.loads(summary)["checkpoints"]
    return dict(checkpoint)


def predict_in_base_install(folder: Path) -> None:
    """Write `masks` from `model` where only the packages of the base install can be imported."""
    (folder / "base").mkdir()
    words = ["predict", "model", "site2/images", "-o", "masks", "--no-progress"]
    done = subprocess.run(
        [sys.executable, "-m", "voxlane.cli.main", *words],
        capture_output=True,
        text=True,
        env=make_environment(folder / "base"),
        cwd=folder,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
