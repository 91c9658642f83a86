"""Keep secret values out of everything that is written or printed.

A value is secret if its name is: a field that its record marks with `repr=False`, or any name that looks like
AWS_SECRET_ACCESS_KEY. The user and password in a URL and the signature in its query are secret too. `redact_words` is
for command lines, `redact` for nested data, `redact_text` for messages, and `Redactor` for the output of processes
whose secrets are known.
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

MARK = b"***"
MARK_TEXT = MARK.decode()
_SECRET_NAMES = re.compile(
    r"SECRET|TOKEN(?![A-Z])|PASSW|PASSPHRASE|CREDENTIAL|PRIVATE|KEY_?ID|CONNECTION_STRING|SAS_"
    r"|API_?KEY|ACCESS_KEY|ACCOUNT_?KEY|(^|_)KEY$|_(PASS|PAT|SAS)$|^SIG$|SIGNATURE$",
    re.IGNORECASE,
)
_LOCATIONS = re.compile(
    r"_(FILE|PATH|DIR|FOLDER|URI|URL|ENDPOINT|NAME)$|^GOOGLE_APPLICATION_CREDENTIALS$", re.IGNORECASE
)
_PASSWORD_IN_URL = re.compile(r"://[^/\s:@]*:([^/\s@]+)@")
_CREDENTIALS_IN_URL = re.compile(
    r"(?P<scheme>\b[A-Za-z][\w+.-]*://)[^/\s@'\"]+@|(?P<http>\bhttps?://)[^/\s:@]*:(?!\d+/)[^\s@'\"]+@"
)
"""The part before @ in a URL. The second form has a slash in the password, which a URL should not have."""
_SIGNATURE_IN_URL = re.compile(
    r"(?P<start>://[^\s'\"]*?[?&](?:sig|signature|x-(?:amz|goog)-(?:signature|security-token)|token)=)(?P<value>[^&\s'\"]+)",
    re.IGNORECASE,
)
"""The query of a URL that grants access, such as one with a shared access signature (SAS)."""
_ASSIGNMENT = re.compile(r"""(?P<quote>['"])?(?P<name>[\w.-]+)=""")
_ITEM = re.compile(r"""(?:[{,]\s*['"]?|['"])(?P<name>[\w.-]+)['"]?\s*:\s*""")
"""The name of an item of a mapping in JSON, in YAML or as Python prints it."""
_VALUE = re.compile(r"""(?P<quote>['"]).*?(?P=quote)|[^\s&,;'"(){}\[\]]+""", re.DOTALL)
_TOKENS = re.compile(
    r"\bA(KIA|SIA)[A-Z0-9]{16}\b|\bgh[pousr]_\w{30,}|\bgithub_pat_\w{20,}|\bglpat-[-\w]{16,}|\bhf_[A-Za-z0-9]{30,}"
    r"|\bxox[abprs]-[-\w]{10,}|(?<=\bBearer )[\w+/.~=-]{8,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|$)",
    re.DOTALL,
)
"""Secrets that are known by their form."""
_OBJECT_NAMES = ("secret", "pull_secret")
"""Fields with the name of a Kubernetes Secret, which is not secret itself."""
_marked_fields: set[str] = set()
_GOOGLE_SECRETS = ("private_key", "private_key_id", "client_secret", "refresh_token")
_PLACEHOLDER = "..."
"""Stands for the value in a command that a message suggests."""
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


def mark_secret(names: Iterable[str]) -> None:
    """Declare that fields of these names hold secrets; `voxlane.settings.record` does it for fields with repr=False."""
    _marked_fields.update(names)


def is_secret_field(name: str) -> bool:
    """Return whether a config field, perhaps with a dotted name, or an option such as --bearer-token holds a secret."""
    last = name.rpartition(".")[2].lstrip("-").replace("-", "_")
    return last in _marked_fields or (looks_secret(last) and last not in _OBJECT_NAMES)


def redact_text(text: str) -> str:
    """Return a message without the secrets that can be recognised in it: those in URLs, and the values of assignments
    and of items of mappings whose names are secret."""
    text = _TOKENS.sub(MARK_TEXT, redact_urls(text))
    for pattern in (_ASSIGNMENT, _ITEM):
        text = _redact_values(pattern, text)
    return text


def holds_secret(text: str) -> bool:
    """Return whether a secret can be recognised in the text."""
    return holds_known_secret(text) or redact_text(text) != text


def holds_known_secret(text: str) -> bool:
    """Return whether the text holds a secret that is known by its form, whatever its name."""
    return "-----BEGIN" in text or bool(_TOKENS.search(text) or _CREDENTIALS_IN_URL.search(text))


def redact_urls(text: str) -> str:
    """Return a text with the user, password and signature of each URL replaced."""
    text = _SIGNATURE_IN_URL.sub(rf"\g<start>{MARK_TEXT}", text)
    return _CREDENTIALS_IN_URL.sub(lambda match: f"{match['scheme'] or match['http']}{MARK_TEXT}@", text)


def _redact_values(names: re.Pattern[str], text: str) -> str:
    """Replace each value that follows the name of a secret."""
    output, position = "", 0
    for match in names.finditer(text):
        if match.start("name") < position or not is_secret_field(match["name"]):
            continue
        end_quote = match.groupdict().get("quote")  # of the word that holds name and value
        end = text.find(end_quote, match.end()) if end_quote else -1
        if end < 0 and (value := _VALUE.match(text, match.end())):
            end = value.end()
        if end > match.end() and text[match.end() : end] != _PLACEHOLDER:
            output += text[position : match.end()] + MARK_TEXT
            position = end
    return output + text[position:]


def redact(value: Any) -> Any:
    """Return nested plain data without the values of secret names, and with each text redacted."""
    if isinstance(value, Mapping):
        return {k: MARK_TEXT if _holds_secret(str(k), v) else redact(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(redact, value))
    return redact_text(value) if isinstance(value, str) else value


def _holds_secret(name: str, value: Any) -> bool:
    return is_secret_field(name) and isinstance(value, str | int | float) and not isinstance(value, bool)


def redact_words(words: Sequence[str]) -> list[str]:
    """Return a command line without its secrets, such as the value of store.secret_access_key=VALUE."""
    return [_redact_word(before, word) for before, word in _pairs(words)]


def _redact_word(before: str, word: str) -> str:
    name, equals, text = word.partition("=")
    if _is_option(before) and is_secret_field(before):
        return MARK_TEXT
    if equals and text and is_secret_field(name):
        return f"{name}={MARK_TEXT}"
    if equals and text.lstrip().startswith("{") and find_secrets([word]):
        import yaml

        text = yaml.safe_dump(redact(yaml.safe_load(text)), default_flow_style=True, sort_keys=False, width=1 << 20)
        return f"{name}={text.strip()}"
    return redact_urls(word)


def _is_option(word: str) -> bool:
    """Return whether the next word is the value of this option, unless the option is a switch."""
    return word.startswith("--") and "=" not in word


def name_redacted(words: Sequence[str]) -> list[str]:
    """Return the names of the fields and options whose values `redact_words` replaced."""
    redacted = ((before, word) for before, word in _pairs(words) if MARK_TEXT in word)
    return [word.partition("=")[0] if "=" in word else before for before, word in redacted]


def find_secrets(words: Sequence[str]) -> set[str]:
    """Return the secret values in the words of a command line."""
    return {value for values in _secrets_by_name(words).values() for value in values}


def name_secrets(words: Sequence[str]) -> list[str]:
    """Return the names of the fields and options that give a secret on a command line."""
    return list(_secrets_by_name(words))


def _secrets_by_name(words: Sequence[str]) -> dict[str, set[str]]:
    secrets: dict[str, set[str]] = {}
    for before, word in _pairs(words):
        name, equals, text = word.partition("=")
        is_value = _is_option(before)
        values = {match.group().partition("://")[2].rstrip("@") for match in _CREDENTIALS_IN_URL.finditer(word)}
        values |= {match["value"] for match in _SIGNATURE_IN_URL.finditer(word)}
        if values:
            secrets.setdefault(name if equals else before if is_value else "a URL", set()).update(values)
        if equals and text and is_secret_field(name):
            secrets.setdefault(name, set()).add(text)
        elif is_value and word and is_secret_field(before):
            secrets.setdefault(before, set()).add(word)
        elif equals and text.lstrip().startswith("{"):
            for inner, value in _read_mapping(text):
                secrets.setdefault(f"{name}.{inner}", set()).add(value)
    return secrets


def _pairs(words: Sequence[str]) -> Iterable[tuple[str, str]]:
    """Return each word with the one before it."""
    return zip(["", *words], words, strict=False)


def _read_mapping(text: str) -> list[tuple[str, str]]:
    """Return the dotted names and values of the secrets in the text of a YAML mapping."""
    import yaml

    try:
        content = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):  # then the command rejects it, and `redact_text` redacts its message
        return []
    return list(_iterate_secrets(content)) if isinstance(content, dict) else []


def _iterate_secrets(content: Mapping[Any, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    for name, value in content.items():
        if isinstance(value, Mapping):
            yield from _iterate_secrets(value, f"{prefix}{name}.")
        elif value is not None and is_secret_field(str(name)):
            yield f"{prefix}{name}", str(value)


def hide_from_process_list(secrets: Iterable[str]) -> None:
    """Overwrite these values in the command line that the system shows of this process, in `ps` and in dashboards.
    Python's own copy in sys.argv stays. Does nothing where the system does not allow it."""
    values = [secret.encode(errors="surrogateescape") for secret in secrets if secret]
    if not values:
        return
    import ctypes

    with contextlib.suppress(OSError, ValueError, IndexError):
        with open("/proc/self/cmdline", "rb") as file:
            arguments = file.read()
        with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
            # The name of the program, in brackets, may contain anything. arg_start is field 48 of proc(5).
            start = int(file.read().rpartition(")")[2].split()[45])
        hidden = arguments
        for value in sorted(values, key=len, reverse=True):
            hidden = hidden.replace(value, b"*" * len(value))
        if start and hidden != arguments:
            ctypes.memmove(start, hidden, len(hidden))


def collect_secrets(
    environment: Mapping[str, str], names: Iterable[str] = (), command: Sequence[str] = ()
) -> set[bytes]:
    """Return what must not be printed: the values of the variables `names` and of those that look secret, passwords in
    URLs, secrets among the words of `command`, and the keys of Google's credentials file, each also as JSON, URLs and
    base64 encode it."""
    values = {environment.get(name, "") for name in names}
    values |= {value for value in find_secrets(command) if len(value) >= _MIN_LENGTH}
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
