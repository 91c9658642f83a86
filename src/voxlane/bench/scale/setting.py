"""What `voxlane bench simulate` is to do: its flags, checked, and the scenarios they make."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

from voxlane.bench.scale import measured, public, works
from voxlane.bench.scale.model import Cluster, Latency, Loader, Network, Scenario, Work
from voxlane.bench.scale.plan import Wish
from voxlane.bench.scale.prices import Prices
from voxlane.bench.scaling_setting import numbers
from voxlane.errors import ConfigError
from voxlane.sizes import bytes_of

Mode = Literal["whole-object", "patches"]
MODES: dict[str, tuple[Mode, ...]] = {
    "whole-object": ("whole-object",),
    "patches": ("patches",),
    "both": ("whole-object", "patches"),
}
BEYOND_THE_TABLE = 10_000
_FEWEST_STEPS = 100
"""Of patches, so that the start, when workers fill their queues, is not all there is to see."""
_THIN = {"whole-object": 1024, "patches": 8}
"""Most nodes that are simulated of each mode."""
_BULK_CONNECTIONS = 8


@dataclass(frozen=True, kw_only=True)
class SimulateSetting:
    """A whole simulation, or a plan."""

    modes: tuple[Mode, ...]
    nodes: tuple[int, ...]
    """Ascending."""
    ranks: int
    cores: float
    batch: int
    workers: int
    prefetch: int
    in_flight: int | None
    """Patches in flight in a process; None: a batch."""
    connections: int
    step_time_s: float
    steps: int | None
    """A node and epoch; None: an epoch takes each volume once."""
    epochs: int
    sync: bool
    volumes: int
    image_bytes: float
    label_bytes: float
    prepared_bytes: float
    """A volume."""
    patch: Work
    patch_source: str
    """Where its figures are from."""
    whole_cpu_s: float
    """Of a whole-object sample; 0: it is in the rate of a connection, as the public table has it."""
    network: Network
    cache_bytes: float
    warm: bool
    window_s: float
    thin: int | None
    seed: int
    prices: Prices

    def __post_init__(self) -> None:
        for name in ("volumes", "epochs", "batch", "ranks"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name} {getattr(self, name)}", fix="Give 1 or more")
        if self.seed < 0:
            raise ConfigError(f"--seed {self.seed}", fix="Give 0 or more")
        for name in ("steps", "thin", "in_flight"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} {value}", fix="Give 1 or more")
        for name in ("image_bytes", "label_bytes", "prepared_bytes"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"--{name.replace('_', '-')} {getattr(self, name):g}", fix="Give more than 0")
        for mode in self.modes:  # what is wrong with a scenario is told now
            self.scenario(mode, self.nodes[0])

    @property
    def sample_bytes(self) -> float:
        """Of a whole-object sample."""
        return self.image_bytes + self.label_bytes

    def dataset_bytes(self, mode: Mode) -> float:
        """Of all volumes, as the mode reads them."""
        return self.volumes * (self.sample_bytes if mode == "whole-object" else self.prepared_bytes)

    def cluster(self, nodes: int) -> Cluster:
        """So many nodes."""
        return Cluster(nodes=nodes, ranks=self.ranks, cores=self.cores, cache_bytes=self.cache_bytes)

    def steps_of(self, mode: Mode, nodes: int) -> int:
        """Of a rank in an epoch: whole batches, at least one."""
        if self.steps is not None:
            return self.steps
        least = 1 if mode == "whole-object" else _FEWEST_STEPS
        return max(self.volumes // (self.batch * nodes * self.ranks), least)

    def scenario(self, mode: Mode, nodes: int) -> Scenario:
        """Whole objects as the public demo reads them, or patches as our loader does."""
        steps = self.steps_of(mode, nodes) * nodes * self.ranks
        loader = Loader(batch=1, workers=self.workers, prefetch=self.prefetch, connections=1)
        work = works.demo_work(self.batch, self.image_bytes, self.label_bytes)
        if mode == "patches":
            loader = Loader(
                batch=self.batch,
                workers=self.workers,
                prefetch=self.prefetch if self.workers else 0,
                in_flight=self.in_flight or self.batch * (1 if self.workers else max(self.prefetch, 1)),
                ahead=True,
                connections=self.connections,
            )
            work = self.patch
        return Scenario(
            cluster=self.cluster(nodes),
            network=self.network,
            loader=loader,
            work=replace(work, cpu_s=self.whole_cpu_s * self.batch) if mode == "whole-object" else work,
            pieces=steps if mode == "whole-object" else steps * self.batch,
            step_time_s=self.step_time_s,
            sync=self.sync,
            dataset_bytes=self.dataset_bytes(mode),
            epochs=self.epochs,
            seed=self.seed,
            window_s=self.window_s,
            mode=mode,
        )

    def simulated_nodes(self, mode: Mode, nodes: int) -> int:
        """How many of so many are simulated."""
        return min(nodes, self.thin or _THIN[mode])

    def wish(self, mode: Mode, nodes: int) -> Wish:
        """To plan for: whole objects through our own loader, image and label at once, in parts."""
        work = self.patch
        if mode == "whole-object":
            cpu_s = self.whole_cpu_s or public.WHOLE_CPU_S_PER_BYTE * self.sample_bytes
            work = Work.of(measured.whole_objects([self.image_bytes, self.label_bytes]), cpu_s=cpu_s)
        return Wish(
            cluster=replace(self.cluster(nodes), cache_bytes=0.0),
            network=self.network,
            work=work,
            mode=mode,
            batch=self.batch,
            step_time_s=self.step_time_s,
            samples=self.steps * self.batch * nodes * self.ranks if self.steps else self.volumes,
            epochs=self.epochs,
            dataset_bytes=self.dataset_bytes(mode),
            connections=_BULK_CONNECTIONS if mode == "whole-object" else self.connections,
            seed=self.seed,
        )

    def to_json(self) -> dict[str, Any]:
        """As plain data; None where there is no limit."""
        one = self.scenario(self.modes[0], self.nodes[0]).to_json()
        plain = {name: value for name, value in vars(self).items() if name not in ("network", "patch", "prices")}
        patch = {"requests": self.patch.requests, "bytes": self.patch.bytes, "cpu_s": self.patch.all_cpu_s}
        cores = self.cores if math.isfinite(self.cores) else None
        return {**plain, "cores": cores, "network": one["network"], "patch": patch, "prices": vars(self.prices)}


def from_options(options: Any) -> SimulateSetting:
    """From parsed flags (see `voxlane.bench.scale.command`)."""
    latency = Latency(median_s=options.latency_ms / 1e3, p99_s=options.latency_p99_ms / 1e3)
    fitted = works.fit(latency)
    sizes = {name: float(bytes_of(getattr(options, name), what=f"--{name.replace('_', '-')}")) for name in _SIZES}
    modes = MODES[options.mode]
    network = Network(
        latency=latency,
        stream_bytes_per_s=_limit(options.stream_mb, 1e6, fitted.stream_bytes_per_s),
        link_bytes_per_s=_limit(options.link_gbps, 1e9 / 8, public.LINK_GBPS * 1e9 / 8),
        bucket_bytes_per_s=_limit(options.bucket_gbps, 1e9 / 8, fitted.bucket_bytes_per_s),
        bucket_requests_per_s=_limit(options.bucket_requests, 1.0, math.inf),
    )
    patch, source = _patch(options)
    return SimulateSetting(
        modes=modes,
        nodes=_nodes(options),
        ranks=options.ranks,
        cores=options.cores,
        batch=options.batch,
        workers=options.workers,
        prefetch=options.prefetch,
        in_flight=options.in_flight,
        connections=options.connections,
        step_time_s=options.step_time,
        steps=options.steps,
        epochs=options.epochs,
        sync=not options.no_sync,
        volumes=options.volumes,
        image_bytes=sizes["image_bytes"],
        label_bytes=sizes["label_bytes"],
        prepared_bytes=sizes["prepared_bytes"],
        patch=patch,
        patch_source=source,
        whole_cpu_s=options.whole_cpu_s,
        network=network,
        cache_bytes=sizes["cache"],
        warm=options.warm,
        window_s=options.window,
        thin=options.thin,
        seed=options.seed,
        prices=Prices(usd_per_10k_requests=options.usd_per_10k_requests, usd_per_gb=options.usd_per_gb),
    )


_SIZES = ("image_bytes", "label_bytes", "prepared_bytes", "cache")


def _limit(given: float | None, unit: float, default: float) -> float:
    """A flag's rate; 0 is none."""
    if given is None:
        return default
    if not given >= 0:
        raise ConfigError(f"a rate of {given:g}", fix="Give more than 0, or 0 for no limit")
    return given * unit or math.inf


def _nodes(options: Any) -> tuple[int, ...]:
    if options.nodes is not None:
        return numbers(options.nodes, "--nodes")
    if options.plan:
        raise ConfigError("a plan is for some number of nodes", fix="Give --nodes N")
    return tuple(row.nodes for row in public.TABLE) + ((BEYOND_THE_TABLE,) if options.mode != "whole-object" else ())


def _patch(options: Any) -> tuple[Work, str]:
    """What a patch takes, by flags, a measured run, or what we measured."""
    source = "benchmarks/results/segmentation_loading.json"
    work = works.patch_work()
    if options.measured:
        result = measured.load(options.measured)
        epochs = [epoch for epoch in result["epochs"] if epoch["mode"] == "patches"]
        if not epochs:
            raise ConfigError(
                "no patches were measured there", uri=options.measured, fix="Give one of a prepared dataset"
            )
        work, source = measured.work_of(result, epochs[0]), options.measured
    if options.patch_requests is not None or options.patch_bytes is not None or options.patch_cpu_s is not None:
        source += ", and flags"
        before = works.patch_work().requests - public.PATCH_REQUESTS  # for foreground and indexes, which are added
        size = work.bytes
        if options.patch_bytes is not None:
            size = float(bytes_of(options.patch_bytes, what="--patch-bytes"))
        work = works.patch_work(
            requests=max(work.requests - before, 1.0) if options.patch_requests is None else options.patch_requests,
            size=size,
            cpu_s=work.all_cpu_s if options.patch_cpu_s is None else options.patch_cpu_s,
        )
    return work, source
