"""Images: the tag depends on the content, and nothing is built twice. The builds need buildah or podman."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.app.registry import Registry, serving
from tests.cluster.app.test_config import build_app
from voxlane.cli.main import main
from voxlane.cluster.kubernetes.app import build
from voxlane.cluster.kubernetes.app.build import (
    compute_content_tag,
    find_builder,
    is_ignored,
    list_files,
    parse_rules,
    reject_secrets,
)
from voxlane.errors import BuildError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder_path = tmp_path / "kits"
    folder_path.mkdir()
    folder_path.joinpath("Dockerfile").write_text("FROM scratch\nCOPY . /app\n")
    folder_path.joinpath(".dockerignore").write_text("app.yaml\n.voxlane\n**/*.log\n")
    folder_path.joinpath("app.yaml").write_text("name: kits\nimage: kits\ncommand: [/app/train]\n")
    folder_path.joinpath("train").write_text("#!/bin/sh\n")
    return folder_path


# -- what an image is built from ---------------------------------------------------------------------------------------


def test_tag_depends_on_the_files_of_the_image(folder: Path) -> None:
    tag = compute_content_tag(str(folder))
    assert len(tag) == 16

    def changed() -> bool:
        nonlocal tag
        before, tag = tag, compute_content_tag(str(folder))
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
    ("pattern", "ignored", "included"),
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
def test_dockerignore_patterns_match_as_in_docker(pattern: str, ignored: list[str], included: list[str]) -> None:
    rules = parse_rules([pattern, ""])
    assert [name for name in [*ignored, *included] if is_ignored(name, rules)] == ignored


def test_last_rule_that_matches_wins(folder: Path) -> None:
    rules = parse_rules(["*", "!keep", "keep/not"])
    assert [name for name in ("a", "keep/a", "keep/not", "keep") if is_ignored(name, rules)] == ["a", "keep/not"]
    folder.joinpath("data").mkdir()
    folder.joinpath("data/a").touch()
    folder.joinpath("data/b").touch()
    folder.joinpath(".dockerignore").write_text("data\n!data/b\napp.yaml\n")
    assert list_files(str(folder)) == [".dockerignore", "Dockerfile", "data/b", "train"]


def test_files_with_keys_are_rejected(folder: Path) -> None:
    reject_secrets(str(folder))
    folder.joinpath("key.json").write_text('{"type": "service_account", "private_key": "x"}')
    with pytest.raises(
        BuildError, match=r"key.json: it contains a key, which would become part of the image. List it in .docker"
    ):
        reject_secrets(str(folder))
    folder.joinpath(".dockerignore").write_text("key.json\n")
    reject_secrets(str(folder))


def test_missing_dockerfile_is_reported(folder: Path) -> None:
    folder.joinpath("Dockerfile").unlink()
    with pytest.raises(BuildError, match=r"there is no Dockerfile. Write one, or give `image` a tag"):
        build.get_image_reference(build_app(image="kits"), str(folder))
    assert build.ensure_image(build_app(image="kits:1.0"), str(folder)).ref == "kits:1.0"


# -- which engine ------------------------------------------------------------------------------------------------------


def _write_program(folder_path: Path, name: str, script: str) -> None:
    folder_path.mkdir(exist_ok=True)
    folder_path.joinpath(name).write_text(f"#!/bin/sh\n{script}\n")
    folder_path.joinpath(name).chmod(0o755)


def test_first_working_builder_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = tmp_path / "bin"
    monkeypatch.setenv("PATH", str(programs))
    with pytest.raises(BuildError, match=r"none of docker, podman and buildah is installed. Install docker, podman or"):
        find_builder()
    _write_program(programs, "docker", "echo Cannot connect to the Docker daemon >&2; exit 1")
    with pytest.raises(BuildError, match=r"docker does not work here: Cannot connect to the Docker daemon"):
        find_builder()
    _write_program(programs, "buildah", "exit 0")
    assert find_builder().name == "buildah"
    _write_program(programs, "podman", "exit 0")
    assert find_builder().name == "podman"
    assert find_builder("buildah").name == "buildah"
    _write_program(programs, "docker", "exit 0")
    assert find_builder().name == "docker"
    programs.joinpath("podman").unlink()
    with pytest.raises(BuildError, match="podman is not installed"):
        find_builder("podman")


# -- real builds -------------------------------------------------------------------------------------------------------


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return buildah or podman, with its own image store."""
    builder_path = shutil.which("buildah") or shutil.which("podman")
    if builder_path is None:
        pytest.skip("neither buildah nor podman is installed: apt-get install buildah")
    store = tmp_path / "store"
    store.mkdir()
    conf = f'[storage]\ndriver = "vfs"\ngraphroot = "{store}/graph"\nrunroot = "{store}/run"\n'
    store.joinpath("storage.conf").write_text(conf)
    monkeypatch.setenv("CONTAINERS_STORAGE_CONF", str(store / "storage.conf"))
    monkeypatch.setenv("BUILDAH_ISOLATION", "chroot")
    monkeypatch.setenv("_CONTAINERS_USERNS_CONFIGURED", "done" if os.geteuid() == 0 else "")
    name = Path(builder_path).name
    probe = tmp_path / "probe"
    probe.mkdir()
    probe.joinpath("Dockerfile").write_text("FROM scratch\nCOPY Dockerfile /\n")
    try:
        build.ensure_image(build_app(image="probe"), str(probe), push=False, builder=name)  # type: ignore[arg-type]
    except BuildError as error:
        pytest.skip(f"{name} cannot build here: {error}")
    yield name
    for root, folders, _ in os.walk(store):
        for name in folders:
            with contextlib.suppress(OSError):
                os.chmod(os.path.join(root, name), 0o700)


@pytest.fixture
def registry() -> Iterator[Registry]:
    with serving() as running:
        yield running


def test_image_is_built_and_pushed_once(
    folder: Path, engine: str, registry: Registry, capsys: pytest.CaptureFixture[str]
) -> None:
    text = folder.joinpath("app.yaml").read_text().replace("image: kits", f"image: {registry.address}/team/kits")
    folder.joinpath("app.yaml").write_text(text)
    command = ["app", "build", str(folder), "--builder", engine]
    assert main(command) == 0
    ref = f"{registry.address}/team/kits:{compute_content_tag(str(folder))}"
    output = capsys.readouterr()
    assert output.out.startswith(f"{ref}: built and pushed with {engine}")
    assert f"building {ref} with {engine}" in output.err
    assert f"team/kits:{compute_content_tag(str(folder))}" in registry.manifests
    assert registry.puts == 1

    assert main(command) == 0
    assert "built" not in capsys.readouterr().out
    folder.joinpath("train").write_text("#!/bin/sh\nexit 2\n")
    assert main([*command, "--no-push"]) == 0
    assert f": built with {engine}" in capsys.readouterr().out
    assert len([name for name in registry.manifests if "sha256" not in name]) == 1


def test_image_in_the_registry_is_not_built_again(
    folder: Path, engine: str, registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("skopeo") is None:
        pytest.skip("skopeo, with which buildah and podman users ask a registry, is not here: apt-get install skopeo")
    kits = build_app(image=f"{registry.address}/kits")
    ref = build.ensure_image(kits, str(folder), builder=engine).ref  # type: ignore[arg-type]
    other = tmp_path / "other"
    other.mkdir()
    conf = f'[storage]\ndriver = "vfs"\ngraphroot = "{other}/graph"\nrunroot = "{other}/run"\n'
    other.joinpath("storage.conf").write_text(conf)
    monkeypatch.setenv("CONTAINERS_STORAGE_CONF", str(other / "storage.conf"))  # another machine
    result = build.ensure_image(kits, str(folder), builder=engine)  # type: ignore[arg-type]
    assert (result.ref, result.built, result.pushed) == (ref, False, False)


def test_failed_build_shows_its_last_lines(folder: Path, engine: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder.joinpath("Dockerfile").write_text("FROM scratch\nCOPY nothing /app\n")
    assert main(["app", "build", str(folder), "--no-push", "--builder", engine]) == 1
    output = capsys.readouterr().err
    assert f"{engine} could not build it (status" in output
    assert "COPY nothing /app" in output
    folder.joinpath("Dockerfile").write_text("FROM scratch\nCOPY train /app\n")
    folder.joinpath("app.yaml").write_text("name: kits\nimage: 127.0.0.1:1/kits\ncommand: [x]\n")
    assert main(["app", "build", str(folder), "--builder", engine]) == 1
    output = capsys.readouterr().err
    assert f"{engine} could not push it (status" in output
    assert f"Log in with `{engine} login`" in output


def test_watch_builds_again_when_a_file_changes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_WATCH_S", 0.05)
    tags: list[str] = []
    done = threading.Event()

    def follow() -> None:
        tags.extend(compute_content_tag(str(folder)) for _ in build.watch_folder(str(folder), stop=done.is_set))

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        _wait_for(lambda: len(tags) == 1)
        folder.joinpath("ignored.log").write_text("x")
        folder.joinpath("train").write_text("#!/bin/sh\nexit 3\n")
        _wait_for(lambda: len(tags) == 2)
        folder.joinpath("train").write_text("")
        _wait_for(lambda: len(tags) == 3)
    finally:
        done.set()
        thread.join()
    assert len(set(tags)) == 3


def _wait_for(until: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < end
        time.sleep(0.02)
