"""Settings of the checkpoint benchmark. Environment variables of the Dataflux benchmark give the defaults."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic

from voxlane import uri as uris
from voxlane.bench.field_types import Positive
from voxlane.bench.report import in_job
from voxlane.errors import ConfigError, UsageError
from voxlane.settings import NO_FLAG, Flag, PathOrUri, record
from voxlane.store.config import StoreConfig

Strategy = Literal["voxlane", "fsspec", "filesystem"]
ACCELERATORS = ("cpu", "cuda", "gpu", "auto")
_VARIABLES = {
    "dir": "CKPT_DIR_PATH",
    "restore": "CKPT_RESTORE_PATH",
    "layers": "NUM_LAYERS",
    "saves": "NUM_SAVE_CALLS",
    "loads": "NUM_LOAD_CALLS",
    "accelerator": "ACCELERATOR",
}
"""Environment variable that sets each field whose flag is not given."""
_COUNTS = ("layers", "saves", "loads")


@record
class CheckpointSettings:
    """Options of `voxlane bench checkpoint`. They travel to every rank."""

    dir: PathOrUri = ""
    """Bucket with a prefix, or folder, to save to."""
    restore: PathOrUri = ""
    """Load this checkpoint instead of the saved ones."""
    mount: Annotated[PathOrUri, Flag(metavar="DIR")] = ""
    """Mount point of the bucket, for the strategy 'filesystem' when --dir is a bucket."""
    strategy: tuple[Strategy, ...] = ("voxlane",)
    """Strategy to measure (repeatable); several take turns."""
    format: Literal["distributed", "single"] = "distributed"
    """distributed: sharded (FSDP2), every rank writes and reads its part. single: one torch.save file, which the first
    rank writes and all read."""
    save_only: bool = False
    """Do not load, and keep the checkpoints."""
    load_only: bool = False
    """Do not save; needs --restore."""
    layers: Positive = 10
    """Number of layers of the model."""
    saves: Positive = 3
    """Number of save calls per strategy."""
    loads: Positive = 3
    """Number of load calls per strategy."""
    ranks: Positive = 1
    """Number of local processes to start; in a job, the number of its ranks."""
    accelerator: str = "cpu"
    """Device that holds the model: cpu, cuda, gpu or auto."""
    keep: bool = False
    """Keep the saved checkpoints."""
    out: Annotated[PathOrUri, Flag(metavar="FILE")] = "checkpoint-bench.json"
    """Result file; the plot is saved beside it as .png."""
    no_plot: bool = False
    """Draw no plot (needs no matplotlib)."""
    store: Annotated[StoreConfig, NO_FLAG] = StoreConfig()

    @pydantic.model_validator(mode="before")
    @classmethod
    def _fill_from_environment(cls, values: Any) -> Any:
        """Set the fields that are not given from the environment. In a job, its number of ranks counts."""
        fields = values if isinstance(values, dict) else values.kwargs
        for field, variable in _VARIABLES.items():
            if os.environ.get(variable) and field not in fields:
                fields[field] = _read_count(variable) if field in _COUNTS else os.environ[variable]
        if in_job():
            fields["ranks"] = _read_count("WORLD_SIZE")
        elif "ranks" not in fields:
            fields["ranks"] = _read_count("NUM_NODES") * _read_count("NUM_DEVICES")
        return values

    def __post_init__(self) -> None:
        if self.accelerator not in ACCELERATORS:
            raise ConfigError(
                f"unknown accelerator {self.accelerator!r}", fix=f"Choose one of {', '.join(ACCELERATORS)}"
            )
        if not self.load_only and not self.dir:
            raise UsageError(
                "voxlane bench checkpoint: missing --dir, the URI to save to",
                fix="Give --dir URI (or CKPT_DIR_PATH), such as gs://bucket/bench",
            )
        if self.load_only and not self.save_only and not self.restore:
            raise UsageError(
                "voxlane bench checkpoint: missing --restore, the checkpoint that --load-only loads",
                fix="Give --restore URI (or CKPT_RESTORE_PATH), as printed by --save-only",
            )
        for uri in (self.save_folder, self.restore_uri):
            if uri and uris.parse(uri).scheme == "memory":
                raise ConfigError("ranks do not share memory", uri=uri, fix="Use a folder or a bucket")
        if "filesystem" in self.strategy:
            self.local_folder(self.save_folder or self.restore_uri)

    @property
    def save_folder(self) -> str:
        """URI below which checkpoints are saved; empty if nothing is saved."""
        return "" if self.load_only else self.dir

    @property
    def restore_uri(self) -> str:
        """URI of the checkpoint to load; empty for those that the benchmark saved."""
        return "" if self.save_only else self.restore

    @property
    def num_save_calls(self) -> int:
        """Number of save calls per strategy; 0 with --load-only."""
        return 0 if self.load_only else self.saves

    @property
    def num_load_calls(self) -> int:
        """Number of load calls per strategy; 0 with --save-only."""
        return 0 if self.save_only else self.loads

    @property
    def keeps_checkpoints(self) -> bool:
        """Whether the saved checkpoints stay."""
        return self.keep or self.save_only

    @property
    def strategies(self) -> tuple[str, ...]:
        """Strategies to measure, each once."""
        return tuple(dict.fromkeys(self.strategy))

    @property
    def device_kind(self) -> str:
        """cpu, cuda or auto."""
        return "cuda" if self.accelerator == "gpu" else self.accelerator

    def local_folder(self, uri: str) -> str:
        """Return the folder in which the strategy `filesystem` finds what others reach as `uri`."""
        parsed = uris.parse(uri)
        if parsed.scheme == "file":
            return f"/{parsed.key}"
        if not self.mount:
            raise ConfigError(
                "the strategy 'filesystem' needs a folder",
                uri=uri,
                fix="Give --mount DIR, the mount point of the bucket",
            )
        return str(Path(self.mount, parsed.key))

    def to_json(self) -> dict[str, Any]:
        """Return the settings as plain data, without credentials."""
        return {
            "strategies": list(self.strategies),
            "format": self.format,
            "folder": self.save_folder,
            "restore": self.restore_uri,
            "mount": self.mount,
            "num_layers": self.layers,
            "num_save_calls": self.num_save_calls,
            "num_load_calls": self.num_load_calls,
            "num_ranks": self.ranks,
            "accelerator": self.device_kind,
            "keep": self.keeps_checkpoints,
            "endpoint": self.store.endpoint,
        }


def _read_count(variable: str) -> int:
    text = os.environ.get(variable) or "1"
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{variable} is {text}", fix="Give an integer, 1 or more")
    return int(text)
