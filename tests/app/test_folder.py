"""An app's folder: made from a template, brought up to date with it."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from voxlane.app import folder
from voxlane.app.config import App, Template
from voxlane.app.folder import TEMPLATES, init, merge, plan_update, template_files, update
from voxlane.cli.main import main
from voxlane.errors import ConfigError


@pytest.mark.parametrize("template", get_args(Template))
def test_a_new_app_renders(
    template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["app", "init", "kits", "--template", template]) == 0
    assert "next: edit kits/app.yaml" in capsys.readouterr().out
    made = App.load("kits")
    assert made.template == template
    assert made.built
    assert main(["app", "render", "kits", "-o", "out"]) == 0
    assert any(path.name.endswith("-kits.yaml") for path in tmp_path.joinpath("out").iterdir())
    assert main(["app", "update", "kits"]) == 0
    assert "is up to date with its template" in capsys.readouterr().out


def test_templates_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["app", "templates"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(get_args(Template))
    assert set(TEMPLATES) == set(get_args(Template))


def test_values_are_filled_in(tmp_path: Path) -> None:
    init("kits", "jobset", str(tmp_path / "a"), version="1.2", image="reg.example/k", data="s3://d/p", run="s3://d/r")
    made = App.load(tmp_path / "a")
    assert made.train is not None
    assert (made.image, made.train.data, made.train.run) == ("reg.example/k", "s3://d/p", "s3://d/r")
    assert "voxlane[train,gcs,s3,azure]==1.2" in (tmp_path / "a/Dockerfile").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["Kits"], "name: 'Kits' is no name"),
        (["k" * 60], "has 60 characters. Names of pods leave a jobset 48"),
        (["kits", "--template", "tfjob"], "no template 'tfjob'. There are: jobset, rayjob, trainjob, tensorboard"),
        (["kits", "--run", "runs/a"], "train.run: 'runs/a' is in no bucket"),
        (["kits", "--dir", "full"], "full: something is there already. Name another folder with --dir"),
        (["kits", "--dir", "file/kits"], "Not a directory"),
    ],
)
def test_what_cannot_be_made_leaves_nothing(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tmp_path.joinpath("full").mkdir()
    tmp_path.joinpath("full/x").touch()
    tmp_path.joinpath("file").touch()
    assert main(["app", "init", *words]) == 1
    assert said in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"full", "file"}


def test_both_sides_changes_are_merged() -> None:
    base = {"a": "1\n2\n3\n4\n5\n", "b": "x\n", "same": "s\n", "gone": "g\n"}
    ours = {"a": "one\n2\n3\n4\n5\n", "b": "mine\n", "same": "other\n"}
    theirs = {"a": "1\n2\n3\n4\nfive\n", "b": "theirs\n", "same": "s\n", "gone": "g2\n", "new": "n\n"}
    changes = {change.name: change for change in plan_update(base, ours, theirs)}
    assert {name: change.what for name, change in changes.items()} == {
        "a": "merged",
        "b": "conflict",
        "gone": "deleted here",
        "new": "new",
    }
    assert changes["a"].text == "one\n2\n3\n4\nfive\n"
    assert changes["b"].text == "<<<<<<< yours\nmine\n=======\ntheirs\n>>>>>>> template\n"
    assert changes["gone"].text is None
    assert plan_update(base, {**ours, "b": "theirs\n"}, {"b": "theirs\n"}) == []  # done by hand already


def test_a_side_that_did_not_change_takes_the_other() -> None:
    for text in ("", "a\n", "a\nb\n", "a\nb"):
        assert merge("a\nb\n", "a\nb\n", text) == (text, True)
        assert merge("a\nb\n", text, "a\nb\n") == (text, True)


def test_update_merges_into_files_and_remembers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = str(tmp_path / "kits")
    init("kits", "jobset", where, version="1.0")
    app_yaml, dockerfile = tmp_path / "kits/app.yaml", tmp_path / "kits/Dockerfile"
    app_yaml.write_text(app_yaml.read_text().replace("nodes: 1", "nodes: 4"))
    assert [(change.name, change.what) for change in update(where, version="2.0")] == [("Dockerfile", "merged")]
    assert "==2.0" in dockerfile.read_text()
    assert "nodes: 4" in app_yaml.read_text()
    assert update(where, version="2.0") == []

    _newer(monkeypatch, "nodes: 1\n", "nodes: 1  # machines\n")
    before = app_yaml.read_text()
    assert [change.what for change in update(where, version="2.0", dry_run=True)] == ["conflict"]
    assert app_yaml.read_text() == before
    assert main(["app", "update", where]) == 1
    assert "<<<<<<< yours\nnodes: 4\n=======\nnodes: 1  # machines\n>>>>>>> template\n" in app_yaml.read_text()
    with pytest.raises(ConfigError, match="conflict is not resolved"):
        App.load(where)
    app_yaml.write_text(before.replace("nodes: 4", "nodes: 4  # machines"))
    assert App.load(where).nodes == 4


def _newer(monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    """The template as a later version of voxlane might have it."""

    def changed(template: Template, values: dict[str, str]) -> dict[str, str]:
        files = template_files(template, values)
        assert old in files["app.yaml"]
        return {**files, "app.yaml": files["app.yaml"].replace(old, new)}

    monkeypatch.setattr(folder, "template_files", changed)


def test_a_folder_of_another_make_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="was not made by `voxlane app init`"):
        update(str(tmp_path), version="1.0")
    tmp_path.joinpath(".voxlane").mkdir()
    tmp_path.joinpath(".voxlane/template.json").write_text("{}")
    with pytest.raises(ConfigError, match="it cannot be read"):
        update(str(tmp_path), version="1.0")
