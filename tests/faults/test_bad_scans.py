"""The corpus of bad scans: in this process, and with `make test-faults` through the real commands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.faults import bad_scans
from tests.faults.bad_scans import LABELS, SCANS, SOURCES, BadScan, BadSource
from tests.volume import sample_data
from voxlane.errors import NotFoundError, ScanError, VoxlaneError
from voxlane.volume.case_checks import CaseProblem
from voxlane.volume.dataset_check import check_case, collect_findings, make_task
from voxlane.volume.dataset_discovery import discover
from voxlane.volume.scan import read_scan, write_mask
from voxlane.volume.scan_reader import read_channels

ROOT = Path(__file__).parents[2]
_DEADLINE_S = 120.0
"""Seconds after which a command counts as hanging, on a busy machine."""
SMALL_SCANS = [scan for scan in SCANS if not scan.is_large]


def write_case(folder: Path, entry: BadScan, num_good: int) -> str:
    """Write a dataset with a bad scan or label, and return its source. A scan that is only suspicious gets a label on
    its own grid."""
    path = entry.build(folder)
    if entry in LABELS:
        return bad_scans.write_dataset(folder, label=path, num_good=num_good)
    src = bad_scans.write_dataset(folder, image=path, num_good=num_good)
    if entry.severity == "warning" or "30 mm" in entry.name:
        geometry = read_scan(str(folder / path)).geometry
        label = np.zeros(geometry.canonical_shape, np.uint8)
        label[1:3, 5:12, 5:12] = 1
        write_mask(str(folder / "0-label.nii.gz"), label, geometry)
    return src


def check(src: str, overrides: dict[str, Any] | None = None) -> list[CaseProblem]:
    """Return the findings about a dataset, made in this process."""
    source = discover(src, overrides=overrides or {})
    results = {case.id: check_case(make_task(source, case, None)) for case in source.cases}
    return collect_findings(source, results).problems


def name_of(entry: BadScan | BadSource) -> str:
    return entry.name.replace(" ", "-")


def test_corpus_is_large_enough() -> None:
    assert len(SCANS) + len(LABELS) + len(SOURCES) >= 80
    assert sum(not scan.only_prepare for scan in SCANS) >= 60
    names = [entry.name for entry in (*SCANS, *LABELS, *SOURCES)]
    assert len(set(names)) == len(names)


# -- in this process ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", [*SMALL_SCANS, *LABELS], ids=name_of)
def test_prepare_checks(tmp_path: Path, entry: BadScan) -> None:
    src = write_case(tmp_path, entry, num_good=1)
    problems = [problem for problem in check(str(tmp_path / src)) if problem.case == "bad"]
    severities = {problem.severity for problem in problems}
    if "30 mm" not in entry.name:  # an error only on the plan's grid
        assert ("error" in severities) == (entry.severity == "error"), problems
        assert any(re.search(entry.text, problem.detail, re.IGNORECASE) for problem in problems), problems
    assert not any(problem.transient for problem in problems)


@pytest.mark.parametrize("entry", [scan for scan in SMALL_SCANS if not scan.only_prepare], ids=name_of)
def test_predict_checks(tmp_path: Path, entry: BadScan) -> None:
    path = str(tmp_path / entry.build(tmp_path))
    if entry.name in ("two channels", "spacing of 30 mm"):
        return  # known only with the model
    if entry.severity == "error":
        with pytest.raises((ScanError, NotFoundError)) as caught:
            read_channels([path])
        assert re.search(entry.text, str(caught.value), re.IGNORECASE)
    else:
        remarks = read_channels([path]).remarks
        assert any(re.search(entry.text, remark.detail, re.IGNORECASE) for remark in remarks), remarks


@pytest.mark.parametrize("entry", SOURCES, ids=name_of)
def test_source_checks(tmp_path: Path, entry: BadSource) -> None:
    src = str(tmp_path / entry.build(tmp_path))
    overrides = {"channels": ["CT"], "labels": {"background": 0, "a": 1}} if entry.options else {}
    if entry.severity == "error":
        with pytest.raises(VoxlaneError) as caught:
            check(src, overrides)
        assert re.search(entry.text, str(caught.value), re.IGNORECASE)
        return
    problems = check(src, overrides)
    assert any(re.search(entry.text, p.detail, re.IGNORECASE) and p.severity == entry.severity for p in problems), (
        problems
    )


def test_good_cases_have_no_findings(tmp_path: Path) -> None:
    assert check(str(tmp_path / bad_scans.write_dataset(tmp_path, num_good=6))) == []
    bad_scans.write_series(tmp_path / "series")
    assert read_channels([str(tmp_path / "series")]).remarks == ()
    for suffix in (".nrrd", ".mha"):
        (tmp_path / f"good{suffix}").write_bytes(bad_scans.to_itk(suffix))
        assert read_channels([str(tmp_path / f"good{suffix}")]).remarks == ()


# -- the real commands -------------------------------------------------------------------------------------------------


@dataclass
class CommandResult:
    """How a command ended."""

    status: int
    output: str
    seconds: float
    peak_bytes: int
    """Largest memory of one of its processes."""


def run_voxlane(*words: str) -> CommandResult:
    started_at = time.monotonic()
    with tempfile.TemporaryFile() as output:
        command = [sys.executable, "-m", "voxlane", *words]
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        try:
            while (ended := os.wait4(process.pid, os.WNOHANG))[0] == 0:
                assert time.monotonic() < started_at + _DEADLINE_S, f"{' '.join(words)} hangs"
                time.sleep(0.02)
            process.returncode = os.waitstatus_to_exitcode(ended[1])
        finally:
            if process.returncode is None:
                process.kill()
                process.wait()
        output.seek(0)
        text = output.read().decode(errors="replace")
    seconds = time.monotonic() - started_at
    return CommandResult(process.returncode, text, seconds, ended[2].ru_maxrss * 1024)


def check_result(result: CommandResult, entry: BadScan | BadSource, largest_bytes: int) -> None:
    assert "Traceback" not in result.output, result.output
    assert result.status == (1 if entry.severity == "error" else 0), result.output
    assert re.search(entry.text, " ".join(result.output.split()), re.IGNORECASE), result.output
    assert result.peak_bytes <= 2 * largest_bytes, f"{result.peak_bytes / 2**20:.0f} MiB"


@pytest.fixture(scope="session")
def largest_prepare_bytes(tmp_path_factory: pytest.TempPathFactory) -> int:
    """Return the memory for the largest valid case, of 256 x 256 x 128 voxels."""
    folder = tmp_path_factory.mktemp("large")
    image, label = sample_data.make_ct(0, (256, 256, 128))
    sample_data.write_folder(
        folder, {"image.nii": bytes(bad_scans.to_nifti(image)), "label.nii": bytes(bad_scans.to_nifti(label))}
    )
    src = bad_scans.write_dataset(folder, image="image.nii", label="label.nii")
    result = run_voxlane("prepare", str(folder / src), str(folder / "dst"), "workers=1", "plan.patch=[16,16,16]")
    assert result.status == 0, result.output
    return result.peak_bytes


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run, and the largest valid scan beside it."""
    folder = tmp_path_factory.mktemp("run")
    src = bad_scans.write_dataset(folder, num_good=4)
    sample_data.prepare_dataset(str(folder / src), str(folder / "data"))
    result = run_voxlane(
        "train",
        str(folder / "data"),
        "--run",
        str(folder / "run"),
        "preset=small",
        "epochs=1",
        "steps_per_epoch=1",
        "fold=null",
    )
    assert result.status == 0, result.output
    image, _ = sample_data.make_ct(0, (160, 160, 128))
    (folder / "large.nii").write_bytes(bad_scans.to_nifti(image))
    return folder


@pytest.fixture(scope="session")
def largest_predict_bytes(run_folder: Path) -> int:
    result = run_voxlane(
        "predict", str(run_folder / "run"), str(run_folder / "large.nii"), "-o", str(run_folder / "masks")
    )
    assert result.status == 0, result.output
    return result.peak_bytes


@pytest.mark.faults
@pytest.mark.parametrize("entry", [*SCANS, *LABELS], ids=name_of)
def test_prepare_of_a_bad_scan(tmp_path: Path, entry: BadScan, largest_prepare_bytes: int) -> None:
    src = write_case(tmp_path, entry, num_good=2)
    options = ["workers=1", "case_memory_gb=1", "case_timeout_s=60", "plan.patch=[16,16,16]"]
    if "30 mm" in entry.name:
        options.append("plan.spacing=[2,1,1]")  # else the plan itself takes the spacing of half of the cases
    result = run_voxlane("prepare", str(tmp_path / src), str(tmp_path / "dst"), *options)
    check_result(result, entry, largest_prepare_bytes)


@pytest.mark.faults
@pytest.mark.parametrize("entry", SOURCES, ids=name_of)
def test_prepare_of_a_bad_source(tmp_path: Path, entry: BadSource, largest_prepare_bytes: int) -> None:
    src = entry.build(tmp_path)
    options = ["workers=1", "plan.patch=[16,16,16]", *entry.options]
    result = run_voxlane("prepare", str(tmp_path / src), str(tmp_path / "dst"), *options)
    check_result(result, entry, largest_prepare_bytes)


@pytest.mark.faults
@pytest.mark.parametrize("entry", [scan for scan in SCANS if not scan.only_prepare], ids=name_of)
def test_predict_of_a_bad_scan(tmp_path: Path, entry: BadScan, run_folder: Path, largest_predict_bytes: int) -> None:
    path = entry.build(tmp_path)
    result = run_voxlane("predict", str(run_folder / "run"), str(tmp_path / path), "-o", str(tmp_path / "masks"))
    check_result(result, entry, largest_predict_bytes)
    assert list(tmp_path.glob("masks/*.nii.gz")) == [] or entry.severity == "warning"


@pytest.mark.faults
@pytest.mark.parametrize("limit_kib", [200_000, 1_000_000, 2_000_000, 4_000_000])
@pytest.mark.parametrize("command", ["prepare", "predict"])
def test_little_address_space(tmp_path: Path, run_folder: Path, command: str, limit_kib: int) -> None:
    src = bad_scans.write_dataset(tmp_path)
    words = {
        "prepare": ["prepare", str(tmp_path / src), str(tmp_path / "dst"), "workers=1", "plan.patch=[16,16,16]"],
        "predict": ["predict", str(run_folder / "run"), str(tmp_path / "1.nii.gz"), "-o", str(tmp_path / "masks")],
    }[command]
    script = f'ulimit -v {limit_kib}; exec "$@"'
    process = subprocess.run(
        ["bash", "-c", script, "-", sys.executable, "-m", "voxlane", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=_DEADLINE_S,
        check=False,
    )
    assert "Traceback" not in process.stderr, process.stderr
    assert process.returncode == 0 or "memory" in process.stderr.lower(), process.stderr
