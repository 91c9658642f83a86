"""`voxlane report` of a search."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tune import made_search
from voxlane.errors import TuneError
from voxlane.tune.page import page
from voxlane.tune.report import report


def test_the_page_and_the_events_are_written_anew(tmp_path: Path) -> None:
    search = made_search.search(5)
    (tmp_path / "tune.json").write_text(search.to_json(), encoding="utf-8")
    assert report(str(tmp_path)) == f"file://{tmp_path}/report.html"
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == page(search)
    assert len(list((tmp_path / "tensorboard").rglob("*tfevents*"))) == 6


def test_where_no_search_is(tmp_path: Path) -> None:
    assert report(str(tmp_path)) is None
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "tune.json").write_text("{}", encoding="utf-8")
    with pytest.raises(TuneError, match=r"tune\.json: it does not hold what a search writes"):
        report(str(tmp_path))
