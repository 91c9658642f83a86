"""Test `voxlane report` of a search."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tune import fake_search
from voxlane.errors import TuneError
from voxlane.tune.report import render_search_page, report


def test_page_and_events_are_written(tmp_path: Path) -> None:
    search = fake_search.search(5)
    (tmp_path / "tune.json").write_text(search.to_json(), encoding="utf-8")
    assert report(str(tmp_path)) == f"file://{tmp_path}/report.html"
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == render_search_page(search)
    assert len(list((tmp_path / "tensorboard").rglob("*tfevents*"))) == 6


def test_no_search(tmp_path: Path) -> None:
    assert report(str(tmp_path)) is None
    assert list(tmp_path.iterdir()) == []


def test_damaged_record_is_named(tmp_path: Path) -> None:
    (tmp_path / "tune.json").write_text("{}", encoding="utf-8")
    with pytest.raises(TuneError, match=r"tune\.json: not the record of a search"):
        report(str(tmp_path))
