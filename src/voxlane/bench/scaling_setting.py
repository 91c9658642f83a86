"""What a scaling benchmark is to do, and which points it measures. Checked here, before anything slow begins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from voxlane.errors import ConfigError

if TYPE_CHECKING:
    from voxlane.store import StoreConfig

Mode = Literal["weak", "strong"]
MODES: dict[str, tuple[Mode, ...]] = {"weak": ("weak",), "strong": ("strong",), "both": ("weak", "strong")}
LAUNCHERS = ("ray", "local")
DEFAULT_WORKERS = (1, 2, 4, 8)
DEFAULT_CONCURRENT = (1, 2)


@dataclass(frozen=True)
class Point:
    """One number of workers, measured once a repetition. Weak and strong may share it."""

    workers: int
    batch: int
    """Patches a worker and step."""
    steps: int
    """Optimizer steps that are measured, after those to warm up."""


@dataclass(frozen=True, kw_only=True)
class ScalingSetting:
    """A whole benchmark."""

    data: str
    """URI of a prepared dataset; empty: one is made."""
    said: dict[str, Any]
    """Fields of TrainConfig, as plain nested data."""
    workers: tuple[int, ...]
    """Ascending. Empty: only trials."""
    modes: tuple[Mode, ...]
    """weak: a worker's batch is the same whatever their number. strong: the batch over all workers is."""
    batch: int
    """weak: patches a worker and step."""
    global_batch: int
    """strong: patches a step over all workers."""
    step_time_s: float
    """What the simulated accelerator takes for a step of `batch` patches; for others in proportion."""
    steps: int
    """Steps measured at the largest number of workers; strong takes as many everywhere."""
    warmup: int
    """Steps before those."""
    repeat: int
    real: bool
    """Train for real, by `steps_per_epoch` and `epochs` of the config, instead of simulating the accelerator."""
    target_dice: float | None
    """real: the mean Dice to time."""
    run: str
    """real: URI of a folder to keep the runs in; empty: they are removed."""
    launcher: str
    """ray: ranks through Ray Train. local: processes of this machine, without Ray."""
    address: str | None
    """ray: a cluster to use; None: one of its own on this machine."""
    trials: int
    """Trials of a search; 0: none."""
    concurrent: tuple[int, ...]
    """Trials at once, ascending."""
    trial_time_s: float
    """How long a trial takes by itself."""
    store: StoreConfig

    def __post_init__(self) -> None:
        for name in ("batch", "global_batch", "steps", "repeat"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} {getattr(self, name)}", fix="Give 1 or more")
        for name in ("step_time_s", "trial_time_s"):
            if not 0 < getattr(self, name) <= 3600:
                flag = name.removesuffix("_s").replace("_", "-")
                raise ConfigError(f"--{flag} {getattr(self, name)}", fix="Give seconds, more than 0 and up to 3600")
        if self.warmup < 1:
            raise ConfigError(
                f"--warmup {self.warmup}", fix="Give 1 or more: the first step sets up what later ones use"
            )
        if self.trials < 0:
            raise ConfigError(f"--trials {self.trials}", fix="Give 1 or more")
        uneven = [n for n in self.workers if self.global_batch % n]
        if "strong" in self.modes and uneven:
            raise ConfigError(
                f"--global-batch {self.global_batch} does not share out evenly over {uneven[0]} workers",
                fix="Give one that all of --workers divide, or --mode weak",
            )
        if self.target_dice is not None and not self.real:
            raise ConfigError("--target-dice is for real training: nothing is learnt otherwise", fix="Add --real")
        if self.target_dice is not None and not 0 < self.target_dice <= 1:
            raise ConfigError(f"--target-dice {self.target_dice}", fix="Give a share, such as 0.8")
        if self.launcher != "ray" and (self.address is not None or self.trials):
            what = "--trials need" if self.address is None else "--address names"
            raise ConfigError(f"{what} a Ray cluster", fix="Leave --launcher out")
        if self.address is not None and (not self.data or (self.real and not self.run)):
            what, flag = ("made here", "DATA") if not self.data else ("kept here", "--run URI")
            raise ConfigError(
                f"--address: what is {what} is not there on the cluster's other machines",
                fix=f"Give {flag} where all of them can reach it",
            )

    def batch_of(self, mode: Mode, workers: int) -> int:
        """Patches a worker and step."""
        return self.batch if mode == "weak" else self.global_batch // workers

    def point(self, mode: Mode, workers: int) -> Point:
        """What is measured for a mode and a number of workers."""
        return Point(workers, self.batch_of(mode, workers), self.steps)

    def step_s(self, batch: int) -> float:
        """What the simulated accelerator takes for a step of `batch` patches."""
        return self.step_time_s * batch / self.batch

    def to_json(self) -> dict[str, Any]:
        """As plain data, without credentials."""
        return {name: value for name, value in vars(self).items() if name != "store"} | {
            "endpoint": self.store.endpoint
        }


def turns(setting: ScalingSetting) -> Iterator[tuple[int, Point]]:
    """(repetition, point): every point once a repetition, each repetition starting with another one, so that a drift of
    the machine falls on all alike. A point that weak and strong share is measured once."""
    points = list(dict.fromkeys(setting.point(mode, n) for mode in setting.modes for n in setting.workers))
    for repetition in range(setting.repeat):
        start = repetition % len(points) if points else 0
        for point in [*points[start:], *points[:start]]:
            yield repetition, point


def numbers(text: str, flag: str) -> tuple[int, ...]:
    """`1,2,4` as ascending whole numbers."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) for word in words):
        raise ConfigError(f"{flag} {text}", fix=f"Give whole numbers of 1 or more, such as {flag} 1,2,4")
    return tuple(sorted({int(word) for word in words}))


def from_options(options: Any, store: StoreConfig) -> ScalingSetting:
    """From parsed flags (see `voxlane.bench.command`)."""
    from voxlane import settings

    data, overrides = _words(options.words)
    said: dict[str, Any] = {}
    for override in overrides:
        settings.set_dotted(said, override)
    given = None if options.workers is None else numbers(options.workers, "--workers")
    workers = given if given is not None else () if options.trials else DEFAULT_WORKERS
    concurrent = DEFAULT_CONCURRENT if options.concurrent is None else numbers(options.concurrent, "--concurrent")
    most = max(workers, default=1)
    return ScalingSetting(
        data=data,
        said=said,
        workers=workers,
        modes=MODES[options.mode],
        batch=options.batch,
        global_batch=options.batch * most if options.global_batch is None else options.global_batch,
        step_time_s=options.step_time,
        steps=options.steps,
        warmup=options.warmup,
        repeat=options.repeat,
        real=options.real,
        target_dice=options.target_dice,
        run=options.run_folder or "",
        launcher=options.launcher,
        address=options.address,
        trials=options.trials,
        concurrent=concurrent,
        trial_time_s=options.trial_time,
        store=store,
    )


def _words(words: Sequence[str]) -> tuple[str, list[str]]:
    """The dataset, which may be left out, and the config fields."""
    plain = [word for word in words if "=" not in word]
    if len(plain) > 1:
        raise ConfigError(
            f"{plain[1]!r} is no field=value", fix="Give one dataset; fields are written like patch=[32,32,32]"
        )
    return "".join(plain), [word for word in words if "=" in word]
