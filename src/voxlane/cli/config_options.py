"""Options that commands share: access to the bucket, config files, `field=value` overrides and progress bars."""

from __future__ import annotations

import dataclasses
import itertools
import os
import tempfile
from collections.abc import Mapping, Sequence
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from voxlane import redaction
from voxlane.cli.help import format_rows
from voxlane.errors import ConfigError
from voxlane.settings import (
    OVERRIDES,
    Flag,
    PathOrUri,
    format_value,
    is_override,
    iterate_fields,
    read_file,
    record,
    set_dotted,
)

if TYPE_CHECKING:
    from voxlane.store import StoreConfig


@record
class StoreOptions:
    """How to reach the bucket."""

    flag_group: ClassVar[str] = "Access to the bucket"

    config: Annotated[PathOrUri | None, Flag(metavar="FILE")] = None
    """TOML file whose [store] table holds StoreConfig fields."""
    endpoint: Annotated[str | None, Flag(metavar="URL")] = None
    """URL of the server, if it is not the cloud's own."""
    anonymous: bool = False
    """Send no credentials (public buckets)."""

    def store_config(self) -> StoreConfig:
        """Return the settings of the file, if any, with those of the flags."""
        from voxlane.store import StoreConfig

        return self._apply_to(StoreConfig.load(self.config) if self.config else StoreConfig())

    def _apply_to(self, store: StoreConfig) -> StoreConfig:
        changes: dict[str, Any] = {"endpoint": self.endpoint} if self.endpoint else {}
        changes |= {"anonymous": True} if self.anonymous else {}
        return dataclasses.replace(store, **changes)


@record
class StoreFileOptions(StoreOptions):
    """How to reach the bucket, for commands whose config file may hold more."""

    config: Annotated[PathOrUri | None, Flag(metavar="FILE")] = None
    """YAML, JSON or TOML file whose `store` part holds StoreConfig fields for the bucket."""

    def read(self) -> dict[str, Any]:
        """Return the values of the config file, or none."""
        return read_config(self.config) if self.config else {}

    def load(
        self, overrides: Sequence[str] = (), values: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], StoreConfig]:
        """Return the config values of the file, or `values` instead, with the overrides, and how to reach the bucket,
        which the `store` part of the values says."""
        from voxlane.store import StoreConfig

        values = apply_overrides(self.read() if values is None else values, overrides)
        part = values.pop("store", None) or {}
        if not isinstance(part, dict):
            raise ConfigError(f"store: expected fields, got {part!r}", fix="Write store.endpoint=URL, or such lines")
        return values, self._apply_to(StoreConfig.from_dict({str(name): value for name, value in part.items()}))

    def store_config(self) -> StoreConfig:
        """Return how to reach the bucket."""
        return self.load()[1]


@record
class FieldsFileOptions(StoreFileOptions):
    """How to reach the bucket, for commands whose config file holds their fields."""

    config: Annotated[PathOrUri | None, Flag(metavar="FILE")] = None
    """YAML, JSON or TOML file of config fields; its `store` part holds StoreConfig fields for the bucket."""


@record
class ProgressOptions:
    """Options of every command that shows progress bars."""

    no_progress: bool = False
    """Show no progress bars."""

    @property
    def progress(self) -> bool | None:
        """False: no bars; None: bars on a terminal."""
        return False if self.no_progress else None


@record
class ConfiguredOptions(ProgressOptions):
    """Options of every command that has config fields."""

    config_class: ClassVar[str] = ""
    """Import path of the record that --fields lists."""
    presets: ClassVar[str] = ""
    """Import path of the defaults of each preset."""

    overrides: Annotated[tuple[str, ...], OVERRIDES] = ()
    """Config fields; --fields lists them."""
    fields: bool = False
    """Print every config field with its default and its meaning."""


def check_no_secrets(words: Sequence[str], target: str) -> None:
    """Raise ConfigError if a command line that becomes part of `target` holds a secret."""
    if names := redaction.name_secrets(words) or [redaction.redact_text(w) for w in words if redaction.holds_secret(w)]:
        raise ConfigError(
            f"{names[0]}: {target} must not hold a secret",
            fix="Give it as a variable such as AWS_SECRET_ACCESS_KEY, as a profile (store.profile=NAME) or in a file "
            "(--config FILE) that only you can read",
        )


def read_config(path: str) -> dict[str, Any]:
    """Return the values of a config file, which may lie in a bucket, as a search's best.yaml does."""
    if "://" not in path:
        return read_file(path)
    from voxlane import uri as uris
    from voxlane.store import Store

    with tempfile.NamedTemporaryFile(suffix=os.path.splitext(path)[1]) as copy:
        copy.write(bytes(Store(path).get(uris.parse(path).key)))
        copy.flush()
        return read_file(copy.name)


def apply_overrides(values: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Set `field=value` words in nested values, and return those."""
    for override in overrides:
        set_dotted(values, override)
    return values


def format_config_fields(name: str, command_class: type[Any], words: Sequence[str]) -> str:
    """Return the text of --fields of a command, with the defaults of the preset that the command line chooses."""
    presets_path = getattr(command_class, "presets", "")
    presets = resolve_name(presets_path) if presets_path else {}
    config = dict(itertools.pairwise(words)).get("--config")
    values = apply_overrides(read_config(config) if config else {}, [word for word in words if is_override(word)])
    preset = values.get("preset")
    if presets and preset is not None and preset not in presets:
        raise ConfigError(f"preset: unknown preset {preset!r}", fix=f"Choose from: {', '.join(presets)}")
    defaults = {**presets[preset], "preset": preset} if presets and preset is not None else {}
    text = format_fields(resolve_name(command_class.config_class), defaults)
    return f"Fields of voxlane {name}, as field=value or in a --config file:\n{text}\n"


def format_fields(cls: type[Any], defaults: Mapping[str, Any] | None = None) -> str:
    """Return name=default and description of every field. `defaults` are nested values, such as those of a preset, that
    replace the record's own."""
    rows = []
    for name, default, description in iterate_fields(cls):
        value: Any = defaults or {}
        for part in name.split("."):
            value = value.get(part, default) if isinstance(value, Mapping) else default
        shown = "" if repr(value) == "PydanticUndefined" else f"={format_value(value)}"
        rows.append((f"{name}{shown}", description))
    return format_rows(rows, 110, 36)
