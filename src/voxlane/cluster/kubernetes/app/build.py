"""Build and push an app's image with docker, podman or buildah, whichever works, tagged by its content."""

from __future__ import annotations

import collections
import contextlib
import hashlib
import os
import re
import shutil
import stat
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from voxlane.cluster.kubernetes.app.config import FILE, App
from voxlane.errors import BuildError

BuilderName = Literal["docker", "podman", "buildah"]
DOCKERFILE = "Dockerfile"
IGNORE_FILE = ".dockerignore"
Rule = tuple[bool, re.Pattern[str]]
_TAG_LENGTH = 16
_SCANNED_BYTES = 1 << 16
_SECRET = re.compile(
    rb"-----BEGIN [A-Z ]*PRIVATE KEY-----|\"private_key\"\s*:|aws_secret_access_key\s*=|\bA(KIA|SIA)[A-Z0-9]{16}\b"
)
_LAST_LINES = 15
_PROBE_TIMEOUT_S = 20.0
_WATCH_S = 1.0
_INSTALL = "Install docker, podman or buildah, or give `image` the tag of an existing image"


@dataclass(frozen=True)
class ImageBuilder:
    """A program that builds images."""

    name: BuilderName
    path: str

    def build_command(self, folder: str, ref: str) -> list[str]:
        """Return the command that builds the folder's Dockerfile as `ref`."""
        if self.name == "buildah":
            return [self.path, "bud", "--layers", "--tag", ref, folder]
        return [self.path, "build", "--tag", ref, folder]

    def local_probe(self, ref: str) -> list[str]:
        """Return a command that succeeds if this machine has the image."""
        if self.name == "buildah":
            return [self.path, "inspect", "--type", "image", ref]
        return [self.path, "image", "inspect", ref]

    def registry_probe(self, ref: str) -> list[str] | None:
        """Return a command that succeeds if the registry has the image; None if no program here can ask it."""
        if self.name == "docker":
            return [self.path, "manifest", "inspect", ref]
        skopeo = shutil.which("skopeo")  # podman and buildah themselves can only pull
        return [skopeo, "inspect", "--raw", *self._tls_options(ref), f"docker://{ref}"] if skopeo else None

    def push_command(self, ref: str) -> list[str]:
        """Return the command that pushes the image to its registry."""
        return [self.path, "push", *self._tls_options(ref), ref]

    def _tls_options(self, ref: str) -> list[str]:
        """Return options for a registry on this machine, which speaks HTTP; docker needs none."""
        is_local = ref.split("/", maxsplit=1)[0].split(":", maxsplit=1)[0] in ("localhost", "127.0.0.1")
        return ["--tls-verify=false"] if is_local and self.name != "docker" else []


def find_builder(name: BuilderName | None = None) -> ImageBuilder:
    """Return the builder of that name, or the first of docker, podman and buildah that works."""
    names: Sequence[BuilderName] = [name] if name else get_args(BuilderName)
    failures = []
    for candidate in names:
        path = shutil.which(candidate)
        if path is None:
            continue
        # docker's client is often installed without a running daemon.
        failure = _probe([path, "version" if candidate != "buildah" else "--version"])
        if failure is None:
            return ImageBuilder(candidate, path)
        failures.append(f"{candidate} does not work here: {failure}")
    missing = f"{name} is not installed" if name else "none of docker, podman and buildah is installed"
    raise BuildError("; ".join(failures) or missing, fix=_INSTALL)


def get_image_reference(app: App, folder: str) -> str:
    """Return the app's image, with its tag."""
    return f"{app.image}:{compute_content_tag(folder)}" if app.is_built else app.image


@dataclass(frozen=True)
class BuildResult:
    """What was done to make an image available."""

    ref: str
    builder: str | None
    """Name of the builder; None if nothing had to be built."""
    built: bool
    pushed: bool
    seconds: float


def ensure_image(
    app: App,
    folder: str,
    *,
    push: bool = True,
    builder: BuilderName | None = None,
    say: Callable[[str], None] = lambda line: None,
    output: Callable[[str], None] = lambda line: None,
) -> BuildResult:
    """Make sure that the app's image exists: in the registry, or, without `push`, on this machine. An image with a tag
    of its own is used as it is. `say` gets progress messages, `output` every line that the builder prints."""
    started = time.monotonic()
    ref = get_image_reference(app, folder)
    if not app.is_built:
        return BuildResult(ref, None, False, False, 0.0)
    reject_secrets(folder)
    program = find_builder(builder)
    is_local = _probe(program.local_probe(ref)) is None
    registry_probe = program.registry_probe(ref) if push and not is_local else None
    if registry_probe is not None and _probe(registry_probe) is None:
        return BuildResult(ref, None, False, False, time.monotonic() - started)
    if not is_local:
        say(f"building {ref} with {program.name}")
        _run(program.build_command(folder, ref), f"{program.name} could not build it", ref, output)
    if push:
        say(f"pushing {ref}")
        fix = f"Log in with `{program.name} login`, or check `image`: you must be allowed to push to its registry"
        _run(program.push_command(ref), f"{program.name} could not push it", ref, output, fix)
    return BuildResult(ref, program.name, not is_local, push, time.monotonic() - started)


def watch_folder(folder: str, *, stop: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Yield at once, and whenever a file of the image or app.yaml has changed, until `stop` returns True."""
    last: tuple[str, int] | None = None
    while not stop():
        with contextlib.suppress(BuildError, OSError):  # an editor may be replacing a file right now
            current = (compute_content_tag(folder), os.stat(os.path.join(folder, FILE)).st_mtime_ns)
            if current != last:
                last = current
                yield
                continue
        time.sleep(_WATCH_S)


def _probe(command: Sequence[str]) -> str | None:
    """Run a command; return None if it succeeds, otherwise the last line that it printed."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_PROBE_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return "it does not answer"
    except OSError as error:
        return str(error.strerror)
    lines = (done.stderr or done.stdout).strip().splitlines()
    return None if done.returncode == 0 else (lines[-1] if lines else f"status {done.returncode}")


def _run(command: Sequence[str], failure: str, ref: str, output: Callable[[str], None], fix: str = "") -> None:
    """Run a command and pass each of its lines to `output`; the error contains the last ones."""
    last_lines: collections.deque[str] = collections.deque(maxlen=_LAST_LINES)
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            last_lines.append(line.rstrip())
            output(line.rstrip())
        status = process.wait()
    finally:
        if process.poll() is None:  # interrupted: end the builder too
            process.terminate()
            process.wait()
        process.stdout.close()
    if status != 0:
        lines = "Its last lines:\n" + "\n".join(f"  {line}" for line in last_lines) if last_lines else ""
        raise BuildError(f"{failure} (status {status})", uri=ref, fix=". ".join(part for part in (fix, lines) if part))


# -- build context -----------------------------------------------------------------------------------------------------


def compute_content_tag(folder: str) -> str:
    """Return a hash of the Dockerfile and of every file that it may copy: names, content and executable bits."""
    if not os.path.isfile(os.path.join(folder, DOCKERFILE)):
        fix = "Write one, or give `image` a tag to use an existing image"
        raise BuildError(f"there is no {DOCKERFILE}", uri=folder, fix=fix)
    digest = hashlib.sha256()
    for name in list_files(folder):
        path = os.path.join(folder, name)
        try:
            kind, content = _read_content(path)
        except OSError as error:
            fix = f"Make it readable, or list it in {IGNORE_FILE}"
            raise BuildError(f"cannot be read: {error.strerror}", uri=path, fix=fix) from None
        digest.update(f"{name}\0{kind}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:_TAG_LENGTH]


def _read_content(path: str) -> tuple[str, bytes]:
    """Return whether a file is a link, a program or another file, and its target or a hash of its content."""
    mode = os.lstat(path).st_mode
    if stat.S_ISLNK(mode):
        return "link", os.readlink(path).encode()
    kind = "program" if mode & 0o111 else "file"
    if not stat.S_ISREG(mode):
        return kind, b""  # a socket or a pipe, which no builder copies
    with open(path, "rb") as file:
        return kind, hashlib.file_digest(file, "sha256").digest()


def list_files(folder: str) -> list[str]:
    """Return the sorted names, relative to `folder`, of the files in the build context: all but those that
    .dockerignore excludes. The Dockerfile and .dockerignore itself are always included."""
    rules: list[Rule] = []
    with (
        contextlib.suppress(FileNotFoundError),
        open(os.path.join(folder, IGNORE_FILE), encoding="utf-8") as file,
    ):
        rules = parse_rules(file.readlines())
    included = [name for name in _walk(folder, rules) if not is_ignored(name, rules)]
    always = [name for name in (DOCKERFILE, IGNORE_FILE) if os.path.isfile(os.path.join(folder, name))]
    return sorted({*included, *always})


def reject_secrets(folder: str) -> None:
    """Raise BuildError if a file that would become part of the image contains a key."""
    for name in list_files(folder):
        path = os.path.join(folder, name)
        if not os.path.isfile(path) or os.path.islink(path):
            continue
        with open(path, "rb") as file:
            if _SECRET.search(file.read(_SCANNED_BYTES)):
                fix = f"List it in {IGNORE_FILE}; pods get keys from a Secret (credentials.secret)"
                raise BuildError("it contains a key, which would become part of the image", uri=path, fix=fix)


def parse_rules(lines: Sequence[str]) -> list[Rule]:
    """Parse a .dockerignore file: (True, pattern) excludes what matches, (False, pattern) includes it again (`!`)."""
    rules: list[Rule] = []
    for line in lines:
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        pattern = os.path.normpath(text.removeprefix("!").strip()).lstrip("/")
        if pattern != ".":
            rules.append((not text.startswith("!"), re.compile(_to_regex(pattern))))
    return rules


def is_ignored(name: str, rules: Sequence[Rule]) -> bool:
    """Return whether the last rule that matches a file, or a folder above it, excludes it."""
    parts = name.split("/")
    prefixes = ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]
    ignored = False
    for excludes, pattern in rules:
        if excludes != ignored and any(pattern.fullmatch(prefix) for prefix in prefixes):
            ignored = excludes
    return ignored


def _to_regex(pattern: str) -> str:
    """Convert a pattern of Go's filepath.Match, in which `**` also matches any number of folders."""
    text, i = "", 0
    while i < len(pattern):
        char = pattern[i]
        if pattern.startswith("**/", i):
            text, i = text + "(?:.*/)?", i + 3
        elif pattern.startswith("**", i):
            text, i = text + ".*", i + 2
        elif char == "[" and (end := pattern.find("]", i + 2)) > 0:
            inner = pattern[i + 1 : end]
            text, i = text + "[" + inner.replace("\\", "\\\\") + "]", end + 1
        else:
            text += {"*": "[^/]*", "?": "[^/]"}.get(char, re.escape(char))
            i += 1
    return text


def _walk(folder: str, rules: Sequence[Rule]) -> Iterator[str]:
    has_inclusions = any(not excludes for excludes, _ in rules)
    for root, folders, names in os.walk(folder):
        relative = os.path.relpath(root, folder).replace(os.sep, "/")
        prefix = "" if relative == "." else f"{relative}/"
        links = [name for name in folders if os.path.islink(os.path.join(root, name))]
        # An excluded folder is not entered, unless a later rule may include a part of it again.
        entered = {name for name in folders if has_inclusions or not is_ignored(f"{prefix}{name}", rules)}
        folders[:] = sorted(entered - {*links})
        yield from (f"{prefix}{name}" for name in (*names, *links))
