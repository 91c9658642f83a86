"""What an image is built from: the files of an app's folder, and a tag that is a hash of them."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterator, Sequence

from voxlane.errors import BuildError

DOCKERFILE = "Dockerfile"
IGNORED = ".dockerignore"
_TAG = 16
_PART = 1 << 20
_SCANNED = 1 << 16
_SECRET = re.compile(
    rb"-----BEGIN [A-Z ]*PRIVATE KEY-----|\"private_key\"\s*:|aws_secret_access_key\s*=|\bA(KIA|SIA)[A-Z0-9]{16}\b"
)


def content_tag(folder: str) -> str:
    """A hash of the Dockerfile and of every file that it may copy: names, content, whether it may be run."""
    if not os.path.isfile(os.path.join(folder, DOCKERFILE)):
        raise BuildError(
            f"there is no {DOCKERFILE}", uri=folder, fix="Write one, or give `image` a tag to use one that is built"
        )
    digest = hashlib.sha256()
    for name in files(folder):
        path = os.path.join(folder, name)
        try:
            digest.update(f"{name}\0{_kind(path)}\0".encode())
            digest.update(_content(path))
        except OSError as error:
            raise BuildError(f"cannot be read: {error.strerror}", uri=path, fix=f"Or name it in {IGNORED}") from None
    return digest.hexdigest()[:_TAG]


def files(folder: str) -> list[str]:
    """Files of the build context, by their names below `folder`, sorted: all but those that .dockerignore names. The
    Dockerfile and .dockerignore itself always count."""
    rules = _rules(folder)
    found = [name for name in _walk(folder, rules) if not ignored(name, rules)]
    always = [name for name in (DOCKERFILE, IGNORED) if os.path.isfile(os.path.join(folder, name))]
    return sorted({*found, *always})


def refuse_secrets(folder: str) -> None:
    """Raise BuildError where a file that would end in the image holds a key."""
    for name in files(folder):
        path = os.path.join(folder, name)
        if not os.path.isfile(path) or os.path.islink(path):
            continue
        with open(path, "rb") as file:
            if _SECRET.search(file.read(_SCANNED)):
                raise BuildError(
                    "it holds a key, which would end in the image",
                    uri=path,
                    fix=f"Name it in {IGNORED}; pods get keys from a Secret (credentials.secret)",
                )


Rule = tuple[bool, re.Pattern[str]]


def rules_of(lines: Sequence[str]) -> list[Rule]:
    """Patterns of a .dockerignore file; True: what matches is left out, False: it is kept after all (`!`)."""
    found: list[Rule] = []
    for line in lines:
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        drop = not text.startswith("!")
        pattern = os.path.normpath(text.removeprefix("!").strip()).lstrip("/")
        if pattern != ".":
            found.append((drop, re.compile(_regex(pattern))))
    return found


def ignored(name: str, rules: Sequence[Rule]) -> bool:
    """Whether the last rule that matches a file, or a folder above it, leaves it out."""
    parts = name.split("/")
    above = ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]
    out = False
    for drop, pattern in rules:
        if drop != out and any(pattern.fullmatch(one) for one in above):
            out = drop
    return out


def _rules(folder: str) -> list[Rule]:
    try:
        with open(os.path.join(folder, IGNORED), encoding="utf-8") as file:
            return rules_of(file.readlines())
    except FileNotFoundError:
        return []


def _regex(pattern: str) -> str:
    """As Go's filepath.Match, and `**` for any number of folders."""
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
    again = any(not drop for drop, _ in rules)
    for where, folders, names in os.walk(folder):
        below = os.path.relpath(where, folder).replace(os.sep, "/")
        prefix = "" if below == "." else f"{below}/"
        links = [one for one in folders if os.path.islink(os.path.join(where, one))]
        # A folder that is left out is not entered, unless a later rule may take something of it back.
        folders[:] = sorted(
            one for one in folders if one not in links and (again or not ignored(f"{prefix}{one}", rules))
        )
        yield from (f"{prefix}{name}" for name in (*names, *links))


def _kind(path: str) -> str:
    mode = os.lstat(path).st_mode
    if stat.S_ISLNK(mode):
        return "link"
    return "program" if mode & 0o111 else "file"


def _content(path: str) -> bytes:
    if os.path.islink(path):
        return os.readlink(path).encode()
    if not os.path.isfile(path):
        return b""  # a socket or a pipe: no build takes it
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(_PART):
            digest.update(part)
    return digest.digest()
