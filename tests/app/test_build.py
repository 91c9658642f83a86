"""Images: the tag follows what is built, and nothing is built twice. Builds need buildah or podman here."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.app.registry import Registry, serving
from tests.app.test_config import app
from voxlane.app import build
from voxlane.app.build import find_engine
from voxlane.app.context import content_tag, files, ignored, refuse_secrets, rules_of
from voxlane.cli.main import main
from voxlane.errors import BuildError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    where = tmp_path / "kits"
    where.mkdir()
    where.joinpath("Dockerfile").write_text("FROM scratch\nCOPY . /app\n")
    where.joinpath(".dockerignore").write_text("app.yaml\n.voxlane\n**/*.log\n")
    where.joinpath("app.yaml").write_text("name: kits\nimage: kits\ncommand: [/app/train]\n")
    where.joinpath("train").write_text("#!/bin/sh\n")
    return where


# -- what an image is built from ---------------------------------------------------------------------------------------


def test_the_tag_follows_what_is_built(folder: Path) -> None:
    tag = content_tag(str(folder))
    assert len(tag) == 16

    def changed() -> bool:
        nonlocal tag
        before, tag = tag, content_tag(str(folder))
        return before != tag

    os.utime(folder / "train")
    folder.joinpath("app.yaml").write_text("name: other\n")
    folder.joinpath("run.log").write_text("x")
    folder.joinpath(".voxlane").mkdir()
    folder.joinpath(".voxlane/x").touch()
    assert not changed()
    folder.joinpath("train").write_text("#!/bin/sh\nexit 1\n")
    assert changed()
    folder.joinpath("train").chmod(0o755)
    assert changed()
    folder.joinpath("Dockerfile").write_text("FROM scratch\n")
    assert changed()
    folder.joinpath("train").rename(folder / "train2")
    assert changed()
    folder.joinpath("link").symlink_to("train2")
    assert changed()
    folder.joinpath("link").unlink()
    folder.joinpath("link").symlink_to("nowhere")
    assert changed()


@pytest.mark.parametrize(
    ("pattern", "out", "kept"),
    [
        ("a", ["a", "a/b", "a/b/c"], ["b", "b/a", "ab"]),
        ("/a", ["a", "a/b"], ["b/a"]),
        ("a/", ["a/b"], ["b/a"]),
        ("*.log", ["x.log"], ["a/x.log", "x.logs"]),
        ("**/*.log", ["x.log", "a/x.log", "a/b/x.log"], ["x.logs"]),
        ("a/**", ["a/b", "a/b/c"], ["b/a", "ab"]),
        ("a/**/z", ["a/z", "a/b/z", "a/b/c/z"], ["z", "b/z"]),
        ("?.txt", ["a.txt"], ["ab.txt", "/.txt"]),
        ("[ab].txt", ["a.txt", "b.txt"], ["c.txt"]),
        ("a.b", ["a.b"], ["axb"]),
        ("# a", [], ["a", "# a"]),
        ("./a", ["a"], ["b"]),
    ],
)
def test_dockerignore_is_read_as_docker_does(pattern: str, out: list[str], kept: list[str]) -> None:
    rules = rules_of([pattern, ""])
    assert [name for name in [*out, *kept] if ignored(name, rules)] == out


def test_the_last_rule_that_matches_wins(folder: Path) -> None:
    rules = rules_of(["*", "!keep", "keep/not"])
    assert [name for name in ("a", "keep/a", "keep/not", "keep") if ignored(name, rules)] == ["a", "keep/not"]
    folder.joinpath("data").mkdir()
    folder.joinpath("data/a").touch()
    folder.joinpath("data/b").touch()
    folder.joinpath(".dockerignore").write_text("data\n!data/b\napp.yaml\n")
    assert files(str(folder)) == [".dockerignore", "Dockerfile", "data/b", "train"]


def test_keys_do_not_go_into_an_image(folder: Path) -> None:
    refuse_secrets(str(folder))
    folder.joinpath("key.json").write_text('{"type": "service_account", "private_key": "x"}')
    with pytest.raises(BuildError, match=r"key.json: it holds a key, which would end in the image. Name it in .docker"):
        refuse_secrets(str(folder))
    folder.joinpath(".dockerignore").write_text("key.json\n")
    refuse_secrets(str(folder))


def test_no_dockerfile_is_said(folder: Path) -> None:
    folder.joinpath("Dockerfile").unlink()
    with pytest.raises(BuildError, match=r"there is no Dockerfile. Write one, or give `image` a tag"):
        build.reference(app(image="kits"), str(folder))
    assert build.ensure(app(image="kits:1.0"), str(folder)) == "kits:1.0"


# -- which engine ------------------------------------------------------------------------------------------------------


def _program(where: Path, name: str, script: str) -> None:
    where.mkdir(exist_ok=True)
    where.joinpath(name).write_text(f"#!/bin/sh\n{script}\n")
    where.joinpath(name).chmod(0o755)


def test_the_first_engine_that_answers_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = tmp_path / "bin"
    monkeypatch.setenv("PATH", str(programs))
    with pytest.raises(BuildError, match=r"neither docker nor podman nor buildah is here. Install docker, podman or"):
        find_engine()
    _program(programs, "docker", "echo Cannot connect to the Docker daemon >&2; exit 1")
    with pytest.raises(BuildError, match=r"docker does not work here: Cannot connect to the Docker daemon"):
        find_engine()
    _program(programs, "buildah", "exit 0")
    assert find_engine().name == "buildah"
    _program(programs, "podman", "exit 0")
    assert find_engine().name == "podman"
    assert find_engine("buildah").name == "buildah"
    _program(programs, "docker", "exit 0")
    assert find_engine().name == "docker"
    programs.joinpath("podman").unlink()
    with pytest.raises(BuildError, match="podman is not here"):
        find_engine("podman")


# -- real builds -------------------------------------------------------------------------------------------------------


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """buildah or podman, with its own store of images."""
    found = shutil.which("buildah") or shutil.which("podman")
    if found is None:
        pytest.skip("neither buildah nor podman is here: apt-get install buildah")
    store = tmp_path / "store"
    store.mkdir()
    conf = f'[storage]\ndriver = "vfs"\ngraphroot = "{store}/graph"\nrunroot = "{store}/run"\n'
    store.joinpath("storage.conf").write_text(conf)
    monkeypatch.setenv("CONTAINERS_STORAGE_CONF", str(store / "storage.conf"))
    monkeypatch.setenv("BUILDAH_ISOLATION", "chroot")
    monkeypatch.setenv("_CONTAINERS_USERNS_CONFIGURED", "done" if os.geteuid() == 0 else "")
    name = Path(found).name
    probe = tmp_path / "probe"
    probe.mkdir()
    probe.joinpath("Dockerfile").write_text("FROM scratch\nCOPY Dockerfile /\n")
    try:
        build.ensure(app(image="probe"), str(probe), push=False, wanted=name)  # type: ignore[arg-type]
    except BuildError as error:
        pytest.skip(f"{name} cannot build here: {error}")
    yield name
    for root, folders, _ in os.walk(store):
        for one in folders:
            with contextlib.suppress(OSError):
                os.chmod(os.path.join(root, one), 0o700)


@pytest.fixture
def registry() -> Iterator[Registry]:
    with serving() as running:
        yield running


def test_an_image_is_built_and_pushed_once(
    folder: Path, engine: str, registry: Registry, capsys: pytest.CaptureFixture[str]
) -> None:
    text = folder.joinpath("app.yaml").read_text().replace("image: kits", f"image: {registry.address}/team/kits")
    folder.joinpath("app.yaml").write_text(text)
    command = ["app", "build", str(folder), "--builder", engine]
    assert main(command) == 0
    ref = f"{registry.address}/team/kits:{content_tag(str(folder))}"
    said = capsys.readouterr()
    assert said.out.startswith(f"{ref}: built and pushed with {engine}")
    assert f"building {ref} with {engine}" in said.err
    assert f"team/kits:{content_tag(str(folder))}" in registry.manifests
    assert registry.puts == 1

    assert main(command) == 0
    assert "built" not in capsys.readouterr().out
    folder.joinpath("train").write_text("#!/bin/sh\nexit 2\n")
    assert main([*command, "--no-push"]) == 0
    assert f": built with {engine}" in capsys.readouterr().out
    assert len([name for name in registry.manifests if "sha256" not in name]) == 1


def test_what_the_registry_has_is_not_built_again(
    folder: Path, engine: str, registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("skopeo") is None:
        pytest.skip("skopeo, with which buildah and podman users ask a registry, is not here: apt-get install skopeo")
    kits = app(image=f"{registry.address}/kits")
    ref = build.ensure(kits, str(folder), wanted=engine)  # type: ignore[arg-type]
    other = tmp_path / "other"
    other.mkdir()
    conf = f'[storage]\ndriver = "vfs"\ngraphroot = "{other}/graph"\nrunroot = "{other}/run"\n'
    other.joinpath("storage.conf").write_text(conf)
    monkeypatch.setenv("CONTAINERS_STORAGE_CONF", str(other / "storage.conf"))  # another machine
    made = build.make(kits, str(folder), wanted=engine)  # type: ignore[arg-type]
    assert (made.ref, made.built, made.pushed) == (ref, False, False)


def test_a_failed_build_shows_its_last_lines(folder: Path, engine: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder.joinpath("Dockerfile").write_text("FROM scratch\nCOPY nothing /app\n")
    assert main(["app", "build", str(folder), "--no-push", "--builder", engine]) == 1
    said = capsys.readouterr().err
    assert f"{engine} could not build it (status" in said
    assert "COPY nothing /app" in said
    folder.joinpath("Dockerfile").write_text("FROM scratch\nCOPY train /app\n")
    folder.joinpath("app.yaml").write_text("name: kits\nimage: 127.0.0.1:1/kits\ncommand: [x]\n")
    assert main(["app", "build", str(folder), "--builder", engine]) == 1
    said = capsys.readouterr().err
    assert f"{engine} could not push it (status" in said
    assert f"Log in with `{engine} login`" in said


def test_watch_builds_again_when_a_file_changes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_WATCH_S", 0.05)
    seen: list[str] = []
    done = threading.Event()

    def follow() -> None:
        seen.extend(content_tag(str(folder)) for _ in build.watch(str(folder), stop=done.is_set))

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        _wait(lambda: len(seen) == 1)
        folder.joinpath("ignored.log").write_text("x")
        folder.joinpath("train").write_text("#!/bin/sh\nexit 3\n")
        _wait(lambda: len(seen) == 2)
        folder.joinpath("train").write_text("")
        _wait(lambda: len(seen) == 3)
    finally:
        done.set()
        thread.join()
    assert len(set(seen)) == 3


def _wait(until: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < end
        time.sleep(0.02)
