"""prepare, train, evaluate, predict and report: arguments, output and exit statuses."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest

from tests.conftest import Bucket
from tests.train import tiny_runs
from voxlane.cli.main import main
from voxlane.store import Store
from voxlane.testing import Emulator

COMMANDS = ("prepare", "train", "evaluate", "predict", "report")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`scans`, the dataset `prepared` from them, and the runs `cv/fold_0` and `cv/fold_1`."""
    folder = tmp_path_factory.mktemp("cli")
    tiny_runs.train_folds(folder / "cv", tiny_runs.prepare_balls(folder))
    return folder


@pytest.fixture
def scan(root: Path) -> str:
    return str(root / "scans" / f"{tiny_runs.case_ids()[0]}.nii.gz")


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


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command: str, call: Any) -> None:
    status, out, _ = call(command, "--help")
    assert status == 0
    assert f"Usage: voxlane {command}" in out
    assert "--endpoint" in out
    if command != "report":
        assert "--fields" in out
        assert "Examples:" in out


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("prepare", ["bad_cases=fail", "folds=5", "recipe=auto"]),
        ("train", ["fold=0", "optimizer.lr=0.01", "augment.strength=1.0", "patch=null", "loader.disk_cache=null"]),
        ("evaluate", ["predict.mirror=null", "space=scan", "surface_tolerance_mm=1.0"]),
        ("predict", ["mirror=null", "overlap=0.5", "checkpoint=last"]),
    ],
)
def test_fields(command: str, shown: list[str], call: Any) -> None:
    status, out, _ = call(command, "--fields")
    assert status == 0
    for words in shown:
        assert f"  {words}" in out
    assert max(map(len, out.splitlines())) <= 110


@pytest.mark.parametrize("command", COMMANDS)
def test_missing_arguments_are_usage_errors(command: str, call: Any) -> None:
    status, _, err = call(command)
    assert status == 2
    assert f"voxlane {command}: missing " in err
    assert "field=value" not in err.splitlines()[-1]


def test_all_commands_in_a_bucket(root: Path, gcs: Bucket, emulator: Emulator, call: Any, tmp_path: Path) -> None:
    """Prepare, train, evaluate, report and predict, reached by --endpoint and by a file's `store` part in turn."""
    for path in (root / "scans").iterdir():
        gcs.store.put(f"scans/{path.name}", path.read_bytes())
    prepare_config = tmp_path / "prepare.json"
    plan = {"patch": [16, 16, 16], "batch": 2, "network": tiny_runs.NETWORK}
    prepare_config.write_text(json.dumps({"folds": 2, "workers": 1, "plan": plan, "store": {"endpoint": emulator.url}}))
    words = ("--config", prepare_config, "--no-progress")
    status, out, err = call("prepare", "gs://bkt/scans/list.json", "gs://bkt/data", *words)
    assert status == 0, err
    assert "Balls: 6 cases in gs://bkt/data" in out
    assert "patches of 16 x 16 x 16, batch 2" in out
    status, out, err = call("prepare", "gs://bkt/scans/list.json", *words, "gs://bkt/data")
    assert "nothing had to be done" in out
    small = tmp_path / "train.toml"
    small.write_text(
        f'[store]\nendpoint = "{emulator.url}"\n[optimizer]\nlr = 0.02\n[augment]\npreset = "none"\n'
        "[validation]\nevery_epochs = 1\n"
    )
    endpoint = ("--endpoint", emulator.url, "--no-progress")
    status, out, err = call(
        "train", "epochs=3", "gs://bkt/data", "--config", small, "epochs=1", "--run", "gs://bkt/run", "--no-progress",
        "steps_per_epoch=2", "batch=2", "optimizer.name=adamw",
    )  # fmt: skip
    assert status == 0, err
    assert "2 steps, 4 patches" in out
    config = json.loads(bytes(gcs.store.get("run/run.json")))["config"]
    assert (config["epochs"], config["optimizer"]["lr"], config["optimizer"]["name"]) == (1, 0.02, "adamw")
    status, out, err = call("evaluate", "gs://bkt/run", "space=prepared", *endpoint, "predict.overlap=0")
    assert status == 0, err
    assert "gs://bkt/run/evaluation/validation" in out
    assert "next: voxlane report gs://bkt/run" in out
    yaml = tmp_path / "store.yaml"
    yaml.write_text(f"overlap: 0.25\nstore:\n  endpoint: {emulator.url}\n")
    status, out, err = call("report", "gs://bkt/run", "--config", yaml)
    assert (status, out.strip()) == (0, "gs://bkt/run/report.html"), err
    name = tiny_runs.case_ids()[0]
    status, out, err = call(
        "predict", "gs://bkt/run", "-o", "gs://bkt/masks", "--config", yaml, f"gs://bkt/scans/{name}.nii.gz",
        "mirror=true", "--no-progress",
    )  # fmt: skip
    assert status == 0, err
    assert out.startswith(f"gs://bkt/masks/{name}.nii.gz  ball ")
    assert gcs.store.exists(f"masks/{name}.nii.gz")


def test_arrays_from_pairs_to_masks(call: Any, tmp_path: Path) -> None:
    for seed, name in enumerate(tiny_runs.case_ids(4)):
        image, label = tiny_runs.make_case(np.random.default_rng(seed))
        for folder, ending, array in (("images", "x", image.astype(np.float32)), ("labels", "y", label)):
            (tmp_path / "raw" / folder).mkdir(parents=True, exist_ok=True)
            np.save(tmp_path / "raw" / folder / f"{name}_{ending}.npy", array[None])
    plan = [f"plan.{key}={json.dumps(value)}" for key, value in tiny_runs.PLAN.items()]
    labels = f"description.labels={json.dumps(tiny_runs.LABELS)}"
    settings = ["description.channels=[CT]", labels, f"folds={tiny_runs.FOLDS}", "workers=1", *plan]
    status, _, errors = call("prepare", tmp_path / "raw", tmp_path / "one-mm", "--no-progress", *settings)
    assert status == 0, errors
    assert "note: .npy files store no spacing: 1 x 1 x 1 mm is assumed" in errors
    data, run = tmp_path / "prepared", tmp_path / "run"
    spacing = "description.spacing=[1.5,1,1]"
    status, _, errors = call("prepare", tmp_path / "raw", data, "--no-progress", *settings, spacing)
    assert (status, errors) == (0, "")
    config = tmp_path / "config.json"
    config.write_text(json.dumps(tiny_runs.CONFIG))
    assert call("train", data, "--run", run, "--config", config, "--no-progress")[0] == 0
    status, out, errors = call("evaluate", run, "--no-progress")
    assert status == 0, errors
    assert "ball" in out
    scan = tmp_path / "raw" / "images" / f"{tiny_runs.case_ids(4)[0]}_x.npy"
    status, out, errors = call("predict", run, scan, "-o", tmp_path / "masks", "--no-progress")
    assert status == 0, errors
    mask = nibabel.load(tmp_path / "masks" / f"{scan.stem}.nii.gz")
    assert mask.shape == np.load(scan).shape[:0:-1]  # NIfTI's axes are x, y, z
    assert mask.get_data_dtype() == np.uint8
    np.testing.assert_array_equal(mask.affine, np.diag([1, 1, 1.5, 1]))


def test_cross_validation_and_ensemble(root: Path, scan: str, call: Any, tmp_path: Path) -> None:
    status, out, err = call("evaluate", root / "cv", "-o", tmp_path, "masks=false", "--no-progress")
    assert status == 0, err
    assert out.splitlines()[0].split() == ["Dice", "95%", "CI", "±", "std", "median", "HD95", "mm", "surface", "cases"]
    assert "next:" not in out  # there is no run to report on
    status, out, err = call("predict", root / "cv", scan, "-o", tmp_path / "masks")
    assert status == 0, err
    assert Path(tmp_path / "masks" / f"{tiny_runs.case_ids()[0]}.nii.gz").exists()


def test_folds(root: Path, call: Any) -> None:
    for folds in ("0,x", "9", "0,0", "", "-1"):
        status, _, err = call("train", root / "prepared", "--run", root / "r", f"--folds={folds}")
        assert status == 1
        assert f"--folds {folds}" in err
    assert not (root / "r").exists()


def test_one_bad_scan_does_not_stop_the_others(root: Path, scan: str, call: Any, tmp_path: Path) -> None:
    (tmp_path / "text.nii.gz").write_text("hello")
    words = [tmp_path / "none.nii.gz", scan, tmp_path / "text.nii.gz", "-o", tmp_path / "out"]
    status, out, err = call("predict", root / "cv", *words, "--no-progress")
    assert status == 1
    assert [path.name for path in (tmp_path / "out").iterdir()] == [f"{tiny_runs.case_ids()[0]}.nii.gz"]
    assert len(out.splitlines()) == 1
    lines = err.splitlines()
    assert "none.nii.gz" in lines[0]
    assert "not a NIfTI file" in lines[1]
    assert lines[2] == f"voxlane: 2 of 3 scans could not be segmented: {words[0]}, {words[2]}"


BAD = [
    ("train {data} --run {run}", "a run already exists here. Continue it with --resume, or choose another --run"),
    ("train {tmp}/none --run {new}", "there is no prepared dataset at this URI. Run: voxlane prepare"),
    ("train {scans} --run {new}", "there is no prepared dataset at this URI"),
    ("train {data} --run {new} epoch=3", "epoch: no such field. Did you mean epochs?"),
    ("train {data} --run {new} optimizer.rate=3", "optimizer.rate: no such field"),
    ("train {data} --run {new} optimizer.learning_rate=3", "no such field. Did you mean optimizer.lr?"),
    ("train {data} --run {new} epochs=many", "epochs: expected an integer, got 'many'"),
    ("train {data} --run {new} epochs=0", "epochs: expected a value greater than or equal to 1, got 0"),
    ("train {data} --run {new} max_minutes=.inf", "max_minutes: expected a finite number"),
    ("train {data} --run {new} patch=[16,16]", "patch: expected 3 values, got 2"),
    ("train {data} --run {new} patch=[17,16,16]", "patch: 17 along z is not a multiple of 2"),
    ("train {data} --run {new} fold=7", "fold: expected 0 to 1, got 7"),
    ("train {data} --run {new} fold=2020-13-45", "the value is not YAML"),
    ("train {data} --run {new} epochs=[1", "the value is not YAML"),
    ("train {data} --run {new} epochs", "unexpected argument 'epochs'"),
    ("train {data} other --run {new}", "unexpected argument 'other'"),
    ("train epochs=1 --run {new}", "missing DATA"),
    ("train {data} --run {new} store=3", "store: expected fields, got 3"),
    ("train {data} --run {new} store.endpont=x", "store.endpont: no such field. Did you mean store.endpoint?"),
    ("train {data} --run {new} --config {tmp}/none.yaml", "none.yaml: cannot read the config file"),
    ("train {data} --run {new} --config {tmp}/broken.yaml", "broken.yaml: not YAML or JSON, line 2"),
    ("train {data} --run {new} --config {tmp}/list.yaml", "list.yaml: expected named fields in the config file"),
    ("train {data} --run {new} --config {tmp}/broken.toml", "broken.toml: not TOML"),
    ("train {data} --run {new} --resume", "no run exists here"),
    ("train {data} --run gs:/bkt/x", "the URI has one slash after its scheme. Write gs://bkt/x"),
    ("evaluate {tmp}/none", "no run exists here. Train one: voxlane train DATA --run RUN"),
    ("evaluate {data}", "no run exists here"),
    ("evaluate {run} {run}", "hold out the same cases"),
    ("evaluate {run} mirror=true", "mirror: no such field. Did you mean predict.mirror?"),
    ("evaluate {run} space=world", "space: expected 'scan' or 'prepared', got 'world'"),
    ("evaluate masks=false", "missing RUN"),
    ("evaluate {run} -o /proc/x", "cannot write here"),
    ("predict {run} {tmp}/none.nii.gz -o {new}", "no such object"),
    ("predict {run} mirror=true -o {new}", "missing SCAN"),
    ("predict {run} {scan} mirror=maybe -o {new}", "mirror: expected true or false, got 'maybe'"),
    ("predict {run} {scan},{scan} -o {new}", "the scan has 2 channels, but the model was trained on 1 (CT)"),
    ("predict {run} {scan}, -o {new}", "does not name a scan"),
    ("predict {run} {scan} {scan} -o {new}", "would both write"),
    ("predict {run} {scan} -o {scans}", "a mask would overwrite this scan. Choose another folder (-o)"),
    ("predict {run} {scan} -o /proc/x", "cannot write here"),
    ("predict {tmp}/none {scan} -o {new}", "no run exists here"),
    ("report {tmp}/none", "no run exists here"),
    ("report {run} --config {tmp}/none", "cannot read the config file"),
    ("prepare {tmp}/none {new}", "no such folder"),
    ("prepare {scans} {new} fold=3", "fold: no such field. Did you mean folds?"),
    ("prepare {scans} {new} junk", "unexpected argument 'junk'"),
    ("prepare {scans} folds=3", "missing DST"),
]


@pytest.mark.parametrize(("line", "message"), BAD, ids=[line for line, _ in BAD])
def test_mistakes_are_one_line(line: str, message: str, root: Path, scan: str, call: Any, tmp_path: Path) -> None:
    (tmp_path / "broken.yaml").write_text("a: [1,\nb: 2")
    (tmp_path / "list.yaml").write_text("- 1")
    (tmp_path / "broken.toml").write_text("a = ")
    before = Path(scan).read_bytes()
    names = {"data": root / "prepared", "run": root / "cv/fold_0", "scans": root / "scans", "new": tmp_path / "new"}
    words = [word.format(**names, scan=scan, tmp=tmp_path) for word in line.split()]
    status, out, err = call(*words, *(["--no-progress"] if words[0] != "report" else []))
    is_usage_error = message.startswith(("missing", "unexpected"))
    assert status == (2 if is_usage_error else 1)
    assert message in err
    assert err.startswith(f"voxlane {words[0]}: " if is_usage_error else "voxlane: ")
    assert len(err.splitlines()) == 1
    assert out == ""
    assert Path(scan).read_bytes() == before
    assert not list((tmp_path / "new").glob("*"))


def test_bad_numbers_and_keys_in_files(root: Path, call: Any, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    for text, message in (
        ("epochs: {a: 1}", "epochs: "),
        ("1: 2", "1: "),
        ("optimizer: 3", "optimizer: "),
        ("store: [1]", "store: expected fields"),
        ("store: {1: 2}", "store.1: no such field"),
        ("store: {retry: {deadline: 3}}", "retry."),
        ("fold: 2020-13-45", "not YAML or JSON"),
    ):
        file.write_text(text)
        status, _, err = call("train", root / "prepared", "--run", tmp_path / "r", "--config", file)
        assert status == 1
        assert message in err
    for text in ("", "store:", "store: {}"):
        file.write_text(text)
        status, _, err = call("train", tmp_path / "none", "--run", tmp_path / "r", "--config", file)
        assert "there is no prepared dataset at this URI" in err


def test_as_a_process(root: Path, scan: str, tmp_path: Path) -> None:
    """The installed command writes a mask and prints no warnings."""
    command = [str(Path(sys.executable).parent / "voxlane"), "predict", str(root / "cv/fold_0"), scan]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "-o", str(tmp_path / "out")], capture_output=True, text=True, timeout=180, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.split("  ")[0].removeprefix("file://")).exists()
    assert "Warning" not in done.stderr


def test_run_without_a_checkpoint(root: Path, scan: str, call: Any, tmp_path: Path) -> None:
    run = Path(shutil.copytree(root / "cv/fold_0", tmp_path / "run"))
    shutil.rmtree(run / "checkpoints")
    for words in (("evaluate", run), ("predict", run, scan, "-o", tmp_path / "out")):
        status, _, err = call(*words, "--no-progress")
        assert status == 1
        assert "the run has no checkpoint yet" in err
    assert Store(str(run)).exists(f"{str(run).lstrip('/')}/run.json")


def test_config_in_a_bucket(tmp_path: Path) -> None:
    from voxlane.cli.config_options import read_config

    (tmp_path / "best.yaml").write_text("optimizer: {lr: 0.5}\n")
    assert (
        read_config(f"file://{tmp_path}/best.yaml")
        == read_config(f"{tmp_path}/best.yaml")
        == {"optimizer": {"lr": 0.5}}
    )
