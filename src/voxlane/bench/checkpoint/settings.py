"""Settings of the checkpoint benchmark. `dataflux_names` fills in those that are not given."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pydantic

from voxlane import uri as uris
from voxlane.bench.checkpoint.dataflux_names import STRATEGY_NAMES, DatafluxOptions, fill_settings
from voxlane.bench.field_types import Positive, Seconds
from voxlane.errors import ConfigError, UsageError
from voxlane.settings import NO_FLAG, Flag, PathOrUri, record
from voxlane.store.config import StoreConfig

Strategy = Literal["voxlane", "fsspec", "filesystem", "dataflux_fsdp", "fsspec_fsdp", "fsdp"]
ACCELERATORS = ("cpu", "cuda", "gpu", "auto")
_FOLDER = "checkpoints"
"""Folder below --dir that holds the checkpoints, as in Dataflux's benchmarks."""


@record
class CheckpointSettings(DatafluxOptions):
    """Options of `voxlane bench checkpoint`. They travel to every rank."""

    flag_group: ClassVar[str] = ""

    dir: PathOrUri = ""
    """Bucket with a prefix, or folder, to save to."""
    restore: PathOrUri = ""
    """Load this checkpoint instead of the saved ones; DIR/checkpoints stands for those saved below DIR."""
    mount: Annotated[PathOrUri, Flag(metavar="DIR")] = ""
    """Mount point of the bucket, for the strategy 'filesystem' when --dir is a bucket."""
    strategy: tuple[Strategy, ...] = ("voxlane",)
    """Strategy to measure (repeatable); several take turns. The last three are Dataflux's names for the first three."""
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
    save_only_latest: bool = False
    """Save each checkpoint over the one before."""
    use_async: Annotated[bool, Flag(long="--async")] = False
    """Save in the background (only the strategy voxlane), and report how long each save held up the ranks (blocked) and
    when it was complete (stored)."""
    steps_per_save: Positive = 1
    """Number of simulated training steps during each save in the background (--async)."""
    step_time: Seconds = 0.0
    """Seconds that each of these steps takes."""
    disable_multipart: bool = False
    """Upload each file in one request (only --strategy voxlane --format single)."""
    clear_kernel_cache: bool = False
    """Drop saved files from the page cache before they are loaded (only the strategy filesystem)."""
    layer_size: Positive | None = None
    """Save --padding-size tensors of this many rows of 1000 values instead of the transformer."""
    padding_size: Positive = 4000
    """Number of tensors; only with --layer-size."""
    ranks: Positive = 1
    """Number of local processes to start; in a job, the number of its ranks. Not given: one per GPU that holds the
    model, or NUM_NODES x NUM_DEVICES."""
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
        """Set the fields that are not given from Dataflux's names for them."""
        fill_settings(values if isinstance(values, dict) else values.kwargs)
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
        self._check_combinations()
        for uri in (self.save_folder, self.restore_uri):
            if uri and uris.parse(uri).scheme == "memory":
                raise ConfigError("ranks do not share memory", uri=uri, fix="Use a folder or a bucket")
        if "filesystem" in self.strategies:
            self.local_folder(self.save_folder or self.restore)

    def _check_combinations(self) -> None:
        """Raise for options that do not go together."""
        folder = self.dir.rstrip("/")
        if self._restores_folder and not (self.save_only or self.load_only or self._restored_folder == folder):
            raise ConfigError(
                f"this run saves to {folder}/{_FOLDER} and cannot load its checkpoints from elsewhere",
                uri=self.restore,
                fix="Leave out --restore (CKPT_RESTORE_PATH), or name one checkpoint, or add --load-only",
            )
        if self.use_async and set(self.strategies) != {"voxlane"}:
            raise ConfigError("only the strategy 'voxlane' saves in the background", fix="Leave out --async, or others")
        if self.disable_multipart and (set(self.strategies), self.format) != ({"voxlane"}, "single"):
            raise ConfigError(
                "only single files of the strategy 'voxlane' can be uploaded in one request",
                fix="Add --format single, or leave out --disable-multipart",
            )

    @property
    def save_folder(self) -> str:
        """URI below which checkpoints are saved; empty if nothing is saved."""
        return "" if self.load_only else self.dir

    @property
    def restore_uri(self) -> str:
        """URI of the checkpoint to load; empty for those that the benchmark saves or has saved below --dir."""
        return "" if self.save_only or self._restores_folder else self.restore

    @property
    def _restores_folder(self) -> bool:
        """Whether --restore names the folder of all checkpoints: DIR/checkpoints, or DIR itself."""
        restore = self.restore.rstrip("/")
        return restore.endswith(f"/{_FOLDER}") or (bool(restore) and restore == self.dir.rstrip("/"))

    @property
    def _restored_folder(self) -> str:
        return self.restore.rstrip("/").removesuffix(f"/{_FOLDER}")

    def checkpoint_uri(self, strategy: str, index: int) -> str:
        """Return the URI at which a strategy saves its checkpoint number `index` and from which it loads it again."""
        folder = self._restored_folder if self.load_only else self.dir.rstrip("/")
        number = 0 if self.save_only_latest else index % self.saves
        return f"{folder}/{_FOLDER}/{strategy}-{self.format}/ckpt-{number}"

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
        return tuple(dict.fromkeys(STRATEGY_NAMES.get(name, name) for name in self.strategy))

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
            "layer_size": self.layer_size,
            "padding_size": self.padding_size,
            "async": self.use_async,
            "steps_per_save": self.steps_per_save,
            "step_time": self.step_time,
            "disable_multipart": self.disable_multipart,
            "clear_kernel_cache": self.clear_kernel_cache,
            "num_save_calls": self.num_save_calls,
            "num_load_calls": self.num_load_calls,
            "num_ranks": self.ranks,
            "accelerator": self.device_kind,
            "keep": self.keeps_checkpoints,
            "endpoint": self.store.endpoint,
        }
