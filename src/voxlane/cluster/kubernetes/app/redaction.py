"""Keep secret values out of what a command prints."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Mapping
from urllib.parse import quote

MARK = b"***"
_SECRET_NAMES = re.compile(
    r"SECRET|TOKEN(?![A-Z])|PASSW|PASSPHRASE|CREDENTIAL|PRIVATE|KEY_?ID|CONNECTION_STRING|SAS_"
    r"|(^|_)(API)?KEY$|_(PASS|PAT|SAS)$",
    re.IGNORECASE,
)
_LOCATIONS = re.compile(
    r"_(FILE|PATH|DIR|FOLDER|URI|URL|ENDPOINT|NAME)$|^GOOGLE_APPLICATION_CREDENTIALS$", re.IGNORECASE
)
_PASSWORD_IN_URL = re.compile(r"://[^/\s:@]*:([^/\s@]+)@")
_GOOGLE_SECRETS = ("private_key", "private_key_id", "client_secret", "refresh_token")
_MIN_LENGTH = 6
"""A shorter value is a word such as `true` or `none`, which would be redacted from every sentence."""
_MIN_LINE_LENGTH = 16
"""Lines of at least this length in a secret of several lines, such as a key, are also redacted one by one."""


def looks_secret(name: str) -> bool:
    """Return whether a variable of this name probably holds a secret: AWS_SECRET_ACCESS_KEY does, but not
    AWS_WEB_IDENTITY_TOKEN_FILE, which holds a path."""
    return bool(_SECRET_NAMES.search(name)) and not is_location(name)


def is_location(name: str) -> bool:
    """Return whether a variable of this name holds a location, perhaps that of a secret."""
    return bool(_LOCATIONS.search(name))


def collect_secrets(environment: Mapping[str, str], names: Iterable[str] = ()) -> set[bytes]:
    """Return what must not be printed: the values of the variables `names` and of those that look secret, passwords in
    URLs, and the keys of Google's credentials file, each also as JSON, URLs and base64 encode it."""
    values = {environment.get(name, "") for name in names}
    values |= {value for name, value in environment.items() if looks_secret(name) and len(value) >= _MIN_LENGTH}
    values |= {match[1] for value in environment.values() for match in _PASSWORD_IN_URL.finditer(value)}
    if path := environment.get("GOOGLE_APPLICATION_CREDENTIALS"):
        values |= _read_google_secrets(path)
    return {form for value in values if value.strip() for form in _encode(value.strip())}


def _read_google_secrets(path: str) -> set[str]:
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except (OSError, ValueError):
        return set()  # the command will report what is wrong with it
    values = [content.get(name) for name in _GOOGLE_SECRETS] if isinstance(content, dict) else []
    return {value for value in values if isinstance(value, str)}


def _encode(value: str) -> set[bytes]:
    """Return a secret in all forms in which it may be printed."""
    raw = value.encode(errors="surrogateescape")
    forms = {raw, json.dumps(value)[1:-1].encode(), quote(raw, safe="").encode(), base64.b64encode(raw)}
    return forms | {line for line in raw.splitlines() if len(line) >= _MIN_LINE_LENGTH}


class Redactor:
    """Replaces secrets in a stream, also those that arrive in pieces. Only an end of the data that may be the start of
    a secret is held back until more arrives."""

    def __init__(self, secrets: Iterable[bytes]) -> None:
        # Of several with the same start, the longest is replaced.
        self._secrets = sorted(secrets, key=len, reverse=True)
        self._pattern = re.compile(b"|".join(map(re.escape, self._secrets))) if self._secrets else None
        self._held_back = b""

    def feed(self, data: bytes) -> bytes:
        """Return what may be printed now."""
        return self._redact(self._held_back + data) if self._pattern else data

    def finish(self) -> bytes:
        """Return what was held back, when no more data arrives."""
        return self._redact(self._held_back, is_last=True) if self._pattern else b""

    def _redact(self, data: bytes, is_last: bool = False) -> bytes:
        assert self._pattern is not None
        safe_end = len(data) if is_last else self._find_partial_secret(data)
        output, position = b"", 0
        for match in self._pattern.finditer(data):
            if match.start() >= safe_end:
                break
            output += data[position : match.start()] + MARK
            position = match.end()
        output += data[position : max(position, safe_end)]
        self._held_back = data[max(position, safe_end) :]
        return output

    def _find_partial_secret(self, data: bytes) -> int:
        """Return the start of the longest end of `data` that is the start of a secret."""
        first = len(data)
        for secret in self._secrets:
            position = data.find(secret[:1], max(0, len(data) - len(secret) + 1))
            while 0 <= position < first:
                if secret.startswith(data[position:]):
                    first = position
                    break
                position = data.find(secret[:1], position + 1)
        return first
