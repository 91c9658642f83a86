"""An app's folder: created from a template, and updated with it."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from voxlane.cli.main import main
from voxlane.cluster.kubernetes.app import folder
from voxlane.cluster.kubernetes.app.config import App, Template
from voxlane.cluster.kubernetes.app.folder import TEMPLATES, init, merge, plan_update, template_files, update
from voxlane.errors import ConfigError


@pytest.mark.parametrize("template", get_args(Template))
def test_new_app_renders(
    template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["app", "init", "kits", "--template", template]) == 0
    assert "next: edit kits/app.yaml" in capsys.readouterr().out
    app = App.load("kits")
    assert app.template == template
    assert app.is_built
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
    app = App.load(tmp_path / "a")
    assert app.train is not None
    assert (app.image, app.train.data, app.train.run) == ("reg.example/k", "s3://d/p", "s3://d/r")
    assert "voxlane[train,gcs,s3,azure]==1.2" in (tmp_path / "a/Dockerfile").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["Kits"], "name: 'Kits' is not a valid name"),
        (["k" * 60], "has 60 characters. Use at most 48, so that the pods"),
        (["kits", "--template", "tfjob"], "no template 'tfjob'. There are: jobset, rayjob, trainjob, tensorboard"),
        (["kits", "--run", "runs/a"], "train.run: 'runs/a' is not in a bucket"),
        (["kits", "--dir", "full"], "full: it already exists and is not empty. Name another folder with --dir"),
        (["kits", "--dir", "file/kits"], "Not a directory"),
    ],
)
def test_failed_init_leaves_nothing(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    tmp_path.joinpath("full").mkdir()
    tmp_path.joinpath("full/x").touch()
    tmp_path.joinpath("file").touch()
    assert main(["app", "init", *arguments]) == 1
    assert message in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"full", "file"}


def test_changes_of_both_sides_are_merged() -> None:
    base = {"a": "1\n2\n3\n4\n5\n", "b": "x\n", "same": "s\n", "gone": "g\n"}
    current = {"a": "one\n2\n3\n4\n5\n", "b": "mine\n", "same": "other\n"}
    newer = {"a": "1\n2\n3\n4\nfive\n", "b": "theirs\n", "same": "s\n", "gone": "g2\n", "new": "n\n"}
    changes = {change.name: change for change in plan_update(base, current, newer)}
    assert {name: change.action for name, change in changes.items()} == {
        "a": "merged",
        "b": "conflict",
        "gone": "deleted here",
        "new": "new",
    }
    assert changes["a"].text == "one\n2\n3\n4\nfive\n"
    assert changes["b"].text == "<<<<<<< yours\nmine\n=======\ntheirs\n>>>>>>> template\n"
    assert changes["gone"].text is None
    assert (
        plan_update(base, {**current, "b": "theirs\n"}, {"b": "theirs\n"}) == []
    )  # the user has already made the change


def test_unchanged_side_takes_the_other() -> None:
    for text in ("", "a\n", "a\nb\n", "a\nb"):
        assert merge("a\nb\n", "a\nb\n", text) == (text, True)
        assert merge("a\nb\n", text, "a\nb\n") == (text, True)


def test_update_merges_files_and_remembers_the_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app_folder = str(tmp_path / "kits")
    init("kits", "jobset", app_folder, version="1.0")
    app_yaml, dockerfile = tmp_path / "kits/app.yaml", tmp_path / "kits/Dockerfile"
    app_yaml.write_text(app_yaml.read_text().replace("nodes: 1", "nodes: 4"))
    assert [(change.name, change.action) for change in update(app_folder, version="2.0")] == [("Dockerfile", "merged")]
    assert "==2.0" in dockerfile.read_text()
    assert "nodes: 4" in app_yaml.read_text()
    assert update(app_folder, version="2.0") == []

    _change_template(monkeypatch, "nodes: 1\n", "nodes: 1  # machines\n")
    before = app_yaml.read_text()
    assert [change.action for change in update(app_folder, version="2.0", dry_run=True)] == ["conflict"]
    assert app_yaml.read_text() == before
    assert main(["app", "update", app_folder]) == 1
    assert "<<<<<<< yours\nnodes: 4\n=======\nnodes: 1  # machines\n>>>>>>> template\n" in app_yaml.read_text()
    with pytest.raises(ConfigError, match="unresolved conflict"):
        App.load(app_folder)
    app_yaml.write_text(before.replace("nodes: 4", "nodes: 4  # machines"))
    assert App.load(app_folder).nodes == 4


def _change_template(monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    """Change the template, as a later version of voxlane might."""

    def render_changed(template: Template, values: dict[str, str]) -> dict[str, str]:
        files = template_files(template, values)
        assert old in files["app.yaml"]
        return {**files, "app.yaml": files["app.yaml"].replace(old, new)}

    monkeypatch.setattr(folder, "template_files", render_changed)


def test_folder_without_template_state_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="was not created by `voxlane app init`"):
        update(str(tmp_path), version="1.0")
    tmp_path.joinpath(".voxlane").mkdir()
    tmp_path.joinpath(".voxlane/template.json").write_text("{}")
    with pytest.raises(ConfigError, match="it cannot be read"):
        update(str(tmp_path), version="1.0")
