"""Images: built by docker, podman or buildah, whichever is there, and tagged by what they are built from."""

from __future__ import annotations

import collections
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from voxlane.app.config import App
from voxlane.app.context import content_tag, refuse_secrets
from voxlane.errors import BuildError

Builder = Literal["docker", "podman", "buildah"]
_LAST_LINES = 15
_ANSWER_S = 20.0
_WATCH_S = 1.0
_INSTALL = "Install docker, podman or buildah, or give `image` the tag of one that is built"


@dataclass(frozen=True)
class Engine:
    """A program that builds images."""

    name: Builder
    path: str

    def build_words(self, folder: str, ref: str) -> list[str]:
        """What builds the folder's Dockerfile as `ref`."""
        if self.name == "buildah":
            return [self.path, "bud", "--layers", "--tag", ref, folder]
        return [self.path, "build", "--tag", ref, folder]

    def has_words(self, ref: str) -> list[str]:
        """What ends well if this machine has the image."""
        if self.name == "buildah":
            return [self.path, "inspect", "--type", "image", ref]
        return [self.path, "image", "inspect", ref]

    def pushed_words(self, ref: str) -> list[str] | None:
        """What ends well if the registry has the image; None where nothing here can ask it."""
        if self.name == "docker":
            return [self.path, "manifest", "inspect", ref]
        skopeo = shutil.which("skopeo")  # podman and buildah themselves can only pull
        return [skopeo, "inspect", "--raw", *self._plain(ref), f"docker://{ref}"] if skopeo else None

    def push_words(self, ref: str) -> list[str]:
        """What sends the image to its registry."""
        return [self.path, "push", *self._plain(ref), ref]

    def _plain(self, ref: str) -> list[str]:
        """A registry on this machine speaks HTTP, which docker knows by itself."""
        here = ref.split("/")[0].split(":")[0] in ("localhost", "127.0.0.1")
        return ["--tls-verify=false"] if here and self.name != "docker" else []


def find_engine(wanted: Builder | None = None) -> Engine:
    """The first of docker, podman and buildah that answers, or the one that is wanted."""
    names: Sequence[Builder] = [wanted] if wanted else get_args(Builder)
    mute = []
    for name in names:
        path = shutil.which(name)
        if path is None:
            continue
        # docker's client is often there without its daemon.
        said = _quiet([path, "version" if name != "buildah" else "--version"])
        if said is None:
            return Engine(name, path)
        mute.append(f"{name} does not work here: {said}")
    if mute:
        raise BuildError("; ".join(mute), fix=_INSTALL)
    missing = f"{wanted} is not here" if wanted else "neither docker nor podman nor buildah is here"
    raise BuildError(missing, fix=_INSTALL)


def reference(app: App, folder: str) -> str:
    """The app's image, with its tag."""
    return f"{app.image}:{content_tag(folder)}" if app.built else app.image


@dataclass(frozen=True)
class Built:
    """What was done about an image."""

    ref: str
    engine: str | None
    """None: nothing had to be built."""
    built: bool
    pushed: bool
    seconds: float


def ensure(
    app: App,
    folder: str,
    *,
    push: bool = True,
    wanted: Builder | None = None,
    say: Callable[[str], None] = lambda line: None,
    output: Callable[[str], None] = lambda line: None,
) -> str:
    """The app's image with its tag, which is there afterwards: in the registry, or, without `push`, on this machine.
    One with a tag of its own is taken as it is. `say` hears what goes on, `output` every line of the builder."""
    return make(app, folder, push=push, wanted=wanted, say=say, output=output).ref


def make(
    app: App,
    folder: str,
    *,
    push: bool = True,
    wanted: Builder | None = None,
    say: Callable[[str], None] = lambda line: None,
    output: Callable[[str], None] = lambda line: None,
) -> Built:
    """As `ensure`; tells what was done."""
    begin = time.monotonic()
    ref = reference(app, folder)
    if not app.built:
        return Built(ref, None, False, False, 0.0)
    refuse_secrets(folder)
    engine = find_engine(wanted)
    here = _quiet(engine.has_words(ref)) is None
    asked = engine.pushed_words(ref) if push and not here else None
    if asked is not None and _quiet(asked) is None:
        return Built(ref, None, False, False, time.monotonic() - begin)
    if not here:
        say(f"building {ref} with {engine.name}")
        _run(engine.build_words(folder, ref), f"{engine.name} could not build it", ref, output)
    if push:
        say(f"pushing {ref}")
        fix = f"Log in with `{engine.name} login`, or check `image`: the registry must be one that you may push to"
        _run(engine.push_words(ref), f"{engine.name} could not push it", ref, output, fix)
    return Built(ref, engine.name, not here, push, time.monotonic() - begin)


def watch(folder: str, *, stop: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """A turn at once, and one whenever a file of the image or app.yaml has changed, until `stop` says so."""
    last: tuple[str, int] | None = None
    now: tuple[str, int] | None
    while not stop():
        try:
            now = (content_tag(folder), os.stat(os.path.join(folder, "app.yaml")).st_mtime_ns)
        except (BuildError, OSError):  # a file that an editor is just replacing
            now = last
        if now is not None and now != last:
            last = now
            yield
        else:
            time.sleep(_WATCH_S)


def _quiet(words: Sequence[str]) -> str | None:
    """None if a command ends well; else the last thing that it said."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=_ANSWER_S, check=False)
    except subprocess.TimeoutExpired:
        return "it does not answer"
    except OSError as error:
        return str(error.strerror)
    lines = (done.stderr or done.stdout).strip().splitlines()
    return None if done.returncode == 0 else (lines[-1] if lines else f"status {done.returncode}")


def _run(words: Sequence[str], what: str, ref: str, output: Callable[[str], None], fix: str = "") -> None:
    """Run a command and pass on each line of it; its last ones are in the error."""
    last: collections.deque[str] = collections.deque(maxlen=_LAST_LINES)
    process = subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            last.append(line.rstrip())
            output(line.rstrip())
        status = process.wait()
    finally:
        if process.poll() is None:  # interrupted: the builder goes too
            process.terminate()
            process.wait()
        process.stdout.close()
    if status != 0:
        shown = "\n".join(f"  {line}" for line in last)
        lines = f"Its last lines:\n{shown}" if last else ""
        raise BuildError(f"{what} (status {status})", uri=ref, fix=f"{fix}. {lines}" if fix and lines else fix or lines)
