"""`voxlane check`: the command, its report and its page, and comparison of cases with each other."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults import bad_scans
from tests.volume import sample_data
from voxlane.cli.main import main
from voxlane.train.dataset_report import render_check_page
from voxlane.volume.description import Description
from voxlane.volume.outliers import CaseSummary, find_outliers

CT = Description(name="a", channels=("CT",), labels={"background": 0, "kidney": 1})


def make_summaries() -> dict[str, CaseSummary]:
    """Return the measures of eight similar cases."""
    return {
        f"c{n}": CaseSummary(
            shape=(100 + n, 512, 512),
            spacing=(3.0, 0.7 + n / 100, 0.7 + n / 100),
            dtype="int16",
            channels=((-1000, 2000, -900 + n, 20 + n, 900 + n),),
            label_voxels={0: 1000, 1: 100 + n},
            image_digest=str(n),
        )
        for n in range(8)
    }


def test_similar_cases_are_no_outliers() -> None:
    assert find_outliers(make_summaries(), CT) == []
    assert find_outliers({}, CT) == []


@pytest.mark.parametrize(
    ("changes", "kind", "text"),
    [
        ({"spacing": (3.0, 7.0, 7.0)}, "outlier", "spacing 3 x 7 x 7 mm"),
        ({"shape": (2, 512, 512)}, "outlier", "extent 6 x"),
        ({"channels": ((0, 1, 0.0, 0.5, 1.0),)}, "outlier", "a range of 1, where the median is"),
        ({"channels": ((9000, 12000, 9100, 10020, 10900),)}, "outlier", "the median intensity is 1.002e+04"),
        ({"label_voxels": {0: 9, 1: 100_000}}, "outlier", "ml are labelled"),
        ({"image_digest": "3"}, "duplicate", "the same scan as c3"),
    ],
)
def test_outliers(changes: dict[str, object], kind: str, text: str) -> None:
    summaries = make_summaries()
    values = {name: getattr(summaries["c5"], name) for name in summaries["c5"].__dataclass_fields__}
    summaries["c5"] = CaseSummary(**{**values, **changes})  # type: ignore[arg-type]
    problems = find_outliers(summaries, CT)
    assert {problem.case for problem in problems} == {"c5"}
    assert any(problem.kind == kind and text in problem.detail for problem in problems), problems
    assert not any(problem.fatal for problem in problems)


def test_label_that_never_occurs() -> None:
    description = Description(name="a", channels=("CT",), labels={"background": 0, "kidney": 1, "cyst": 2})
    (problem,) = find_outliers(make_summaries(), description)
    assert (problem.case, problem.detail) == ("", "no case has a voxel of cyst (2)")


def test_command_writes_a_report_and_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = bad_scans.write_series(tmp_path / "scans" / "series")
    paths[3].write_bytes(b"")
    src = bad_scans.write_dataset(tmp_path / "scans", image="series")
    command = ["check", str(tmp_path / "scans" / src), "-o", str(tmp_path / "out"), "--json", "workers=1"]
    assert main([*command, "--no-progress"]) == 1
    output = capsys.readouterr()
    report = json.loads((tmp_path / "out" / "check.json").read_bytes())
    assert json.loads(output.out) == report
    assert (report["cases"], report["usable_cases"], report["errors"]) == (3, 2, 1)
    (finding,) = (finding for finding in report["findings"] if finding["severity"] == "error")
    assert "IM0003.dcm is empty" in finding["detail"]
    assert (finding["case"], finding["cause"]) == ("bad", "permanent")
    page = (tmp_path / "out" / "check.html").read_text("utf-8")
    assert "IM0003.dcm is empty" in page
    assert page == render_check_page(report)
    assert "1 error in 1 of 3 cases" in output.err
    good = bad_scans.write_dataset(tmp_path / "good")
    assert main(["check", str(tmp_path / "good" / good), "workers=1", "--no-progress"]) == 0
    assert "2 of 2 cases can be used; 0 errors, 0 warnings" in capsys.readouterr().out


def test_file_without_read_permission_is_an_error_of_its_case(tmp_path: Path) -> None:
    """It once ended the check of all cases."""
    src = tmp_path / bad_scans.write_dataset(tmp_path)
    (tmp_path / "1.nii.gz").chmod(0)
    command = [sys.executable, "-m", "voxlane", "check", str(src), "workers=1", "--no-progress"]
    if os.geteuid() == 0:  # root may read every file
        if shutil.which("setpriv") is None:
            pytest.skip("without setpriv, root cannot give up reading every file")
        drop = "-dac_override,-dac_read_search"
        command = ["setpriv", f"--bounding-set={drop}", f"--inh-caps={drop}", *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "1.nii.gz: cannot be read: permission denied" in " ".join(done.stdout.split())
    assert "1 of 2 cases can be used; 1 error" in done.stdout, done.stderr


def test_page_escapes_names(tmp_path: Path) -> None:
    report = {
        "name": "<script>alert(1)</script>", "source": "<b>", "layout": "list", "cases": 1, "usable_cases": 0,
        "errors": 1, "warnings": 0, "measures": {},
        "findings": [{"case": "<i>", "kind": "slices", "severity": "error", "cause": "permanent", "detail": "<img>"}],
    }  # fmt: skip
    page = render_check_page(report)
    assert "<script>alert" not in page
    assert "<img>" not in page


def test_prepare_stores_the_report(tmp_path: Path) -> None:
    src = sample_data.write_folder(tmp_path / "scans", sample_data.make_kits19(2))
    sample_data.prepare_dataset(src, str(tmp_path / "data"))
    report = json.loads((tmp_path / "data" / "check.json").read_bytes())
    assert (report["usable_cases"], report["findings"]) == (2, [])
