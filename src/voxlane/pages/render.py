"""Render the templates of this package."""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined, TemplateError
from markupsafe import Markup

from voxlane.errors import RunError
from voxlane.pages import formatting
from voxlane.sizes import format_plural


@dataclass(frozen=True)
class Tile:
    """One of the figures at the top of a page."""

    title: str
    value: str
    note: str
    """Short explanation below the figure."""
    colour: str = ""
    """CSS colour of the swatch before the title; empty for none."""


def render(template: str, **values: Any) -> str:
    """Return the page of a template, such as `report.html.j2`; values are escaped unless they are `Markup`."""
    return _environment().get_template(template).render(**values)


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("voxlane.pages"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "base64": lambda body: base64.b64encode(body).decode(),
        "bytes": formatting.format_bytes,
        "csp_hash": _hash_source,
        "count": formatting.format_count,
        "duration": formatting.format_duration,
        "number": formatting.format_number,
        "plural": format_plural,
        "time": formatting.format_time,
        "value": formatting.format_value,
        "yaml": _to_yaml,
    }
    environment.globals["include_raw"] = _read_file
    return environment


@contextlib.contextmanager
def explain_wrong_content(uri: str) -> Iterator[None]:
    """Raise RunError if the page of the files at `uri` cannot be made, because they do not hold what voxlane writes."""
    try:
        yield
    except (TypeError, ValueError, AttributeError, LookupError, TemplateError) as error:
        raise RunError(
            f"its files do not have the content that voxlane writes ({type(error).__name__}: {error})",
            uri=uri,
            fix="Restore them",
        ) from error


def _hash_source(text: str) -> str:
    """Return how a Content-Security-Policy names an inline script or style sheet."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _read_file(name: str) -> Markup:
    """Return a style sheet or script of the templates' folder as it is."""
    return Markup(resources.files("voxlane.pages").joinpath("templates", name).read_text("utf-8"))


class _FlatDumper(yaml.SafeDumper):  # type: ignore[misc]  # PyYAML has no types
    """Writes every list on one line, as sizes and ranges are usually written."""

    def represent_list(self, data: Any) -> yaml.Node:
        return self.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=True)


_FlatDumper.add_representer(list, _FlatDumper.represent_list)
_FlatDumper.add_representer(tuple, _FlatDumper.represent_list)


def _to_yaml(value: Any) -> str:
    text: str = yaml.dump(value, Dumper=_FlatDumper, sort_keys=False, allow_unicode=True)
    return text
