"""Secret values, kept out of what a command prints."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Mapping
from urllib.parse import quote

MARK = b"***"
_NAMES = re.compile(
    r"SECRET|TOKEN(?![A-Z])|PASSW|PASSPHRASE|CREDENTIAL|PRIVATE|KEY_?ID|CONNECTION_STRING|SAS_"
    r"|(^|_)(API)?KEY$|_(PASS|PAT|SAS)$",
    re.IGNORECASE,
)
_PLACES = re.compile(r"_(FILE|PATH|DIR|FOLDER|URI|URL|ENDPOINT|NAME)$|^GOOGLE_APPLICATION_CREDENTIALS$", re.IGNORECASE)
_IN_URL = re.compile(r"://[^/\s:@]*:([^/\s@]+)@")
_GOOGLE = ("private_key", "private_key_id", "client_secret", "refresh_token")
_SHORTEST = 6
"""Characters. A value shorter than this in a variable that only looks secret is a word such as `true` or `none`; it
would be starred out of every sentence."""
_SHORTEST_LINE = 16
"""Characters from which on a single line of a secret of many lines, as keys are, gives it away."""


def looks_secret(name: str) -> bool:
    """Whether a variable of this name is taken for a secret: AWS_SECRET_ACCESS_KEY is, AWS_WEB_IDENTITY_TOKEN_FILE,
    which says where one is, is not."""
    return bool(_NAMES.search(name)) and not says_where(name)


def says_where(name: str) -> bool:
    """Whether a variable of this name holds a place, perhaps that of a secret."""
    return bool(_PLACES.search(name))


def secrets_of(environment: Mapping[str, str], names: Iterable[str] = ()) -> set[bytes]:
    """What must not be printed: the values of the variables `names` and of those that look secret, passwords in URLs,
    and the keys of Google's credentials file, each also as JSON, URLs and base64 write it."""
    values = {environment.get(name, "") for name in names}
    values |= {value for name, value in environment.items() if looks_secret(name) and len(value) >= _SHORTEST}
    values |= {found[1] for value in environment.values() for found in _IN_URL.finditer(value)}
    if path := environment.get("GOOGLE_APPLICATION_CREDENTIALS"):
        values |= _of_google(path)
    return {form for value in values if value.strip() for form in _forms(value.strip())}


def _of_google(path: str) -> set[str]:
    try:
        with open(path, encoding="utf-8") as file:
            held = json.load(file)
    except (OSError, ValueError):
        return set()  # the command will say what is wrong with it
    found = [held.get(name) for name in _GOOGLE] if isinstance(held, dict) else []
    return {value for value in found if isinstance(value, str)}


def _forms(value: str) -> set[bytes]:
    raw = value.encode(errors="surrogateescape")
    forms = {raw, json.dumps(value)[1:-1].encode(), quote(raw, safe="").encode(), base64.b64encode(raw)}
    return forms | {line for line in raw.splitlines() if len(line) >= _SHORTEST_LINE}


class Hider:
    """One stream with its secrets starred out, also those that come in pieces.

    Only an end that may be the beginning of a secret is held back, until more comes."""

    def __init__(self, secrets: Iterable[bytes]) -> None:
        self._secrets = sorted(secrets, key=len, reverse=True)  # the longest of several that begin alike is starred out
        self._any = re.compile(b"|".join(map(re.escape, self._secrets))) if self._secrets else None
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """What may be shown now."""
        return self._shown(self._held + data) if self._any else data

    def end(self) -> bytes:
        """What was held back, when nothing more comes."""
        return self._shown(self._held, last=True) if self._any else b""

    def _shown(self, data: bytes, last: bool = False) -> bytes:
        assert self._any is not None
        safe = len(data) if last else self._begun(data)
        shown, at = b"", 0
        for found in self._any.finditer(data):
            if found.start() >= safe:
                break
            shown += data[at : found.start()] + MARK
            at = found.end()
        shown += data[at : max(at, safe)]
        self._held = data[max(at, safe) :]
        return shown

    def _begun(self, data: bytes) -> int:
        """Where the longest end of `data` begins that a secret could go on from."""
        first = len(data)
        for secret in self._secrets:
            at = data.find(secret[:1], max(0, len(data) - len(secret) + 1))
            while 0 <= at < first:
                if secret.startswith(data[at:]):
                    first = at
                    break
                at = data.find(secret[:1], at + 1)
        return first
