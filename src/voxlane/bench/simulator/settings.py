"""Settings of the simulator, and the scenarios that they make."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, get_args

import pydantic

from voxlane.bench.field_types import SIZE, Count, CountOrZero, Limit, NotNegative, Positive, Seconds, default_size
from voxlane.bench.scaling.settings import parse_counts
from voxlane.bench.simulator import measured_runs, public_benchmark
from voxlane.bench.simulator.model import Latency, Loader, Prices, Scenario, SimulatedCluster, StorageNetwork, Work
from voxlane.errors import ConfigError
from voxlane.settings import Flag, PathOrUri, record

Mode = Literal["whole-object", "patches"]
BEYOND_THE_TABLE = 10_000
_FEWEST_STEPS = 100
"""Steps of patches at least, so that the start, when workers fill their queues, is not all there is to see."""
MOST_NODES = {"whole-object": 1024, "patches": 8}
"""Largest number of nodes that is simulated in each mode."""
_PATCH_SOURCE = "benchmarks/results/segmentation_loading.json"


@record
class SimulatorSettings:
    """Options of `voxlane bench simulate`."""

    check: bool = False
    """Simulate the measured runs in the RESULT files of voxlane bench loading and report the error."""
    results: Annotated[tuple[PathOrUri, ...], Flag(positional=True, metavar="RESULT")] = ()
    """Result files of voxlane bench loading, for --check."""
    plan: bool = False
    """Plan for --nodes."""
    mode: Literal["both", "whole-object", "patches"] = "both"
    """What a sample reads."""
    node_counts: Annotated[str | None, Flag(long="--nodes", metavar="N,N,...")] = None
    """Numbers of nodes (default: 32,64,...,1024 and, for patches, 10000)."""
    ranks: Count = 1
    """Number of training processes per node."""
    cores: Limit = float(public_benchmark.CORES)
    """Number of cores per node."""
    link_gbps: NotNegative = public_benchmark.LINK_GBPS
    """Bandwidth of a node in Gbps (1e9 bits/s); 0: unlimited."""
    cache_bytes: Annotated[float, SIZE, Flag(long="--cache", metavar="SIZE")] = default_size("0")
    """Size of the cache on a node's disk."""
    warm: bool = False
    """Start with full caches."""
    step_time_s: Annotated[Seconds, Flag(long="--step-time", metavar="SECONDS")] = public_benchmark.STEP_TIME_S
    """Seconds of a step."""
    batch: Count = public_benchmark.BATCH
    """Number of samples per rank and step."""
    steps: Positive | None = None
    """Number of steps of a rank per epoch (default: each volume once; patches: 100 or more)."""
    epochs: Positive = 1
    """Number of epochs."""
    no_sync: bool = False
    """Do not make ranks wait for one another at every step."""
    workers: CountOrZero = public_benchmark.WORKERS
    """Number of loader processes per rank."""
    prefetch: CountOrZero = public_benchmark.PREFETCH
    """Number of batches that a worker prepares in advance."""
    in_flight: Count | None = None
    """patches: number of samples in flight per process (default: a batch)."""
    connections: Count = 64
    """patches: number of requests of a process at a time."""
    volumes: Positive = public_benchmark.VOLUMES
    """Number of volumes in the dataset."""
    image_bytes: Annotated[float, SIZE, Flag(metavar="SIZE")] = default_size("150M")
    """Size of a whole image."""
    label_bytes: Annotated[float, SIZE, Flag(metavar="SIZE")] = default_size("37500k")
    """Size of a whole label."""
    whole_cpu_s: Seconds = 0.0
    """Processor seconds of a whole sample; 0: they are part of the rate of a connection, as in the public table."""
    prepared_bytes: Annotated[float, SIZE, Flag(metavar="SIZE")] = default_size("43130k")
    """Size of a prepared volume."""
    measured: Annotated[PathOrUri, Flag(metavar="RESULT")] = ""
    """Take the cost of a patch from this result file of voxlane bench loading."""
    patch_bytes: Annotated[float | None, SIZE, Flag(metavar="SIZE")] = None
    """Size of the chunks that a patch reads (default: 3.16M)."""
    patch_requests: NotNegative | None = None
    """Number of requests for those chunks (default: 8.975)."""
    patch_cpu_s: Seconds | None = None
    """Processor seconds of a patch (default: 0.035)."""
    latency_ms: NotNegative = 30.0
    """Median milliseconds to the first byte."""
    latency_p99_ms: NotNegative = 150.0
    """99th percentile of the milliseconds to the first byte."""
    stream_mb: NotNegative | None = None
    """MB/s (1e6 bytes) of one connection (default: fitted to the public table); 0: unlimited."""
    bucket_gbps: NotNegative | None = None
    """Bandwidth of the bucket in Gbps (default: fitted to the public table); 0: unlimited."""
    bucket_requests: NotNegative | None = None
    """Requests per second that the bucket accepts (default: unlimited)."""
    seed: Annotated[int, pydantic.Field(ge=0)] = 0
    """Seed of everything that is drawn."""
    thin: Positive | None = None
    """Largest number of nodes to simulate, with their share of the bucket (default: 1024; 8 in mode patches)."""
    window_s: Annotated[Limit, Flag(long="--window", metavar="SECONDS")] = 60.0
    """Seconds over which the highest rates are averaged."""
    usd_per_gb: NotNegative = 0.02
    """Price of a GB that leaves for another region."""
    usd_per_10k_requests: NotNegative = 0.004
    """Price of 10,000 reads."""
    out: Annotated[PathOrUri, Flag(metavar="FILE")] = "scale.json"
    """Result file; the plot is saved beside it as .png."""
    no_plot: bool = False
    """Draw no plot (needs no matplotlib)."""

    _RESULT_FIELDS: ClassVar[tuple[str, ...]] = (
        *("modes", "nodes", "ranks", "batch", "workers", "prefetch", "in_flight", "connections", "step_time_s"),
        *("steps", "epochs", "sync", "volumes", "image_bytes", "label_bytes", "prepared_bytes", "patch_source"),
        *("whole_cpu_s", "cache_bytes", "warm", "window_s", "thin", "seed"),
    )

    def __post_init__(self) -> None:
        if self.check:
            return
        for name in ("image", "label", "prepared"):
            if not (size := getattr(self, f"{name}_bytes")) > 0:
                raise ConfigError(f"--{name}-bytes {size:g}", fix="Give more than 0")
        for mode in self.modes:  # reports what is wrong with a scenario before anything slow begins
            self.scenario(mode, self.nodes[0])

    @property
    def modes(self) -> tuple[Mode, ...]:
        """Modes to simulate."""
        return get_args(Mode) if self.mode == "both" else (self.mode,)

    @property
    def nodes(self) -> tuple[int, ...]:
        """Numbers of nodes, ascending."""
        if self.node_counts is not None:
            return parse_counts(self.node_counts, "--nodes")
        if self.plan:
            raise ConfigError("a plan needs a number of nodes", fix="Give --nodes N")
        beyond = (BEYOND_THE_TABLE,) if self.mode != "whole-object" else ()
        return (*(row.nodes for row in public_benchmark.TABLE), *beyond)

    @property
    def sync(self) -> bool:
        """Whether ranks wait for one another at every step."""
        return not self.no_sync

    @property
    def prices(self) -> Prices:
        """Prices of requests and egress."""
        return Prices(usd_per_10k_requests=self.usd_per_10k_requests, usd_per_gb=self.usd_per_gb)

    @cached_property
    def network(self) -> StorageNetwork:
        """The network and the bucket."""
        latency = Latency(median_s=self.latency_ms / 1e3, p99_s=self.latency_p99_ms / 1e3)
        fitted = public_benchmark.fit_rates(latency)
        return StorageNetwork(
            latency=latency,
            stream_bytes_per_s=_parse_rate(self.stream_mb, 1e6, fitted["stream_bytes_per_s"]),
            link_bytes_per_s=_parse_rate(self.link_gbps, 1e9 / 8, math.inf),
            bucket_bytes_per_s=_parse_rate(self.bucket_gbps, 1e9 / 8, fitted["bucket_bytes_per_s"]),
            bucket_requests_per_s=_parse_rate(self.bucket_requests, 1.0, math.inf),
        )

    @property
    def patch_source(self) -> str:
        """Where the cost of a patch comes from."""
        flags = (self.patch_requests, self.patch_bytes, self.patch_cpu_s)
        changed = ", and flags" if any(value is not None for value in flags) else ""
        return (self.measured or _PATCH_SOURCE) + changed

    @cached_property
    def patch(self) -> Work:
        """Cost of a patch: by flags, by a measured run, or as we measured it."""
        work = public_benchmark.patch_work()
        if self.measured:
            result = measured_runs.load(self.measured)
            epochs = [epoch for epoch in result["epochs"] if epoch["mode"] == "patches"]
            if not epochs:
                raise ConfigError(
                    "the result file has no patches", uri=self.measured, fix="Give a result of a prepared dataset"
                )
            work = measured_runs.work_of(result, epochs[0])
        if not self.patch_source.endswith("flags"):
            return work
        added = public_benchmark.patch_work().requests - public_benchmark.PATCH_REQUESTS  # for foreground and indexes
        return public_benchmark.patch_work(
            requests=max(work.requests - added, 1.0) if self.patch_requests is None else self.patch_requests,
            size=work.bytes if self.patch_bytes is None else self.patch_bytes,
            cpu_s=work.all_cpu_s if self.patch_cpu_s is None else self.patch_cpu_s,
        )

    @property
    def sample_bytes(self) -> float:
        """Bytes of a whole-object sample."""
        return self.image_bytes + self.label_bytes

    def scenario(self, mode: Mode, nodes: int) -> Scenario:
        """Return the scenario: whole objects as the public demo reads them, or patches as our loader does."""
        world = nodes * self.ranks
        least = 1 if mode == "whole-object" else _FEWEST_STEPS
        steps = (self.steps or max(self.volumes // (self.batch * world), least)) * world
        scenario = Scenario(
            cluster=SimulatedCluster(nodes=nodes, ranks=self.ranks, cores=self.cores, cache_bytes=self.cache_bytes),
            network=self.network,
            loader=Loader(batch=1, workers=self.workers, prefetch=self.prefetch, connections=1),
            work=public_benchmark.demo_work(self.batch, self.image_bytes, self.label_bytes, self.whole_cpu_s),
            pieces=steps,
            step_time_s=self.step_time_s,
            sync=self.sync,
            dataset_bytes=self.volumes * self.sample_bytes,
            epochs=self.epochs,
            seed=self.seed,
            window_s=self.window_s,
        )
        if mode == "whole-object":
            return scenario
        loader = Loader(
            batch=self.batch,
            workers=self.workers,
            prefetch=self.prefetch if self.workers else 0,
            in_flight=self.in_flight or self.batch * (1 if self.workers else max(self.prefetch, 1)),
            ahead=True,
            connections=self.connections,
        )
        volumes_bytes = self.volumes * self.prepared_bytes
        pieces = steps * self.batch
        return replace(scenario, mode=mode, loader=loader, work=self.patch, pieces=pieces, dataset_bytes=volumes_bytes)

    def plan_scenario(self, mode: Mode, nodes: int) -> Scenario:
        """Return the scenario to plan for. Whole objects go through our own loader, image and label at once, in
        parts."""
        scenario = self.scenario(mode, nodes)
        if mode == "patches":
            return scenario
        cpu_s = self.whole_cpu_s or public_benchmark.WHOLE_CPU_S_PER_BYTE * self.sample_bytes
        work = Work.of(measured_runs.whole_objects([self.image_bytes, self.label_bytes]), cpu_s=cpu_s)
        return replace(scenario, work=work, loader=Loader(batch=self.batch, connections=measured_runs.BULK_CONNECTIONS))

    def samples_per_epoch(self, nodes: int) -> int:
        """Return the samples of an epoch of a plan, over all ranks: --steps full steps, or each volume once."""
        return self.steps * self.batch * nodes * self.ranks if self.steps else self.volumes

    def to_json(self) -> dict[str, Any]:
        """Return the settings as plain data; None for an unlimited rate."""
        return {
            **{name: getattr(self, name) for name in self._RESULT_FIELDS},
            "cores": _finite_or_none(self.cores),
            "network": {name: _finite_or_none(value) for name, value in asdict(self.network).items()},
            "patch": {"requests": self.patch.requests, "bytes": self.patch.bytes, "cpu_s": self.patch.all_cpu_s},
            "prices": vars(self.prices),
        }


def _finite_or_none(value: Any) -> Any:
    return None if value == math.inf else value


def _parse_rate(value: float | None, unit: float, default: float) -> float:
    """Return a flag's rate per second; 0 is unlimited."""
    return default if value is None else value * unit or math.inf
