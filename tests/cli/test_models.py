"""export and predict: runs become models that need neither run nor dataset, and models segment many scans."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest

from tests.conftest import Bucket
from tests.train import tiny_runs
from tests.train.tiny_models import DESCRIPTION, PLAN, export_tiny_model, make_member, make_weights
from voxlane.cli.main import main
from voxlane.testing import Emulator
from voxlane.train.exported_model import load_model, save_model
from voxlane.train.model_facts import ModelFacts


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`scans`, the runs `cv/fold_0` and `cv/fold_1` with scores, and no dataset anymore."""
    folder = tmp_path_factory.mktemp("models")
    tiny_runs.train_folds(folder / "cv", tiny_runs.prepare_balls(folder))
    words = [str(folder / "cv"), "space=prepared", "masks=false", "--no-progress"]
    assert main(["evaluate", *words]) == 0
    shutil.rmtree(folder / "prepared")
    for path in (folder / "scans").iterdir():
        if "label" in path.name or path.suffix == ".json":
            path.unlink()
    return folder


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Any:
    """Run a command in this process, and return its status, output and errors."""

    def run(*words: Any) -> tuple[int, str, str]:
        try:
            status = main([str(word) for word in words])
        except SystemExit as end:
            status = int(end.code or 0)
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return status, captured.out, captured.err

    return run


def read_masks(folder: Path) -> dict[str, np.ndarray]:
    return {str(path.relative_to(folder)): np.asarray(nibabel.load(path).dataobj) for path in folder.rglob("*.nii.gz")}


def test_exported_folds_predict_as_their_runs(root: Path, call: Any, tmp_path: Path) -> None:
    """All folds become one model, from which the same masks follow; the runs are not needed anymore."""
    runs = Path(shutil.copytree(root / "cv", tmp_path / "cv"))
    case = tiny_runs.case_ids()[0]
    scan = root / "scans" / f"{case}.nii.gz"
    assert call("predict", runs, scan, "-o", tmp_path / "by-run", "--no-progress")[0] == 0
    status, out, err = call(
        "export", runs, tmp_path / "m.zip", "--licence", "CC-BY-4.0", "--intended-use", "Tests: all"
    )
    assert (status, err) == (0, "")
    assert out.splitlines()[0] == "Balls: 2 networks (fold_0, fold_1)"
    shutil.rmtree(runs)
    status, out, err = call("predict", tmp_path / "m.zip", scan, "-o", tmp_path / "by-model", "--no-progress")
    assert status == 0, err
    assert out.startswith(f"file://{tmp_path}/by-model/{case}.nii.gz  ball ")
    masks = read_masks(tmp_path / "by-model")
    np.testing.assert_array_equal(masks[f"{case}.nii.gz"], read_masks(tmp_path / "by-run")[f"{case}.nii.gz"])


def test_model_says_where_it_comes_from(root: Path, call: Any, tmp_path: Path) -> None:
    facts = json.loads((root / "cv/fold_1/run.json").read_text())
    assert call("export", root / "cv", tmp_path / "m", "--name", "Two folds")[0] == 0
    model = load_model(str(tmp_path / "m"))
    member = model.facts.members[1]
    origin = member.provenance
    assert (model.facts.name, member.name, member.patch) == ("Two folds", "fold_1", (16, 16, 16))
    assert (origin.fold, origin.step, origin.epoch, origin.checkpoint) == (1, 2, 1, "last")
    assert origin.data_digest == facts["data"]["fingerprint"]
    assert model.facts.scores["cases"] == 6
    assert set(model.facts.scores["targets"]) == {"ball", "core"}
    card = (tmp_path / "m/README.md").read_text()
    assert "# Two folds" in card
    assert f"| Balls | {facts['data']['fingerprint']} |" in card
    assert "Over all 6 held-out cases" in card
    for file in ("model.json", "README.md"):
        assert str(root) not in (tmp_path / "m" / file).read_text()  # no path of the machine that exported it


def test_scores_of_other_weights_are_left_out(root: Path, call: Any, tmp_path: Path) -> None:
    run = Path(shutil.copytree(root / "cv", tmp_path / "cv"))
    summary_file = run / "evaluation/cross-validation/summary.json"
    summary = json.loads(summary_file.read_text())
    summary["checkpoints"][0]["digest"] = "0" * 64
    summary_file.write_text(json.dumps(summary))
    status, _, err = call("export", run, tmp_path / "other")
    assert status == 0
    assert "exported without scores: the evaluation scored other weights; run voxlane evaluate first" in err
    assert load_model(str(tmp_path / "other")).facts.scores == {}
    del summary["checkpoints"]  # as evaluations of earlier versions
    summary_file.write_text(json.dumps(summary))
    status, _, err = call("export", run, tmp_path / "unknown")
    assert status == 0
    assert "exported without scores: the evaluation does not say what it scored; run voxlane evaluate first" in err
    status, _, err = call("export", run / "fold_0", tmp_path / "single")
    assert "exported without scores; run voxlane evaluate first to have them" in err
    assert "note: the model card states nothing for --licence" in err


def test_models_and_runs_combine(root: Path, call: Any, tmp_path: Path) -> None:
    """Models of one labelling become one; networks of the same name get numbers."""
    assert call("export", root / "cv/fold_0", tmp_path / "a", "--licence", "MIT")[0] == 0
    status, out, _ = call("export", tmp_path / "a", root / "cv/fold_0", root / "cv/fold_1", tmp_path / "b")
    assert status == 0
    assert out.splitlines()[0] == "Balls: 3 networks (fold_0, fold_0-2, fold_1)"
    model = load_model(str(tmp_path / "b"))
    assert model.facts.licence == "MIT"
    first, second, _ = (model.load_weights(member) for member in model.facts.members)
    assert all((first[name] == second[name]).all() for name in first)


def test_export_and_predict_in_a_bucket(root: Path, gcs: Bucket, emulator: Emulator, call: Any) -> None:
    """A prefix of scans, one of them bad, and a model in a bucket: the others get masks, and the last line says so."""
    for path in sorted((root / "scans").iterdir())[:2]:
        gcs.store.put(f"scans/{path.name}", path.read_bytes())
    gcs.store.put("scans/bad.nii.gz", b"hello")
    endpoint = ("--endpoint", emulator.url)
    status, _, err = call("export", root / "cv/fold_0", "gs://bkt/model", *endpoint)
    assert status == 0, err
    status, out, err = call("predict", "gs://bkt/model", "gs://bkt/scans/", "-o", "gs://bkt/masks", *endpoint)
    assert status == 1
    assert [line.split("  ")[0] for line in out.splitlines()] == [
        f"gs://bkt/masks/{name}.nii.gz" for name in sorted(path.name[:-7] for path in root.glob("scans/*"))[:2]
    ]
    lines = [line for line in err.splitlines() if line.startswith("voxlane: ")]
    assert "bad.nii.gz" in lines[0]
    assert lines[1] == "voxlane: 1 of 3 scans could not be segmented: gs://bkt/scans/bad.nii.gz"
    assert err.splitlines()[0] == "gs://bkt/scans/: 3 scans"
    assert "; 3 of 3)" in out
    gcs.store.delete_one("scans/bad.nii.gz")
    gcs.store.delete_one(f"masks/{min(path.name for path in root.glob('scans/*'))}")
    status, out, err = call(
        "predict", "gs://bkt/model", "gs://bkt/scans", "-o", "gs://bkt/masks", "--skip-existing", *endpoint
    )
    assert status == 0, err
    assert "1 scan left out, whose masks exist" in err
    assert len(out.splitlines()) == 1
    status, out, err = call(
        "predict", "gs://bkt/model", "gs://bkt/scans", "-o", "gs://bkt/masks", "--skip-existing", *endpoint
    )
    assert (status, out) == (0, "")


def test_channels_of_a_folder(call: Any, tmp_path: Path) -> None:
    """A model of two channels takes nnU-Net's files; a case that lacks one is reported, and the other is segmented."""
    description = dataclasses.replace(DESCRIPTION, channels=("T1", "T2"))
    member = make_member("m", plan=dataclasses.replace(PLAN, normalisation=PLAN.normalisation * 2))
    facts = ModelFacts(name="two", description=description, members=(member,))
    save_model(facts, lambda member: make_weights(member, description), str(tmp_path / "model"))
    (tmp_path / "in").mkdir()
    rng = np.random.default_rng(0)
    for name in ("p1_0000", "p1_0001", "p2_0001"):
        image = nibabel.Nifti1Image(rng.normal(50, 80, (18, 17, 16)).astype(np.int16), np.diag([1, 1, 1.5, 1]))
        nibabel.save(image, tmp_path / "in" / f"{name}.nii.gz")
    status, _, err = call("predict", tmp_path / "model", tmp_path / "in", "-o", tmp_path / "out", "--no-progress")
    assert status == 1
    assert "p2_0000.nii.gz: no such object" in err
    assert err.splitlines()[-1] == f"voxlane: 1 of 2 scans could not be segmented: file://{tmp_path}/in/p2"
    assert set(read_masks(tmp_path / "out")) == {"p1.nii.gz"}


BAD = [
    ("export {run}", "voxlane export: missing MODEL"),
    ("export {run} {run}", "a model cannot be written into its source. Choose another folder"),
    ("export {tmp}/none {new}", "no run exists here. Train one: voxlane train DATA --run RUN"),
    ("export {run} {model}", "a model already exists here. Choose another name, or remove it first"),
    ("export {run} {other} {new}", "its channels or labels differ from those of"),
    ("export {run} {new} --opset 17", "--opset is for --format onnx. Leave it out"),
    ("export {bare} {new}", "the run has no checkpoint yet. Continue it: voxlane train DATA --run RUN --resume"),
    ("predict {newer} {scan} -o {new}", "exported by a newer version of voxlane (format 99; this version reads"),
    ("predict {tampered} {scan} -o {new}", "its SHA-256 differs from the one in model.json. Copy the model again"),
    ("predict {partial} {scan} -o {new}", "m.safetensors: the model lacks this file. Copy the whole model"),
    ("predict {model} {scan} -o {new} checkpoint=best", "checkpoint: an exported model has only the weights"),
    ("predict {model} {scans} -o {scans}", "the masks would be written among these scans. Choose another folder (-o)"),
    ("predict {model} {scans}/*.npy -o {new}", "no scan matches this pattern"),
]


@pytest.mark.parametrize(("line", "message"), BAD, ids=[line for line, _ in BAD])
def test_mistakes_are_one_line(line: str, message: str, root: Path, call: Any, tmp_path: Path) -> None:
    model = tmp_path / "model"
    export_tiny_model(model, make_member("m"))
    copies = {name: Path(shutil.copytree(model, tmp_path / name)) for name in ("newer", "tampered", "partial")}
    values = json.loads((model / "model.json").read_text())
    (copies["newer"] / "model.json").write_text(json.dumps(values | {"version": 99}))
    weights = bytearray((model / "weights/m.safetensors").read_bytes())
    weights[-2] ^= 4
    (copies["tampered"] / "weights/m.safetensors").write_bytes(weights)
    (copies["partial"] / "weights/m.safetensors").unlink()
    bare = Path(shutil.copytree(root / "cv/fold_0", tmp_path / "bare"))
    shutil.rmtree(bare / "checkpoints")
    labels = {"labels": {"background": 0, "tumour": 1, "core": 2}}
    export_tiny_model(tmp_path / "other", make_member("m"), description=dataclasses.replace(DESCRIPTION, **labels))
    names = {**copies, "run": root / "cv/fold_0", "model": model, "bare": bare, "other": tmp_path / "other"}
    names |= {"scans": root / "scans", "scan": root / "scans" / f"{tiny_runs.case_ids()[0]}.nii.gz"}
    names |= {"new": tmp_path / "new", "tmp": tmp_path}
    status, out, err = call(*(word.format(**names) for word in line.split()))
    assert status == (2 if "missing" in message else 1)
    errors = [line for line in err.splitlines() if not line.startswith("note: ")]
    assert message in errors[0]
    assert len(errors) == 1
    assert out == ""
    assert not list((tmp_path / "new").glob("*"))
