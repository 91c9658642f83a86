"""No content of a page is markup or script, and a browser would not run a script that were."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.train import fake_run
from tests.tune import fake_search
from voxlane.errors import RunError
from voxlane.train.report import report
from voxlane.tune.report import render_search_page
from voxlane.tune.trials import Search

EVIL = "</title></style></script>\"'><script>document.title='pwned'</script><img src=x onerror=alert(1)>\u2028{{7*7}}"
FILES = ("run.json", "stall.json", "evaluation/validation/summary.json", "evaluation/validation/cases.json")


class Elements(HTMLParser):
    """The elements of a page that could run code or load something."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.scripts: list[str] = []
        self.styles: list[str] = []
        self.policy = ""
        self._tag = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._tag = tag
        attributes = dict(attrs)
        assert tag not in ("iframe", "object", "embed", "base", "form", "link")
        assert not any(name.startswith("on") for name in attributes)
        assert (attributes.get("src") or "data:image/png;").startswith("data:image/png;")
        assert (attributes.get("href") or "#").startswith("#")
        if attributes.get("http-equiv") == "Content-Security-Policy":
            self.policy = attributes["content"] or ""

    def handle_data(self, data: str) -> None:
        if self._tag in ("script", "style"):
            {"script": self.scripts, "style": self.styles}[self._tag].append(data)

    def handle_endtag(self, tag: str) -> None:
        self._tag = ""


def check_page(html: str) -> None:
    elements = Elements(html)
    (script,), (style,) = elements.scripts, elements.styles
    rules = dict(rule.strip().split(" ", 1) for rule in elements.policy.split(";"))
    assert rules["default-src"] == "'none'"
    for name, source in (("script-src", script), ("style-src-elem", style)):
        digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
        assert rules[name] == f"'sha256-{digest}'", "nothing but the page's own"
    assert (rules["base-uri"], rules["form-action"], rules["img-src"]) == ("'none'", "'none'", "data:")


def replace_texts(value: Any) -> Any:
    """Return nested values with every text replaced, also those of the names that users choose."""
    if isinstance(value, dict):
        chosen = ("labels", "regions", "targets", "shares", "environment", "params", "space")
        return {
            k: {EVIL + str(name): replace_texts(item) for name, item in v.items()}
            if k in chosen and isinstance(v, dict)
            else v
            if k in ("uri", "kind", "state", "scheme", "created")
            else replace_texts(v)
            for k, v in value.items()
        }
    if isinstance(value, list):
        return [replace_texts(item) for item in value]
    return EVIL + value if isinstance(value, str) else value


@pytest.fixture
def hostile_page(tmp_path: Path) -> str:
    run = fake_run.write(tmp_path / "run", overlay=fake_run.small_overlay())
    for name in FILES:
        path = run / name
        path.write_text(json.dumps(replace_texts(json.loads(path.read_text(encoding="utf-8")))))
    report(str(run))
    return (run / "report.html").read_text(encoding="utf-8")


def test_no_text_of_a_run_is_markup(hostile_page: str) -> None:
    assert hostile_page.count("pwned") > 20
    check_page(hostile_page)


def test_no_text_of_a_search_is_markup() -> None:
    search = json.loads(fake_search.search().to_json())
    hostile = Search.from_json(json.dumps(replace_texts(search)))
    html = render_search_page(hostile)
    assert html.count("pwned") > 20
    check_page(html)


@pytest.mark.parametrize("path", [("parameters",), ("config", "patch"), ("description", "labels"), ("plan", "spacing")])
def test_content_of_a_wrong_type_is_one_error(tmp_path: Path, path: tuple[str, ...]) -> None:
    run = fake_run.write(tmp_path / "run", evaluated=False)
    content = json.loads((run / "run.json").read_text(encoding="utf-8"))
    inner = content
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = EVIL
    (run / "run.json").write_text(json.dumps(content))
    with pytest.raises(RunError, match="do not have the content that voxlane writes"):
        report(str(run))


@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed: no browser reads the policy")
def test_a_browser_runs_no_other_script(hostile_page: str, tmp_path: Path) -> None:
    # As if escaping had failed: scripts, handlers and a frame in the middle of the page.
    holes = "<script>document.title='pwned'</script><img src=x onerror=\"document.title='pwned'\"><b id=hole></b>"
    holes += "<svg onload=\"document.title='pwned'\"></svg>"
    holes += "<iframe srcdoc=\"<script>parent.document.title='pwned'</script>\"></iframe>"
    page = hostile_page.replace("</header>", f"</header>{holes}")
    file = tmp_path / "page.html"
    file.write_text(page, encoding="utf-8")
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'chromium'}"]
    ran = subprocess.run([*command, "--dump-dom", str(file)], capture_output=True, text=True, timeout=400, check=True)
    title = re.search("<title>(.*?)</title>", ran.stdout, re.DOTALL)
    assert title is not None
    assert "hole" in ran.stdout
    assert title[1] != "pwned"
