"""Measured runs of `voxlane bench loading`, simulated: does the simulator say what was seen?

Everything comes from the result file: how the server was told to behave, the loader's settings, and what a sample took
in requests, bytes and processor time. Nothing is fitted. What is compared is the time that all this comes to.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from voxlane.bench.scale.model import Cluster, Latency, Loader, Network, Round, Scenario, Work
from voxlane.bench.scale.simulate import simulate
from voxlane.errors import ConfigError
from voxlane.volume.draw import case_at, is_forced

KIND = "voxlane bench loading"
_BULK_BYTES = 1 << 20
"""Objects from this size on share the store's few connections for parts; see `voxlane.dataset.reading`."""
_BULK_CONNECTIONS = 8
_PART_BYTES = 8 << 20
_CONNECTIONS = 64
_INDEX_REQUESTS = 2
"""Of a case that a process has not read from before: the indexes of image and label."""
_REPEATS = 5
"""Epochs that are simulated for one measurement; their median counts."""


@dataclass(frozen=True)
class Compared:
    """One mode and cache of a result file, measured and simulated."""

    file: str
    mode: str
    cache: str
    ranks: int
    workers: int
    step_time_s: float
    server: str
    """How it behaved, in words."""
    measured_samples_per_s: float
    measured_least: float
    measured_most: float
    simulated_samples_per_s: float
    measured_stall: float | None
    simulated_stall: float | None
    measured_first_batch_s: float
    simulated_first_batch_s: float
    busy_share: float
    """Of the machine's cores, what the ranks used."""

    @property
    def error(self) -> float:
        """Of the simulated samples/s, relative to the measured."""
        return self.simulated_samples_per_s / self.measured_samples_per_s - 1


def load(path: str) -> dict[str, Any]:
    """A result file of `voxlane bench loading`."""
    try:
        result = json.loads(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"cannot read the result file: {error.strerror}", uri=path) from None
    except ValueError:
        raise ConfigError("the result file is not JSON", uri=path) from None
    if not isinstance(result, dict) or result.get("benchmark") != KIND:
        raise ConfigError(f"this is no result of {KIND}", uri=path, fix=f"Run {KIND} DATA --out FILE and give FILE")
    if not result.get("epochs"):
        raise ConfigError("the result file has no epochs", uri=path, fix="Measure without --listing-only")
    return result


def compare(path: str) -> list[Compared]:
    """All modes and caches of a result file, against the simulator."""
    result = load(path)
    places = dict.fromkeys((epoch["mode"], epoch["cache"]) for epoch in result["epochs"])
    return [_compare(path, result, mode, cache) for mode, cache in places]


def _compare(path: str, result: dict[str, Any], mode: str, cache: str) -> Compared:
    epochs = compared_epochs(result, mode, cache)
    outcomes = [_simulated(path, result, epoch) for epoch in epochs]
    setting, cores = result["setting"], result["hardware"].get("cores") or 1
    rates = [epoch["samples_per_s"] for epoch in epochs]
    return Compared(
        file=Path(path).name,
        mode=mode,
        cache=cache,
        ranks=setting["ranks"] * setting["nodes"],
        workers=setting["workers"],
        step_time_s=setting["step_time_s"],
        server=server_words(result["server"]["faults"]),
        measured_samples_per_s=statistics.median(rates),
        measured_least=min(rates),
        measured_most=max(rates),
        simulated_samples_per_s=statistics.median(row["samples_per_s"] for row in outcomes),
        measured_stall=_median([epoch["stall_share"] for epoch in epochs]),
        simulated_stall=_median([row["stall_share"] for row in outcomes]),
        measured_first_batch_s=statistics.median(epoch["first_batch_s"] for epoch in epochs),
        simulated_first_batch_s=statistics.median(row["first_batch_s"] for row in outcomes),
        busy_share=statistics.median(epoch["cpu_s"] / epoch["seconds"] for epoch in epochs) / cores,
    )


def _simulated(path: str, result: dict[str, Any], epoch: dict[str, Any]) -> dict[str, Any]:
    """A measured epoch, simulated some times: the run of median speed. The first time is left out: a bucket that
    refuses has then saved up requests, which it had not when it was measured, between two other epochs."""
    rows = simulate(replace(scenario_of(path, result, epoch), epochs=1 + _REPEATS)).rows()[1:]
    return sorted(rows, key=lambda row: float(row["samples_per_s"]))[_REPEATS // 2]


def _median(values: Sequence[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return statistics.median(there) if there else None


def compared_epochs(result: dict[str, Any], mode: str, cache: str) -> list[dict[str, Any]]:
    """The epochs that the simulator speaks of. With workers the first one starts processes, which is not simulated; it
    counts only where there is no other."""
    epochs = [epoch for epoch in result["epochs"] if (epoch["mode"], epoch["cache"]) == (mode, cache)]
    later = epochs[1:] if result["setting"]["workers"] and cache != "warm" else epochs
    return later or epochs


def scenario_of(path: str, result: dict[str, Any], epoch: dict[str, Any]) -> Scenario:
    """A measured epoch, as a scenario."""
    server = result.get("server")
    if not server or "faults" not in server:
        raise ConfigError(
            "the result file does not say how its server behaved, so there is nothing to simulate it by",
            uri=path,
            fix="Measure against voxlane emulator, which tells",
        )
    setting, faults, mode = result["setting"], server["faults"], epoch["mode"]
    hosts = len({node["host"] for node in epoch["nodes"]})
    work = work_of(result, epoch)
    in_flight, batch = setting.get("in_flight"), setting["batch"]
    workers, prefetch = setting["workers"], setting["prefetch"]
    bulk = mode == "whole-object" and work.requests and work.bytes / work.requests >= _BULK_BYTES
    return Scenario(
        # Nodes that are played on one machine share its cores.
        cluster=Cluster(
            nodes=hosts,
            ranks=setting["ranks"] * setting["nodes"] // hosts,
            cores=float(result["hardware"].get("cores") or math.inf),
        ),
        network=Network(
            latency=Latency(median_s=faults["latency_s"], jitter_s=faults["jitter_s"]),
            stream_bytes_per_s=faults["bandwidth_bytes_per_s"] or math.inf,
            bucket_bytes_per_s=faults.get("total_bandwidth_bytes_per_s") or math.inf,
            bucket_requests_per_s=faults.get("requests_per_s") or math.inf,
        ),
        loader=Loader(
            batch=batch,
            workers=workers,
            prefetch=prefetch if workers else 0,
            in_flight=in_flight or batch * (1 if workers else prefetch),
            ahead=True,
            connections=_BULK_CONNECTIONS if bulk else _CONNECTIONS,
        ),
        work=work,
        pieces=epoch["samples"],
        step_time_s=setting["step_time_s"],
        sync=setting["sync"],
        coalesce=False,
        mode="whole-object" if mode == "whole-object" else "patches",
    )


def work_of(result: dict[str, Any], epoch: dict[str, Any]) -> Work:
    """What a sample of a measured epoch took, by the file's own counts; the processor time of a server on the same
    machine comes with it, where the file has it."""
    samples = epoch["samples"]
    # A request that was refused is not another thing to fetch: the simulator refuses by itself.
    requests = (epoch["requests"] - epoch["retries"]) / samples
    size = epoch["bytes"] / samples
    # What threads decoded comes after a sample's bytes; the rest of the processor time goes on while these arrive.
    decode_s = min(epoch["cpu_s"], epoch["decode_s"]) / samples
    beside_s = (epoch["cpu_s"] + (epoch.get("server_cpu_s") or 0.0)) / samples - decode_s
    cpu = {"cpu_s": decode_s, "receive_cpu_s": beside_s}
    whole = epoch["mode"] == "whole-object"
    if whole and requests and (objects := _objects(result)):
        return Work.of(whole_objects(objects), **cpu)
    if whole or not requests:
        return Work.of(Round(requests, size), **cpu)
    new, new_foreground = first_visits(result, epoch)
    chunks = max(requests - new_foreground - _INDEX_REQUESTS * new, 0.0)
    if not chunks:  # objects so small that they are read as wholes
        return Work.of(Round(requests, size), **cpu)
    kinds = []
    for foreground_share, foreground in ((new_foreground, (Round(1, 0.0),)), (1 - new_foreground, ())):
        for share, index in ((new, (Round(_INDEX_REQUESTS, 0.0),)), (1 - new, ())):
            if foreground_share * share > 0:
                kinds.append((foreground_share * share, (*foreground, *index, Round(chunks, size))))
    return Work(kinds=tuple(kinds), **cpu)


def _objects(result: dict[str, Any]) -> list[float]:
    """Bytes of the objects of a sample, where the file has them."""
    return next((data.get("object_bytes") or [] for data in result["data"] if data["mode"] == "whole-object"), [])


def whole_objects(sizes: Sequence[float]) -> Round:
    """Objects that are read at once, large ones in parts."""
    first, *others = [Round(max(1, math.ceil(size / _PART_BYTES)), size) for size in sizes]
    return replace(first, beside=tuple(others))


def first_visits(result: dict[str, Any], measured: dict[str, Any]) -> tuple[float, float]:
    """Of an epoch's samples, the shares whose case, and whose case's foreground, the process had not read from before:
    those cost rounds of requests that later ones do not. Which process read which case follows from the seed. Without a
    cache nothing is kept, so that every sample is its case's first."""
    setting, cache = result["setting"], measured["cache"]
    leg = next(number for number, data in enumerate(result["data"]) if data["mode"] == measured["mode"])
    cases = result["data"][leg]["cases"]
    samples = setting["samples"][leg] if isinstance(setting["samples"], list) else setting["samples"]
    if cache == "none":
        return 1.0, sum(is_forced(position, setting["foreground_share"]) for position in range(samples)) / samples
    world, lanes, batch = setting["ranks"] * setting["nodes"], max(1, setting["workers"]), setting["batch"]
    seen: set[tuple[int, int]] = set()
    seen_foreground: set[tuple[int, int]] = set()
    new = new_foreground = 0
    first = 0 if cache == "warm" else measured["epoch"]  # with a cold cache processes begin anew
    for epoch in range(first, measured["epoch"] + 1):
        new = new_foreground = 0
        for position in range(samples):
            process = position % world * lanes + position // world // batch % lanes
            visit = process, case_at(position, cases=cases, samples=samples, seed=setting["seed"], epoch=epoch)
            new += visit not in seen
            seen.add(visit)
            if is_forced(position, setting["foreground_share"]):
                new_foreground += visit not in seen_foreground
                seen_foreground.add(visit)
    return new / samples, new_foreground / samples


def server_words(faults: dict[str, Any]) -> str:
    """How a server behaved."""
    said = [f"{faults['latency_s'] * 1e3:g} ms"]
    if faults["jitter_s"]:
        said[0] = f"{faults['latency_s'] * 1e3:g} to {(faults['latency_s'] + faults['jitter_s']) * 1e3:g} ms"
    if faults["bandwidth_bytes_per_s"]:
        said.append(f"{faults['bandwidth_bytes_per_s'] / 1e6:g} MB/s a connection")
    if faults.get("total_bandwidth_bytes_per_s"):
        said.append(f"{faults['total_bandwidth_bytes_per_s'] / 1e6:g} MB/s in all")
    if faults.get("requests_per_s"):
        said.append(f"{faults['requests_per_s']:g} requests/s")
    return ", ".join(said)


def within(compared: Sequence[Compared], tolerance: float) -> int:
    """How many are off by no more than `tolerance`."""
    return sum(abs(each.error) <= tolerance for each in compared)
