"""Configuration as data: one YAML, JSON or TOML file plus dotted overrides, checked where it enters.

@record
class Optimizer:
    lr: float = 0.01
    \"\"\"Initial learning rate.\"\"\"

A record is a frozen keyword-only dataclass whose fields are checked whenever one is built, in code or from a file;
a wrong value raises ConfigError with the field's dotted name, the value and what would fit.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar, dataclass_transform, get_args

import pydantic
import pydantic.dataclasses
import yaml

from voxlane.errors import ConfigError

_T = TypeVar("_T")
_RULES = pydantic.ConfigDict(
    extra="forbid", use_attribute_docstrings=True, arbitrary_types_allowed=True, allow_inf_nan=False
)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(dataclasses.field, pydantic.Field))
def record(cls: type[_T]) -> type[_T]:
    """Make `cls` a frozen, keyword-only dataclass that checks its fields and documents them by the string below
    each."""
    made: Any = pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=_RULES)(cls)
    checked = made.__init__

    @functools.wraps(checked)
    def init(self: Any, *args: Any, **values: Any) -> None:
        try:
            checked(self, *args, **values)
        except pydantic.ValidationError as error:
            raise _refusal(error, cls, values) from None

    made.__init__ = init
    return made  # type: ignore[no-any-return]


def build(cls: type[_T], values: Mapping[str, Any], *, origin: str = "") -> _T:
    """A record from plain nested data, such as a parsed file; `origin` names it in errors."""
    try:
        made: _T = pydantic.TypeAdapter(cls).validate_python(dict(values))
    except pydantic.ValidationError as error:
        raise _refusal(error, cls, values, origin) from None
    return made


def plain(made: Any) -> Any:
    """A record as nested plain data that `build` and JSON take."""
    return json.loads(pydantic.TypeAdapter(type(made)).dump_json(made))


def read_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The values of a YAML or JSON (which is YAML) file, or of one named .toml."""
    try:
        with open(path, encoding="utf-8") as file:
            values = tomllib.loads(file.read()) if os.fspath(path).endswith(".toml") else yaml.safe_load(file)
    except OSError as error:
        raise ConfigError(f"cannot read the config file: {error.strerror}", uri=os.fspath(path)) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"not TOML: {error}", uri=os.fspath(path)) from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: not text, or a date that no calendar has
        where = getattr(error, "problem_mark", None)
        line = f", line {where.line + 1}" if where else ""
        raise ConfigError(f"not YAML or JSON{line}", uri=os.fspath(path)) from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError("a config file holds named fields", uri=os.fspath(path), fix="Write `field: value` lines")
    return values


def load(cls: type[_T], path: str | os.PathLike[str] | None = None, overrides: Sequence[str] = ()) -> _T:
    """A record from a file, if one is given, and overrides such as `optimizer.lr=0.001` or `patch=[96,96,96]`, whose
    values are YAML."""
    values = read_file(path) if path is not None else {}
    for override in overrides:
        set_dotted(values, override)
    return build(cls, values, origin="" if path is None else os.fspath(path))


def set_dotted(values: dict[str, Any], override: str) -> None:
    """Apply one `a.b=value` to nested `values`."""
    name, equals, text = override.partition("=")
    if not equals or not name.strip():
        raise ConfigError(f"{override!r} is no override", fix="Write field=value, such as optimizer.lr=0.001")
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):
        raise ConfigError(f"{override!r}: the value is not YAML", fix="Quote it") from None
    *parents, last = name.strip().split(".")
    for parent in parents:
        inner = values.setdefault(parent, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{override!r}: {parent} holds a value, not fields")
        values = inner
    values[last] = value


def fields(cls: type[Any], prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """Dotted name, default and description of every field, nested records unfolded; for --help."""
    for name, field in cls.__pydantic_fields__.items():
        nested = _record_in(field.annotation)
        if nested is not None:
            yield from fields(nested, f"{prefix}{name}.")
        else:
            default = field.get_default(call_default_factory=True)
            yield f"{prefix}{name}", default, " ".join((field.description or "").split())


def help_text(cls: type[Any], width: int = 110) -> str:
    """One line or more a field: name=default and what it does."""
    import textwrap

    lines = []
    for name, default, description in fields(cls):
        shown = "" if repr(default) == "PydanticUndefined" else f"={_show(default)}"
        head = f"  {name}{shown}"
        lines += [head] if len(head) > 34 else []
        first = " " * 36 if len(head) > 34 else f"{head:<36}"
        lines += textwrap.wrap(description, width, initial_indent=first, subsequent_indent=" " * 36) or [first]
    return "\n".join(lines)


def _show(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, tuple):
        return "[" + ",".join(_show(v) for v in value) + "]"
    return str(value)


def _record_in(annotation: Any) -> type[Any] | None:
    """The record a field holds, also an optional one."""
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and hasattr(kind, "__pydantic_fields__"):
            return kind
    return None


_WORDS = {
    "int_parsing": "a whole number is wanted",
    "int_type": "a whole number is wanted",
    "int_from_float": "a whole number is wanted",
    "float_parsing": "a number is wanted",
    "float_type": "a number is wanted",
    "bool_parsing": "true or false is wanted",
    "bool_type": "true or false is wanted",
    "tuple_type": "a list is wanted, such as [1, 2, 3]",
    "dataclass_type": "it has fields of its own, to be set as NAME.FIELD=value",
    "dict_type": "named values are wanted, such as {a: 1}",
    "mapping_type": "named values are wanted, such as {a: 1}",
}
"""For what pydantic says in terms of Python."""


def _refusal(error: pydantic.ValidationError, cls: type[Any], values: Any, origin: str = "") -> ConfigError:
    """The first thing wrong, by its dotted name."""
    first = error.errors(include_url=False)[0]
    name = ".".join(str(part) for part in first["loc"]) or cls.__name__
    more = error.error_count() - 1
    rest = f" (and {more} more)" if more else ""
    if first["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        known = [field for field, _, _ in fields(cls)]
        tops = sorted({field.split(".")[0] for field in known} | set(known))
        near = [field for field in known if field.endswith(f".{name}")][:1]
        near = near or difflib.get_close_matches(name, tops, 1, 0.5)
        if not near:
            near = difflib.get_close_matches(name.rsplit(".", 1)[-1], tops, 1, 0.5)
        fix = f"Did you mean {near[0]}?" if near else f"There are: {', '.join(tops)}"
        return ConfigError(f"{name}: no such field{rest}", uri=origin, fix=fix)
    if first["type"] == "missing" and isinstance(first["loc"][-1], int):
        name = ".".join(str(part) for part in first["loc"][:-1])
        return ConfigError(f"{name}: too few values, {len(first['input'])}{rest}", uri=origin)
    if first["type"] in ("missing", "missing_argument"):
        return ConfigError(f"{name}: missing{rest}", uri=origin)
    said = _WORDS.get(first["type"], first["msg"].removeprefix("Value error, "))
    said = said[:1].lower() + said[1:]
    got = "" if first["type"] == "value_error" else f", not {first['input']!r}"
    at = f"{name}: " if first["loc"] or not origin else ""  # of a file as a whole: its name says enough
    return ConfigError(f"{at}{said}{got}{rest}", uri=origin)
