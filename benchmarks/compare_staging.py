"""Compare staging 1,000 objects of 1 MB into the folders of 3 nodes at once with a parallel read of the same bytes.

`python benchmarks/compare_staging.py [--quick]` writes results/staging.json. The nodes are processes of this machine,
which also runs the server (our GCS emulator). Without a limit on the nodes' links, the machine's processors are the
limit, and a copy also has to write. The emulator limits the links by slowing every connection down.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import isolated_runs
import servers
from isolated_runs import Sample, Stopwatch
from voxlane.bench.report import summarize
from voxlane.testing import Faults

BUCKET, PREFIX = "staging", "data/"
NODES = 3
CONCURRENCY = 32
OBJECT_BYTES = 1_000_000
LATENCY_S = 0.02
LIMIT_S = 300.0
LINKS = {"1 Gbit/s a node": 125e6, "none": 0.0}
"""Bytes per second that each node can receive; 0 means no limit."""
CONTENDERS = ("plain read", "voxlane", "voxlane again", "read, then write", "google transfer_manager")
PEERS = ("google transfer_manager",)
_SETTLE_S = 6.0
"""Pause after removing files: ext4 does not reuse an inode for 5 s and takes longer to find others until then."""
LIBRARIES = ["voxlane", "obstore", "xxhash", "google-cloud-storage"]


# -- what a measured process runs --------------------------------------------------------------------------------------


def run_nodes(*, contender: str, endpoint: str, objects: int, folder: str) -> Sample:
    """Run all nodes at once and measure from when all are ready until the last has finished."""
    context = multiprocessing.get_context("fork")
    barrier, answers = context.Barrier(NODES), context.SimpleQueue()
    watch = Stopwatch()
    nodes = [
        context.Process(target=_node, args=(contender, endpoint, objects, f"{folder}/node{n}", barrier, answers))
        for n in range(NODES)
    ]
    for node in nodes:
        node.start()
    results = [answers.get() for _ in nodes]
    for node in nodes:
        node.join()
    if wrong := [answer for answer in results if isinstance(answer, str)]:
        raise AssertionError(wrong[0])
    total_s = max(end for _, end in results) - min(begin for begin, _ in results)
    return {"total_s": total_s, "client_cpu_s": watch.cpu_s(), "bytes": NODES * objects * OBJECT_BYTES}


def _node(contender: str, endpoint: str, objects: int, root: str, barrier: Barrier, answers: Any) -> None:
    os.environ.update(STORAGE_EMULATOR_HOST=endpoint, GOOGLE_CLOUD_PROJECT="benchmark")
    try:
        os.makedirs(root, exist_ok=True)
        work = WORK[contender](endpoint, objects, root)
        barrier.wait()
        begin = time.monotonic()
        moved = work()
        answers.put((begin, time.monotonic()))
        if moved != objects * OBJECT_BYTES:
            raise AssertionError(f"{moved} bytes, expected {objects * OBJECT_BYTES}")
    except BaseException as error:  # noqa: BLE001 - process boundary: the error becomes the result
        barrier.abort()
        answers.put(f"{type(error).__name__}: {error}")


def _keys(objects: int) -> list[str]:
    return [f"{PREFIX}{number:06d}.bin" for number in range(objects)]


def _store(endpoint: str) -> Any:
    from voxlane import Store, StoreConfig

    store = Store(f"gs://{BUCKET}", StoreConfig(endpoint=endpoint, max_concurrency=CONCURRENCY))
    store.exists("warm")
    return store


def _read(endpoint: str, objects: int, root: str) -> Callable[[], int]:
    """Read every object with Store.get into memory that is freed at once."""
    store = _store(endpoint)

    def read_object(key: str) -> int:
        return len(store.get(key, 0, OBJECT_BYTES))

    return lambda: sum(future.result() for future in [store.submit(read_object, key) for key in _keys(objects)])


def _read_and_write(endpoint: str, objects: int, root: str) -> Callable[[], int]:
    """Read every object and write it to a file, without checksums, records or atomic writes."""
    store = _store(endpoint)

    def copy_object(key: str) -> int:
        body = store.get(key, 0, OBJECT_BYTES)
        with open(f"{root}/{key.replace('/', '_')}", "wb", buffering=0) as file:
            return int(file.write(body) or 0)

    return lambda: sum(future.result() for future in [store.submit(copy_object, key) for key in _keys(objects)])


def _voxlane(endpoint: str, objects: int, root: str) -> Callable[[], int]:
    """Run `voxlane stage`, listing included; modules and connections are ready before, as for the plain read."""
    from voxlane.store.listing import list_objects
    from voxlane.store.staging import stage

    config = _store(endpoint).config
    list_objects(f"gs://{BUCKET}/none/", config=config, progress=False)
    return lambda: stage(f"gs://{BUCKET}/{PREFIX}", root, config=config).total_bytes


def _voxlane_again(endpoint: str, objects: int, root: str) -> Callable[[], int]:
    """Run `voxlane stage` a second time."""
    first = _voxlane(endpoint, objects, root)
    first()
    return first


def _transfer_manager(endpoint: str, objects: int, root: str) -> Callable[[], int]:
    from google.auth.credentials import AnonymousCredentials
    from google.cloud import storage
    from google.cloud.storage import transfer_manager

    client = storage.Client(project="benchmark", credentials=AnonymousCredentials())
    bucket = client.bucket(BUCKET)

    def run() -> int:
        done = transfer_manager.download_many_to_path(
            bucket, _keys(objects), destination_directory=root, worker_type="thread", max_workers=CONCURRENCY
        )
        if failed := [outcome for outcome in done if isinstance(outcome, Exception)]:
            raise failed[0]
        return _size(root)

    return run


def _size(root: str) -> int:
    return sum(path.stat().st_size for path in Path(root).rglob("*") if path.is_file())


WORK: dict[str, Callable[[str, int, str], Callable[[], int]]] = {
    "plain read": _read,
    "read, then write": _read_and_write,
    "voxlane": _voxlane,
    "voxlane again": _voxlane_again,
    "google transfer_manager": _transfer_manager,
}


# -- the benchmark -----------------------------------------------------------------------------------------------------


def main() -> None:
    """Measure all contenders and write the result file."""
    arguments = _arguments()
    objects, rounds = (100, 1) if arguments.quick else (1000, arguments.rounds)
    facts = isolated_runs.facts(LIBRARIES)
    samples: list[dict[str, Any]] = []
    with servers.emulator(latency_s=LATENCY_S) as server:
        assert server.emulator is not None
        server.emulator.create_bucket(BUCKET)
        server.emulator.fill(BUCKET, objects, key=f"{PREFIX}{{:06d}}.bin", size_bytes=OBJECT_BYTES)
        for link, bytes_per_s in LINKS.items():
            capped = Faults(latency_s=LATENCY_S, bandwidth_bytes_per_s=bytes_per_s / CONCURRENCY, kinds=("get",))
            server.emulator.set_faults(capped)
            samples += _race(link, server, objects, rounds, arguments.only or CONTENDERS)
    settings = {
        "nodes": NODES,
        "objects": objects,
        "object_bytes": OBJECT_BYTES,
        "concurrency": CONCURRENCY,
        "latency_s": LATENCY_S,
        "links_bytes_per_s": LINKS,
        "rounds": rounds,
        "quick": arguments.quick,
        "server": "voxlane.testing.Emulator",
    }
    isolated_runs.save(arguments.out, {**facts, "settings": settings, "summary": summary(samples), "samples": samples})
    if failed := [s for s in samples if s["contender"].startswith("voxlane") and "error" in s]:
        sys.exit(f"{len(failed)} of our own runs failed; first: {failed[0]['error']}")


def _race(
    link: str, server: servers.Server, objects: int, rounds: int, contenders: Sequence[str]
) -> list[dict[str, Any]]:
    samples: list[dict[str, Any]] = []
    for turn, contender in isolated_runs.interleaved(contenders, rounds):
        if contender in PEERS and turn >= 2:
            continue  # slow, and far behind the others
        if any(s["contender"] == contender and "error" in s for s in samples):
            continue  # a failed contender is not measured again
        folder = tempfile.mkdtemp(prefix="voxlane-bench-")
        try:
            work = {"contender": contender, "endpoint": server.url, "objects": objects, "folder": folder}
            sample = isolated_runs.measure(run_nodes, work, server, limit_s=LIMIT_S)
        finally:
            shutil.rmtree(folder)
        samples.append({"link": link, "contender": contender, "round": turn, **sample})
        result_text = sample.get("error") or (
            f"{sample['total_s']:.2f} s, {sample['bytes'] / sample['total_s'] / 1e6:.0f} MB/s, "
            f"cpu {sample['client_cpu_s']:.2f}+{sample['server_cpu_s']:.2f} s, {sample['server_requests']}"
        )
        print(f"link {link}, {contender}: {result_text}", flush=True)
        if contender != "plain read":
            time.sleep(_SETTLE_S)
    return samples


def summary(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the median and spread of each contender, and its speed relative to the plain read."""
    rows: list[dict[str, Any]] = []
    for link in LINKS:
        link_samples = [s for s in samples if s["link"] == link]
        reads = [s["total_s"] for s in link_samples if s["contender"] == "plain read" and "error" not in s]
        plain = summarize(reads)["median"] if reads else None
        for contender in CONTENDERS:
            group = [s for s in link_samples if s["contender"] == contender]
            row: dict[str, Any] = {"link": link, "contender": contender}
            if not group:
                continue
            if errors := [s["error"] for s in group if "error" in s]:
                rows.append({**row, "error": errors[0]})
                continue
            for name in ("total_s", "client_cpu_s", "server_cpu_s", "peak_rss_bytes"):
                row[name] = summarize([s[name] for s in group])
            row["megabytes_per_s"] = round(group[0]["bytes"] / row["total_s"]["median"] / 1e6, 1)
            row["of_plain_read"] = round(plain / row["total_s"]["median"], 3) if plain else None
            rows.append(row)
    return rows


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="stage 100 objects in one round")
    parser.add_argument("--only", action="append", help="measure only this contender (repeatable; default: all)")
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds of each contender (default 5)")
    parser.add_argument("--out", type=Path, default=isolated_runs.RESULTS / "staging.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
