"""What a checkpoint benchmark is to do: flags first, then the environment variables that users of the Dataflux
benchmark know. Checked here, before anything slow begins."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from voxlane import uri as uris
from voxlane.errors import ConfigError

if TYPE_CHECKING:
    from voxlane.store import StoreConfig

STRATEGIES = ("voxlane", "fsspec", "filesystem")
FORMATS = ("distributed", "single")
ACCELERATORS = ("cpu", "cuda", "gpu", "auto")
DEFAULT_LAYERS = 10
DEFAULT_CALLS = 3


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A whole benchmark. It travels to every rank."""

    strategies: tuple[str, ...]
    """Of STRATEGIES; they take turns."""
    format: str
    """distributed: sharded over the ranks, many files. single: one `torch.save` file, written by the first rank and
    read by all."""
    folder: str
    """URI below which checkpoints are saved; empty when nothing is."""
    restore: str
    """URI of one checkpoint to load instead of what was saved; empty: what was saved."""
    mount: str
    """Folder for the strategy `filesystem` when `folder` is a bucket; may be empty."""
    num_layers: int
    num_save_calls: int
    """0: only load."""
    num_load_calls: int
    """0: only save."""
    num_ranks: int
    """All ranks, of all machines."""
    accelerator: str
    """cpu, cuda or auto."""
    keep: bool
    """Leave the saved checkpoints where they are."""
    store: StoreConfig

    def __post_init__(self) -> None:
        for name, flag in (("num_layers", "--layers"), ("num_ranks", "--ranks")):
            if getattr(self, name) < 1:
                raise ConfigError(f"{flag} {getattr(self, name)}", fix="Give 1 or more")
        if self.num_save_calls and not self.folder:
            raise ConfigError("no URI to save to", fix="Give --dir URI (or CKPT_DIR_PATH), such as gs://bucket/bench")
        if not self.num_save_calls and not self.restore:
            raise ConfigError(
                "nothing to load: --load-only needs the URI of a checkpoint",
                fix="Give --restore URI (or CKPT_RESTORE_PATH): one that --save-only printed",
            )
        for place in (self.folder, self.restore):
            if place and uris.parse(place).scheme == "memory":
                raise ConfigError("ranks do not share memory", uri=place, fix="Use a folder or a bucket")
        if "filesystem" in self.strategies:
            self.local_folder(self.folder or self.restore)

    def local_folder(self, uri: str) -> str:
        """The folder that the strategy `filesystem` uses for what others reach as `uri`."""
        parsed = uris.parse(uri)
        if parsed.scheme == "file":
            return f"/{parsed.key}"
        if not self.mount:
            raise ConfigError(
                "the strategy 'filesystem' works on a folder", uri=uri, fix="Give --mount DIR, where the bucket is"
            )
        return str(Path(self.mount, parsed.key))

    def to_json(self) -> dict[str, Any]:
        """As plain data, without credentials."""
        plain = {name: value for name, value in vars(self).items() if name != "store"}
        return {**plain, "strategies": list(self.strategies), "endpoint": self.store.endpoint}


def from_options(options: Any, store: StoreConfig, environment: Mapping[str, str] = os.environ) -> Setting:
    """From parsed flags (see `voxlane.bench.command`); what was not given comes from the environment."""
    read = _Environment(environment)
    num_nodes = read.number(None, "NUM_NODES", 1, "NUM_NODES")
    num_devices = read.number(None, "NUM_DEVICES", 1, "NUM_DEVICES")
    num_ranks = options.ranks if options.ranks is not None else num_nodes * num_devices
    if in_job(environment):
        num_ranks = read.number(None, "WORLD_SIZE", 1, "WORLD_SIZE")
    accelerator = options.accelerator or environment.get("ACCELERATOR") or "cpu"
    if accelerator not in ACCELERATORS:
        raise ConfigError(f"unknown accelerator {accelerator!r}", fix=f"Choose one of {', '.join(ACCELERATORS)}")
    saves = read.number(options.saves, "NUM_SAVE_CALLS", DEFAULT_CALLS, "--saves")
    loads = read.number(options.loads, "NUM_LOAD_CALLS", DEFAULT_CALLS, "--loads")
    return Setting(
        strategies=tuple(dict.fromkeys(options.strategy or ["voxlane"])),
        format=options.format,
        folder="" if options.load_only else options.dir or environment.get("CKPT_DIR_PATH", ""),
        restore="" if options.save_only else options.restore or environment.get("CKPT_RESTORE_PATH", ""),
        mount=options.mount or "",
        num_layers=read.number(options.layers, "NUM_LAYERS", DEFAULT_LAYERS, "--layers"),
        num_save_calls=0 if options.load_only else saves,
        num_load_calls=0 if options.save_only else loads,
        num_ranks=num_ranks,
        accelerator="cuda" if accelerator == "gpu" else accelerator,
        keep=options.keep or options.save_only,
        store=store,
    )


def in_job(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is one rank of a job that a launcher started (torchrun and those that do as it does)."""
    return all(environment.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"))


class _Environment:
    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = variables

    def number(self, given: int | None, name: str, default: int, flag: str) -> int:
        """A count of at least 1: as given, else from the variable, else the default."""
        where, text = flag, str(given)
        if given is None:
            where, text = name, self._variables.get(name) or str(default)
        if not text.isdecimal() or int(text) < 1:
            raise ConfigError(f"{where} is {text}", fix="Give a whole number, 1 or more")
        return int(text)
