"""Save checkpoints while the store is gone: `python -m tests.faults.outages [--stores gs,s3,az] [--seconds 5,30,90]`.

For every store and length of outage, seven checkpoints of 100 MB to 2 GB are saved at once. The store refuses all
connections for that time after the first parts were sent. Every save must end well, and every byte is verified.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import boto3
import torch

from tests.conftest import AZURITE_ACCOUNT, AZURITE_KEY
from tests.faults.proxy import FaultProxy
from tests.servers import azurite, seaweedfs
from voxlane import Checkpoint, StoreConfig
from voxlane.checkpoint import lifecycle
from voxlane.testing import Emulator

SIZES_MB = (100, 100, 100, 200, 500, 1000, 2000)


def open_store(kind: str, stack: ExitStack) -> StoreConfig:
    """Start a server with the bucket `outages`; return its config."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    if kind == "gs":
        emulator = stack.enter_context(Emulator())
        emulator.create_bucket("outages")
        return StoreConfig(endpoint=emulator.url)
    if kind == "s3":
        url = stack.enter_context(seaweedfs(folder, "test", "testtest"))
        keys = {"aws_access_key_id": "test", "aws_secret_access_key": "testtest"}
        boto3.client("s3", endpoint_url=url, region_name="us-east-1", **keys).create_bucket(Bucket="outages")
        return StoreConfig(endpoint=url, access_key_id="test", secret_access_key="testtest")
    from azure.storage.blob import ContainerClient

    url = f"{stack.enter_context(azurite(folder, in_memory=False))}/{AZURITE_ACCOUNT}"
    with ContainerClient(url, "outages", credential=AZURITE_KEY) as container:
        container.create_container()
    return StoreConfig(endpoint=url, account=AZURITE_ACCOUNT, account_key=AZURITE_KEY)


def run_outage(kind: str, seconds: float, sizes_mb: tuple[int, ...]) -> int:
    """Save checkpoints of these sizes through an outage; return how many saves survived."""
    survived = 0
    with ExitStack() as stack:
        direct = open_store(kind, stack)
        proxy = stack.enter_context(FaultProxy(direct.endpoint or ""))
        uri, faulty = f"{kind}://outages", replace(direct, endpoint=proxy.url)
        results: list[Any] = [None] * len(sizes_mb)

        def save(index: int) -> None:
            state = {"weights": torch.arange(sizes_mb[index] * 250_000, dtype=torch.int32)}
            try:
                Checkpoint(f"{uri}/{index}", faulty).save(state, "a.ckpt")
            except Exception as error:  # noqa: BLE001 - the result of this save
                results[index] = error

        threads = [threading.Thread(target=save, args=(index,)) for index in range(len(sizes_mb))]
        start = time.monotonic()
        for thread in threads:
            thread.start()
        while proxy.requests < 10:  # parts are being sent
            time.sleep(0.01)
        proxy.refuse_for(seconds).join()
        running = sum(thread.is_alive() for thread in threads)
        for thread in threads:
            thread.join()
        elapsed_s = time.monotonic() - start
        for index, size_mb in enumerate(sizes_mb):
            problems: Any = results[index]
            if problems is None:
                problems = lifecycle.verify(lifecycle.find_checkpoint(f"{uri}/{index}/a.ckpt", direct)).problems
            survived += not problems
            if problems:
                print(f"  {kind}, {seconds:.0f} s, {size_mb} MB: {problems}", flush=True)
        print(
            f"{kind}, store gone for {seconds:.0f} s: {survived} of {len(sizes_mb)} saves survived; {running} were "
            f"running when it came back, {elapsed_s:.0f} s in all",
            flush=True,
        )
    return survived


def main() -> None:
    """Run all outages and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stores", default="gs,s3,az")
    parser.add_argument("--seconds", default="5,30,90")
    parser.add_argument("--sizes-mb", default=",".join(map(str, SIZES_MB)))
    arguments = parser.parse_args()
    sizes = tuple(int(size) for size in arguments.sizes_mb.split(","))
    outages = [(store, float(s)) for store in arguments.stores.split(",") for s in arguments.seconds.split(",")]
    survived = sum(run_outage(store, seconds, sizes) for store, seconds in outages)
    print(f"{survived} of {len(outages) * len(sizes)} saves survived")


if __name__ == "__main__":
    main()
