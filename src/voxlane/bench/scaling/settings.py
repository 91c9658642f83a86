"""Settings of the scaling benchmark, and the points that it measures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, get_args

import pydantic

from voxlane.bench.field_types import Positive
from voxlane.errors import ConfigError
from voxlane.settings import ARGUMENT, NO_FLAG, OVERRIDES, Flag, PathOrUri, record, set_dotted
from voxlane.store.config import StoreConfig

Mode = Literal["weak", "strong"]
_DEFAULT_WORKERS = (1, 2, 4, 8)
Seconds = Annotated[float, pydantic.Field(gt=0, le=3600)]


@dataclass(frozen=True)
class ScalingPoint:
    """One number of workers, measured once per repetition. Weak and strong scaling may share it."""

    workers: int
    batch: int
    """Patches per worker and step."""
    steps: int
    """Optimizer steps that are measured, after the warm-up."""


@record
class ScalingSettings:
    """Options of `voxlane bench scaling`."""

    config_class: ClassVar[str] = "voxlane.train.config:TrainConfig"

    data: Annotated[PathOrUri, ARGUMENT] = ""
    """URI or folder of a prepared dataset (default: a synthetic one)."""
    overrides: Annotated[tuple[str, ...], OVERRIDES] = ()
    """Config fields of the training (default: preset=small); `voxlane train --fields` lists them."""
    worker_counts: Annotated[str | None, Flag(long="--workers", metavar="N,N,...")] = None
    """Numbers of workers (default: 1,2,4,8; none with --trials)."""
    mode: Literal["weak", "strong", "both"] = "both"
    """Kind of scaling to measure."""
    batch: Positive = 2
    """Number of patches per worker and step in mode weak."""
    total_batch: Annotated[Positive | None, Flag(long="--global-batch")] = None
    """Number of patches per step over all workers in mode strong (default: --batch times the largest number of
    workers)."""
    step_time_s: Annotated[Seconds, Flag(long="--step-time", metavar="SECONDS")] = 0.2
    """Seconds that the simulated accelerator takes for --batch patches; other batches take time in proportion."""
    steps: Positive = 40
    """Number of steps to measure."""
    warmup: Positive = 5
    """Number of steps before the measured ones; the first step sets up what later ones use."""
    repeat: Positive = 3
    """Number of repetitions."""
    real: bool = False
    """Train for real, with the config's epochs and steps_per_epoch."""
    target_dice: Annotated[float, pydantic.Field(gt=0, le=1)] | None = None
    """Report the time to this mean Dice (needs --real)."""
    run: PathOrUri = ""
    """URI or folder to keep the runs in (needs --real)."""
    trials: Annotated[int, pydantic.Field(ge=0)] = 0
    """Number of trials of a search; 0 runs none."""
    concurrent_trials: Annotated[str, Flag(long="--concurrent", metavar="N,N,...")] = "1,2"
    """Numbers of trials to run at once (needs --trials)."""
    trial_time_s: Annotated[Seconds, Flag(long="--trial-time", metavar="SECONDS")] = 10.0
    """Length of a trial in seconds (needs --trials)."""
    launcher: Literal["ray", "local"] = "ray"
    """ray: as voxlane train --workers. local: processes of this machine, without Ray."""
    address: str | None = None
    """Running Ray cluster to use: host:port, or auto."""
    out: Annotated[PathOrUri, Flag(metavar="FILE")] = "scaling-bench.json"
    """Result file; the plot is saved beside it as .png."""
    no_plot: bool = False
    """Draw no plot (needs no matplotlib)."""
    store: Annotated[StoreConfig, NO_FLAG] = StoreConfig()

    _RESULT_FIELDS: ClassVar[tuple[str, ...]] = (
        *("data", "workers", "modes", "batch", "global_batch", "step_time_s", "steps", "warmup", "repeat", "real"),
        *("target_dice", "run", "launcher", "address", "trials", "concurrent", "trial_time_s"),
    )

    def __post_init__(self) -> None:
        uneven = [count for count in self.workers if self.global_batch % count]
        if "strong" in self.modes and uneven:
            raise ConfigError(
                f"--global-batch {self.global_batch} cannot be divided evenly among {uneven[0]} workers",
                fix="Give a multiple of all of --workers, or --mode weak",
            )
        parse_counts(self.concurrent_trials, "--concurrent")
        if self.target_dice is not None and not self.real:
            raise ConfigError("--target-dice is for real training", fix="Add --real")
        if self.launcher != "ray" and (self.address is not None or self.trials):
            flag = "--trials needs" if self.address is None else "--address names"
            raise ConfigError(f"{flag} a Ray cluster", fix="Leave --launcher out")
        if self.address is not None and not self.data:
            raise ConfigError(
                "--address: the cluster's other machines cannot read a synthetic dataset on this machine",
                fix="Give DATA where all of them can reach it",
            )
        if self.address is not None and self.real and not self.run:
            raise ConfigError(
                "--address: the cluster's other machines cannot read runs on this machine",
                fix="Give --run URI where all of them can reach it",
            )

    @property
    def config_values(self) -> dict[str, Any]:
        """Fields of TrainConfig, as plain nested data."""
        values: dict[str, Any] = {}
        for override in self.overrides:
            set_dotted(values, override)
        return values

    @property
    def workers(self) -> tuple[int, ...]:
        """Numbers of workers, ascending; empty to run only trials."""
        if self.worker_counts is None:
            return () if self.trials else _DEFAULT_WORKERS
        return parse_counts(self.worker_counts, "--workers")

    @property
    def modes(self) -> tuple[Mode, ...]:
        """weak: the same batch per worker at any number of workers. strong: the same batch over all workers."""
        return get_args(Mode) if self.mode == "both" else (self.mode,)

    @property
    def global_batch(self) -> int:
        """strong: patches per step over all workers."""
        return self.batch * max(self.workers, default=1) if self.total_batch is None else self.total_batch

    @property
    def concurrent(self) -> tuple[int, ...]:
        """Numbers of trials at once, ascending."""
        return parse_counts(self.concurrent_trials, "--concurrent")

    def batch_per_worker(self, mode: Mode, workers: int) -> int:
        """Return the patches per worker and step."""
        return self.batch if mode == "weak" else self.global_batch // workers

    def step_s(self, batch: int) -> float:
        """Return the seconds that the simulated accelerator takes for a step of `batch` patches."""
        return self.step_time_s * batch / self.batch

    def to_json(self) -> dict[str, Any]:
        """Return the settings as plain data, without credentials."""
        fields = {name: getattr(self, name) for name in self._RESULT_FIELDS}
        return {**fields, "said": self.config_values, "endpoint": self.store.endpoint}


def plan_measurements(settings: ScalingSettings) -> Iterator[tuple[int, ScalingPoint]]:
    """Yield (repetition, point): every point once per repetition, each repetition starting with another one, so that a
    drift of the machine affects all alike. A point that weak and strong share is measured once."""
    pairs = [(workers, settings.batch_per_worker(m, workers)) for m in settings.modes for workers in settings.workers]
    points = [ScalingPoint(workers, batch, settings.steps) for workers, batch in dict.fromkeys(pairs)]
    for repetition in range(settings.repeat):
        start = repetition % len(points) if points else 0
        for point in [*points[start:], *points[:start]]:
            yield repetition, point


def parse_counts(text: str, flag: str) -> tuple[int, ...]:
    """Return `1,2,4` as ascending integers."""
    words: Sequence[str] = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) for word in words):
        raise ConfigError(f"{flag} {text}", fix=f"Give integers of 1 or more, such as {flag} 1,2,4")
    return tuple(sorted({int(word) for word in words}))
