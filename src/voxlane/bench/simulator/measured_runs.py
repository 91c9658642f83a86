"""Simulate measured runs of `voxlane bench loading` and compare the results.

Everything comes from the result file: the faults of the server, the settings of the loader, and the requests, bytes and
processor time of a sample. Nothing is fitted; the resulting times are compared.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from voxlane.bench.report import load_result, median_or_none, summarize
from voxlane.bench.simulator.model import Latency, Loader, Round, Scenario, SimulatedCluster, StorageNetwork, Work
from voxlane.bench.simulator.public_benchmark import INDEX_REQUESTS
from voxlane.bench.simulator.simulate import simulate
from voxlane.errors import ConfigError
from voxlane.volume.patch_sampling import case_for_position, is_forced

KIND = "voxlane bench loading"
_BULK_BYTES = 1 << 20
"""Size in bytes from which objects share the store's few connections for parts; see `voxlane.dataset.reading`."""
BULK_CONNECTIONS = 8
_PART_BYTES = 8 << 20
_CONNECTIONS = 64
_REPEATS = 5
"""Number of simulated epochs per measurement; their median counts."""


def load(path: str) -> dict[str, Any]:
    """Read a result file of `voxlane bench loading`."""
    result = load_result(Path(path), KIND)
    if not result.get("epochs"):
        raise ConfigError("the result file has no epochs", uri=path, fix="Measure without --listing-only")
    return result


def compare(path: str) -> list[dict[str, Any]]:
    """Return a row for each mode and cache of a result file, measured and simulated."""
    result = load(path)
    runs = dict.fromkeys((epoch["mode"], epoch["cache"]) for epoch in result["epochs"])
    return [_compare(path, result, mode, cache) for mode, cache in runs]


def _compare(path: str, result: dict[str, Any], mode: str, cache: str) -> dict[str, Any]:
    epochs = compared_epochs(result, mode, cache)
    simulated = [_simulate(path, result, epoch) for epoch in epochs]
    settings, cores = result["setting"], result["hardware"].get("cores") or 1
    rates = summarize([epoch["samples_per_s"] for epoch in epochs])
    simulated_rate = statistics.median(row["samples_per_s"] for row in simulated)
    return {
        "file": Path(path).name,
        "mode": mode,
        "cache": cache,
        "ranks": settings["ranks"] * settings["nodes"],
        "workers": settings["workers"],
        "step_time_s": settings["step_time_s"],
        "server": describe_server(result["server"]["faults"]),
        "measured_samples_per_s": rates["median"],
        "measured_least": rates["min"],
        "measured_most": rates["max"],
        "simulated_samples_per_s": simulated_rate,
        "measured_stall": median_or_none(epoch["stall_share"] for epoch in epochs),
        "simulated_stall": median_or_none(row["stall_share"] for row in simulated),
        "measured_first_batch_s": statistics.median(epoch["first_batch_s"] for epoch in epochs),
        "simulated_first_batch_s": statistics.median(row["first_batch_s"] for row in simulated),
        # Fraction of the machine's cores that the ranks used.
        "busy_share": statistics.median(epoch["cpu_s"] / epoch["seconds"] for epoch in epochs) / cores,
        "error": simulated_rate / rates["median"] - 1,
    }


def _simulate(path: str, result: dict[str, Any], epoch: dict[str, Any]) -> dict[str, Any]:
    """Simulate a measured epoch several times and return the run of median speed. The first run is left out: there a
    bucket with a request limit accepts a burst, which it did not when it was measured between other epochs."""
    rows = simulate(replace(scenario_of(path, result, epoch), epochs=1 + _REPEATS))[1:]
    return sorted(rows, key=lambda row: float(row["samples_per_s"]))[_REPEATS // 2]


def compared_epochs(result: dict[str, Any], mode: str, cache: str) -> list[dict[str, Any]]:
    """Return the epochs to compare. With workers the first one starts processes, which is not simulated; it counts only
    if there is no other."""
    epochs = [epoch for epoch in result["epochs"] if (epoch["mode"], epoch["cache"]) == (mode, cache)]
    later = epochs[1:] if result["setting"]["workers"] and cache != "warm" else epochs
    return later or epochs


def scenario_of(path: str, result: dict[str, Any], epoch: dict[str, Any]) -> Scenario:
    """Return the scenario of a measured epoch."""
    server = result.get("server")
    if not server or "faults" not in server:
        raise ConfigError(
            "the result file does not describe its server, so it cannot be simulated",
            uri=path,
            fix="Measure against voxlane emulator",
        )
    settings, faults, mode = result["setting"], server["faults"], epoch["mode"]
    hosts = len({node["host"] for node in epoch["nodes"]})
    work = work_of(result, epoch)
    in_flight, batch = settings.get("in_flight"), settings["batch"]
    workers, prefetch = settings["workers"], settings["prefetch"]
    bulk = mode == "whole-object" and work.requests and work.bytes / work.requests >= _BULK_BYTES
    return Scenario(
        # Simulated nodes on one machine share its cores.
        cluster=SimulatedCluster(
            nodes=hosts,
            ranks=settings["ranks"] * settings["nodes"] // hosts,
            cores=float(result["hardware"].get("cores") or math.inf),
        ),
        network=StorageNetwork(
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
            connections=BULK_CONNECTIONS if bulk else _CONNECTIONS,
        ),
        work=work,
        pieces=epoch["samples"],
        step_time_s=settings["step_time_s"],
        sync=settings["sync"],
        coalesce=False,
        mode="whole-object" if mode == "whole-object" else "patches",
    )


def work_of(result: dict[str, Any], epoch: dict[str, Any]) -> Work:
    """Return the cost of a sample of a measured epoch, by the counts of the file; it includes the processor time of the
    server on the same machine, if the file has it."""
    samples = epoch["samples"]
    # Refused requests do not count: the simulator refuses by itself.
    requests = (epoch["requests"] - epoch["retries"]) / samples
    size = epoch["bytes"] / samples
    # Decoding comes after the bytes of a sample; the rest of the processor time is spent while they arrive.
    decode_s = min(epoch["cpu_s"], epoch["decode_s"]) / samples
    beside_s = (epoch["cpu_s"] + (epoch.get("server_cpu_s") or 0.0)) / samples - decode_s
    cpu = {"cpu_s": decode_s, "receive_cpu_s": beside_s}
    whole = epoch["mode"] == "whole-object"
    # The bytes of each object of a sample, if the file has them.
    objects = next((data.get("object_bytes") for data in result["data"] if data["mode"] == "whole-object"), None)
    if whole and requests and objects:
        return Work.of(whole_objects(objects), **cpu)
    if whole or not requests:
        return Work.of(Round(requests, size), **cpu)
    new, new_foreground = first_visits(result, epoch)
    chunks = max(requests - new_foreground - INDEX_REQUESTS * new, 0.0)
    if not chunks:  # small objects are read completely
        return Work.of(Round(requests, size), **cpu)
    kinds = []
    for foreground_share, foreground in ((new_foreground, (Round(1, 0.0),)), (1 - new_foreground, ())):
        for share, index in ((new, (Round(INDEX_REQUESTS, 0.0),)), (1 - new, ())):
            if foreground_share * share > 0:
                kinds.append((foreground_share * share, (*foreground, *index, Round(chunks, size))))
    return Work(kinds=tuple(kinds), **cpu)


def whole_objects(sizes: Sequence[float]) -> Round:
    """Return the round that reads several objects at once, large ones in parts."""
    first, *others = [Round(max(1, math.ceil(size / _PART_BYTES)), size) for size in sizes]
    return replace(first, beside=tuple(others))


def first_visits(result: dict[str, Any], measured: dict[str, Any]) -> tuple[float, float]:
    """Return the fractions of samples whose case, and whose case's foreground, the process had not read before: they
    cost additional rounds of requests. Which process reads which case follows from the seed. Without a cache every
    sample is the first of its case."""
    settings, cache = result["setting"], measured["cache"]
    index = next(number for number, data in enumerate(result["data"]) if data["mode"] == measured["mode"])
    cases = result["data"][index]["cases"]
    samples = settings["samples"][index] if isinstance(settings["samples"], list) else settings["samples"]
    if cache == "none":
        return 1.0, sum(is_forced(position, settings["foreground_share"]) for position in range(samples)) / samples
    world, lanes, batch = settings["ranks"] * settings["nodes"], max(1, settings["workers"]), settings["batch"]
    visited: set[tuple[int, int]] = set()
    visited_foreground: set[tuple[int, int]] = set()
    new = new_foreground = 0
    first = 0 if cache == "warm" else measured["epoch"]  # with a cold cache processes begin anew
    for epoch in range(first, measured["epoch"] + 1):
        new = new_foreground = 0
        for position in range(samples):
            process = position % world * lanes + position // world // batch % lanes
            case = case_for_position(position, cases=cases, samples=samples, seed=settings["seed"], epoch=epoch)
            visit = process, case
            new += visit not in visited
            visited.add(visit)
            if is_forced(position, settings["foreground_share"]):
                new_foreground += visit not in visited_foreground
                visited_foreground.add(visit)
    return new / samples, new_foreground / samples


def describe_server(faults: dict[str, Any]) -> str:
    """Return the behaviour of a server in words."""
    words = [f"{faults['latency_s'] * 1e3:g} ms"]
    if faults["jitter_s"]:
        words[0] = f"{faults['latency_s'] * 1e3:g} to {(faults['latency_s'] + faults['jitter_s']) * 1e3:g} ms"
    if faults["bandwidth_bytes_per_s"]:
        words.append(f"{faults['bandwidth_bytes_per_s'] / 1e6:g} MB/s per connection")
    if faults.get("total_bandwidth_bytes_per_s"):
        words.append(f"{faults['total_bandwidth_bytes_per_s'] / 1e6:g} MB/s in all")
    if faults.get("requests_per_s"):
        words.append(f"{faults['requests_per_s']:g} requests/s")
    return ", ".join(words)
