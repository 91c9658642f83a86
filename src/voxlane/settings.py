"""Configuration as data: one YAML, JSON or TOML file plus dotted overrides, validated where it enters.

@record
class Optimizer:
    lr: float = 0.01
    \"\"\"Initial learning rate.\"\"\"

A record is a frozen keyword-only dataclass that validates its fields whenever it is built, in code or from a file.
A wrong value raises ConfigError with the field's dotted name, the value and the fix. The same declaration makes the
flags of a command (`voxlane.cli.flags`); `Flag` says how a field appears there.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeVar, dataclass_transform, get_args

import pydantic
import pydantic.dataclasses
import yaml

from voxlane import redaction
from voxlane import uri as uris
from voxlane.errors import ConfigError

_T = TypeVar("_T")
_OVERRIDE = re.compile(r"^[A-Za-z_][\w.]*=")
_RULES = pydantic.ConfigDict(
    extra="forbid", use_attribute_docstrings=True, arbitrary_types_allowed=True, allow_inf_nan=False
)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(dataclasses.field, pydantic.Field))
def record(cls: type[_T]) -> type[_T]:
    """Make `cls` a frozen, keyword-only dataclass that validates its fields and takes the string below each field as
    its description. A field with repr=False holds a secret, which is redacted wherever its name appears."""
    validated: Any = pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=_RULES)(cls)
    redaction.mark_secret(name for name, field in validated.__pydantic_fields__.items() if field.repr is False)
    original_init = validated.__init__

    @functools.wraps(original_init)
    def init(self: Any, *args: Any, **values: Any) -> None:
        try:
            original_init(self, *args, **values)
        except pydantic.ValidationError as error:
            raise _config_error(error, cls) from None

    validated.__init__ = init
    return validated  # type: ignore[no-any-return]


def build(cls: type[_T], values: Mapping[str, Any], *, origin: str = "", labels: Mapping[str, str] | None = None) -> _T:
    """Build a record from plain nested data, such as a parsed file. Errors name the file `origin` and call a field by
    its entry in `labels`, such as the flag that sets it, instead of its dotted name."""
    try:
        result: _T = pydantic.TypeAdapter(cls).validate_python(dict(values))
    except pydantic.ValidationError as error:
        raise _config_error(error, cls, origin, labels or {}) from None
    return result


def to_plain(config: Any) -> Any:
    """Return a record as nested plain data that `build` and JSON accept."""
    return json.loads(pydantic.TypeAdapter(type(config)).dump_json(config))


# -- files and overrides -----------------------------------------------------------------------------------------------


def read_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the values of a TOML file (named .toml), or of a YAML or JSON file."""
    try:
        with open(path, encoding="utf-8") as file:
            values = tomllib.loads(file.read()) if os.fspath(path).endswith(".toml") else yaml.safe_load(file)
    except OSError as error:
        raise ConfigError(f"cannot read the config file: {error.strerror}", uri=os.fspath(path)) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"not TOML: {error}", uri=os.fspath(path)) from None
    except RecursionError:
        raise ConfigError("the config file is nested too deeply", uri=os.fspath(path)) from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: not text, or a date that no calendar has
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"not YAML or JSON{line}", uri=os.fspath(path)) from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError("expected named fields in the config file", uri=os.fspath(path), fix="Write `field: value`")
    return values


def is_override(word: str) -> bool:
    """Return whether a word of a command line is `field=value`."""
    return _OVERRIDE.match(word) is not None


def set_dotted(values: dict[str, Any], override: str) -> None:
    """Apply one `a.b=value` to nested `values`."""
    name, equals, text = override.partition("=")
    if not equals or not name.strip():
        raise ConfigError(f"expected field=value, got {override!r}", fix="Write it as optimizer.lr=0.001")
    try:
        value = yaml.safe_load(text)
    except RecursionError:
        raise ConfigError(f"{name}: the value is nested too deeply") from None
    except (yaml.YAMLError, ValueError):
        raise ConfigError(f"{override!r}: the value is not YAML", fix="Quote it") from None
    *parents, last = name.strip().split(".")
    for parent in parents:
        inner = values.setdefault(parent, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{override!r}: {parent} is a value and has no fields")
        values = inner
    values[last] = value


# -- fields ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Flag:
    """How a field of a record appears on the command line, in `Annotated`: `Annotated[bool, Flag("-l")]`."""

    short: str = ""
    """Short name, such as -l."""
    long: str = ""
    """Long name, such as --run; empty: the field's name with dashes."""
    metavar: str = ""
    """Word that stands for the value in --help; empty: made from the type."""
    positional: bool = False
    """Whether the value is given by position; a tuple takes all values that are left."""
    remainder: bool = False
    """Whether a positional tuple takes all words after `--` unparsed."""
    overrides: bool = False
    """Whether a positional tuple takes the `field=value` words, which may stand anywhere."""
    bare_value: str = ""
    """Value of the flag when it is given without one; empty: a value is required."""
    hidden: bool = False
    """Whether --help leaves it out."""
    excluded: bool = False
    """Whether the field has no flag."""


class _PathMarker:
    """Marks the type of a field whose value is a local path or a URI."""


PathOrUri = Annotated[str, _PathMarker()]
"""A local path or a URI: commands that run elsewhere get local ones as absolute paths."""
NO_FLAG = Flag(excluded=True)
"""For a field of a record that no flag sets."""
ARGUMENT = Flag(positional=True)
"""For a field that is given by position."""
REMAINDER = Flag(positional=True, remainder=True)
"""For a tuple that takes all words after `--`."""
OVERRIDES = Flag(positional=True, overrides=True, metavar="field=value")
"""For a tuple that takes the words that set config fields."""


def record_fields(cls: type[Any]) -> dict[str, Any]:
    """Return pydantic's FieldInfo of every field of a record by name; those of base classes have their description."""
    fields: dict[str, Any] = cls.__pydantic_fields__
    for name, field in fields.items():
        for base in cls.__mro__:
            inherited = getattr(base, "__pydantic_fields__", {}).get(name)
            if field.description is None and inherited is not None:
                field.description = inherited.description
    return fields


def nested_types(kind: Any) -> list[Any]:
    """Return a type with the types inside it, as in a union or a tuple, and all that `Annotated` adds to them."""
    return [kind, *(inner for argument in get_args(kind) for inner in nested_types(argument))]


def flag_of(field: Any) -> Flag:
    """Return how a field appears on the command line."""
    metadata = [*field.metadata, *nested_types(field.annotation)]
    return next((item for item in metadata if isinstance(item, Flag)), Flag())


def is_path(field: Any) -> bool:
    """Return whether a field holds local paths or URIs."""
    metadata = [*field.metadata, *nested_types(field.annotation)]
    return any(isinstance(item, _PathMarker) for item in metadata)


def make_paths_absolute(cls: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the nested values of a record with absolute local paths, for a command that runs in another folder. Paths
    may also stand in lists, such as the choices of a search."""
    result = dict(values)
    for name, field in record_fields(cls).items():
        nested, value = _nested_record(field.annotation), values.get(name)
        if nested is not None and isinstance(value, Mapping):
            result[name] = make_paths_absolute(nested, value)
        elif value is not None and is_path(field):
            result[name] = _make_absolute(value)
    return result


def _make_absolute(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _make_absolute(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_make_absolute(item) for item in value]
    if not isinstance(value, str):
        return value
    parsed = uris.parse(value)
    return (f"/{parsed.key}" if parsed.scheme == "file" else value).rstrip("/")


def iterate_fields(cls: type[Any], prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """Yield the dotted name, default and description of every field, including those of nested records."""
    for name, field in record_fields(cls).items():
        nested = _nested_record(field.annotation)
        if nested is not None:
            yield from iterate_fields(nested, f"{prefix}{name}.")
        else:
            default = field.get_default(call_default_factory=True)
            yield f"{prefix}{name}", default, " ".join((field.description or "").split())


def format_value(value: Any) -> str:
    """Return a value as a field=value override writes it."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, tuple):
        return "[" + ",".join(format_value(item) for item in value) + "]"
    return str(value)


def _nested_record(annotation: Any) -> type[Any] | None:
    """Return the record that a field holds, also an optional one."""
    kinds = (annotation, *get_args(annotation))
    return next((kind for kind in kinds if isinstance(kind, type) and hasattr(kind, "__pydantic_fields__")), None)


# -- errors ------------------------------------------------------------------------------------------------------------

_MESSAGES = {
    "int": "expected an integer",
    "float": "expected a number",
    "bool": "expected true or false",
    "tuple": "expected a list, such as [1, 2, 3]",
    "dataclass": "expected fields of its own, set as NAME.FIELD=value",
    "dict": "expected named values, such as {a: 1}",
    "mapping": "expected named values, such as {a: 1}",
}
"""Messages for errors that pydantic words in terms of Python, by the first word of their type, such as int_parsing."""


def _config_error(
    error: pydantic.ValidationError, cls: type[Any], origin: str = "", labels: Mapping[str, str] | None = None
) -> ConfigError:
    """Translate the first of pydantic's errors, naming the field by its dotted name or its label."""
    first = error.errors(include_url=False)[0]
    parts = [str(part) for part in first["loc"]]
    if parts and labels and parts[0] in labels:
        parts = [labels[parts[0]]]
    name = ".".join(parts) or cls.__name__
    more = error.error_count() - 1
    rest = f" (and {more} more)" if more else ""
    match first["type"]:
        case "unexpected_keyword_argument" | "extra_forbidden":
            return ConfigError(f"{name}: no such field{rest}", uri=origin, fix=_suggest_fix(name, cls))
        case "missing" if isinstance(first["loc"][-1], int):
            field, count = name.removesuffix(f".{first['loc'][-1]}"), len(first["input"])
            lacking = sum(e["type"] == "missing" and e["loc"][:-1] == first["loc"][:-1] for e in error.errors())
            return ConfigError(f"{field}: expected {count + lacking} values, got {count}", uri=origin)
        case "missing" | "missing_argument":
            return ConfigError(f"{name}: missing{rest}", uri=origin)
    own_error = first.get("ctx", {}).get("error")
    if not first["loc"] and not origin and isinstance(own_error, ConfigError):  # of __post_init__, complete as it is
        return own_error
    message = _MESSAGES.get(first["type"].partition("_")[0], first["msg"].removeprefix("Value error, "))
    message = message[:1].lower() + message[1:]
    message = message.replace("input should be greater", "expected a value greater")
    message = message.replace("input should be less", "expected a value less").replace("input should be", "expected")
    is_number = first["type"].startswith(("greater", "less", "finite"))  # perhaps as the text of a flag's value
    is_shown = first["type"] != "value_error" and not any(map(redaction.is_secret_field, parts))
    got = f", got {first['input'] if is_number else repr(redaction.redact(first['input']))}" if is_shown else ""
    named = f"{name}: " if first["loc"] or not origin else ""  # a file's name is enough for the file as a whole
    result = ConfigError(f"{named}{message}{got}{rest}", uri=origin)
    result.code = first["type"]
    return result


def _suggest_fix(name: str, cls: type[Any]) -> str:
    """Return the field of a record that a misspelt name means, or all fields if none is like it."""
    names = [field for field, _, _ in iterate_fields(cls)]
    nearest = suggest_field(name, names)
    tops = sorted({field.split(".")[0] for field in names} | set(names))
    return f"Did you mean {nearest}?" if nearest else f"Choose from: {', '.join(tops)}"


def suggest_field(name: str, fields: Sequence[str]) -> str:
    """Return the field that a misspelt dotted name most likely means, or an empty string. Fields of the same parent
    come first: by spelling, by abbreviation (learning_rate and lr), then by a common word."""
    parent, _, last = name.rpartition(".")
    prefix = f"{parent}." if parent else ""
    siblings = sorted({field.removeprefix(prefix).split(".")[0] for field in fields if field.startswith(prefix)})
    everything = sorted({field.split(".")[0] for field in fields} | set(fields))
    candidates = [
        *(prefix + sibling for sibling in difflib.get_close_matches(last, siblings, 1, 0.6)),
        *(prefix + sibling for sibling in siblings if _abbreviates(sibling, last) or _abbreviates(last, sibling)),
        *(field for field in fields if field.endswith(f".{last}")),
        *(prefix + sibling for sibling in siblings if set(sibling.split("_")) & set(last.split("_"))),
        *difflib.get_close_matches(name, everything, 1, 0.5),
        *difflib.get_close_matches(last, everything, 1, 0.5),
    ]
    return candidates[0] if candidates else ""


def _abbreviates(short: str, long: str) -> bool:
    """Return whether `short` is made of the initials of the words of `long`, as lr is of learning_rate."""
    words = long.split("_")
    return len(words) > 1 and short == "".join(word[:1] for word in words)
