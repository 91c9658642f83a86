"""Save or load a checkpoint with each contender, as its documentation shows: the work of a measured process.

Libraries are imported and clients created before the measured time; connections open within it. The loaded values are
compared with the saved ones after it.
"""

from __future__ import annotations

import functools
import importlib
import io
import os
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from isolated_runs import Sample, Stopwatch
from servers import ACCESS_KEY, REGION, SECRET_KEY

LARGE_BYTES = 16 << 20
State = dict[str, torch.Tensor]
Save = Callable[[State], None]
Load = Callable[[], State]


@dataclass(frozen=True, kw_only=True)
class Work:
    """One save or load to measure."""

    contender: str
    operation: str
    """Operation: save or load."""
    service: str
    """Service: s3 or gcs."""
    endpoint: str
    bucket: str
    key: str
    size_bytes: int
    tensors: str
    """Size of the tensors: large or small; see `make_state`."""
    tuning: dict[str, Any]
    """Settings of the ceiling: `part_bytes` and `concurrency`."""

    @property
    def uri(self) -> str:
        """Return the URI of the checkpoint."""
        return f"{'s3' if self.service == 's3' else 'gs'}://{self.bucket}/{self.key}"


def make_state(tensors: str, size_bytes: int, device: torch.device) -> State:
    """Return a state of about `size_bytes`.

    Large tensors have 16 MiB each, as in models of that size. Small ones have some hundred KB each, as in Lightning's
    demo transformer. On the meta device the state has shapes only.
    """
    from voxlane.bench.checkpoint import demo_model

    if tensors == "small":
        of_one, of_two = (
            sum(t.nbytes for t in demo_model.full_state(n, torch.device("meta")).values()) for n in (1, 2)
        )
        return demo_model.full_state(max(1, round((size_bytes - of_one) / (of_two - of_one)) + 1), device)
    starts = range(0, size_bytes, LARGE_BYTES)
    sizes = [min(LARGE_BYTES, size_bytes - start) // 4 for start in starts]
    state = {f"layers.{i}.weight": torch.empty(size, device=device) for i, size in enumerate(sizes)}
    if device.type != "meta":
        demo_model.restore(state)
    return state


def run_one(**arguments: Any) -> Sample:
    """Save or load once; return the time, memory and CPU time of this client."""
    from voxlane.bench.checkpoint import demo_model
    from voxlane.bench.process_usage import PeakMemory

    work = Work(**arguments)
    set_up(work.endpoint)
    in_memory = work.operation == "save" and work.contender != "ceiling"
    state = make_state(work.tensors, work.size_bytes, torch.device("cpu" if in_memory else "meta"))
    size = sum(tensor.nbytes for tensor in state.values())
    if work.contender == "ceiling":
        call = _ceiling(work, size)
    else:
        save, load = CONTENDERS[work.contender](work)
        call = (lambda: save(state)) if work.operation == "save" else load
    with PeakMemory() as memory:
        watch = Stopwatch()
        loaded = call()
        total_s, cpu_s = watch.elapsed_s(), watch.cpu_s()
    if loaded is not None and (name := demo_model.first_difference(loaded)) is not None:
        raise AssertionError(f"{name} differs from its saved value")
    extra = memory.extra_bytes or 0
    return {
        "total_s": total_s,
        "client_cpu_s": cpu_s,
        "bytes": size,
        # A load brings the state into memory; only what it needs beyond that is extra.
        "extra_bytes": extra - size if loaded is not None else extra,
    }


def run_trials(trials: list[dict[str, Any]], **arguments: Any) -> Sample:
    """Return the seconds of the ceiling in each trial: the better of two runs, in turns."""
    work = Work(**arguments)
    set_up(work.endpoint)
    seconds_by_operation: dict[str, list[float]] = {}
    for operation in ("save", "load"):
        seconds = [float("inf")] * len(trials)
        for turn in range(2 * len(trials)):
            index = turn % len(trials)
            call = _ceiling(replace(work, operation=operation, tuning=trials[index]), work.size_bytes)
            watch = Stopwatch()
            call()
            seconds[index] = min(seconds[index], watch.elapsed_s())
        seconds_by_operation[operation] = seconds
    return seconds_by_operation


def set_up(endpoint: str) -> None:
    """Set the environment of this process, through which all contenders find the server."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    os.environ.update(
        STORAGE_EMULATOR_HOST=endpoint,
        AWS_ENDPOINT_URL=endpoint,
        AWS_ACCESS_KEY_ID=ACCESS_KEY,
        AWS_SECRET_ACCESS_KEY=SECRET_KEY,
        AWS_DEFAULT_REGION=REGION,
        AWS_REGION=REGION,
        GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT="false",  # otherwise gcsfs waits a minute for a service that emulators lack
        GOOGLE_CLOUD_PROJECT="benchmark",
    )


# -- the ceiling: transfers of the same number of bytes without pickling -------------------------------


def _ceiling(work: Work, size: int) -> Callable[[], None]:
    from voxlane import StoreConfig
    from voxlane import uri as uris
    from voxlane.store.credentials import open_native

    native = open_native(uris.parse(work.uri), StoreConfig(endpoint=work.endpoint), engine_retries=True)
    part_bytes, concurrency = work.tuning["part_bytes"], work.tuning["concurrency"]
    data = np.random.default_rng(0).integers(0, 1 << 63, size // 8 + 1).view(np.uint8)[:size]

    def put() -> None:
        native.put(work.key, data, use_multipart=True, chunk_size=part_bytes, max_concurrency=concurrency)

    def get_part(target: np.ndarray[Any, Any], start: int) -> None:
        stop = min(size, start + part_bytes)
        for chunk in native.get(work.key, options={"range": (start, stop)}).stream(min_chunk_size=1 << 18):
            target[start : start + len(chunk)] = np.frombuffer(chunk, np.uint8)
            start += len(chunk)
        assert start == stop

    def get() -> None:
        target = np.empty(size, np.uint8)  # new memory, as every load of a file needs
        with ThreadPoolExecutor(concurrency) as pool:
            list(pool.map(lambda start: get_part(target, start), range(0, size, part_bytes)))

    return put if work.operation == "save" else get


# -- contenders --------------------------------------------------------------------------------------------------------


def voxlane(work: Work) -> tuple[Save, Load]:
    """Use our `Checkpoint` with its defaults."""
    from voxlane import Checkpoint, StoreConfig
    from voxlane.store.credentials import s3_session

    folder, _, name = work.uri.rpartition("/")
    checkpoint = Checkpoint(folder, StoreConfig(endpoint=work.endpoint))
    for engine_retries in (False, True):  # the clients, which all contenders create before the measured time
        checkpoint.store.open_native(engine_retries=engine_retries)
    if work.service == "s3":  # loads sign their requests with botocore, which boto3's contender imports too
        importlib.import_module("botocore.auth")
        s3_session(checkpoint.store.config).get_credentials()
    return lambda state: checkpoint.save(state, name) and None, lambda: checkpoint.load(name)


def fsspec(work: Work) -> tuple[Save, Load]:
    """Use `torch.save` and `torch.load` on a file of s3fs or gcsfs."""
    import fsspec

    if work.service == "s3":
        system = fsspec.filesystem("s3", client_kwargs={"endpoint_url": work.endpoint, "region_name": REGION})
    else:
        system = fsspec.filesystem("gcs", endpoint_url=work.endpoint, token="anon")
    path = f"{work.bucket}/{work.key}"

    def save(state: State) -> None:
        with system.open(path, "wb") as file:
            torch.save(state, file)

    def load() -> State:
        with system.open(path, "rb") as file:
            return torch.load(file)

    return save, load


def boto3(work: Work) -> tuple[Save, Load]:
    """Use `upload_fileobj` and `download_fileobj` on a file in memory."""
    import boto3

    client = boto3.client("s3", endpoint_url=work.endpoint, region_name=REGION)

    def save(state: State) -> None:
        buffer = io.BytesIO()
        torch.save(state, buffer)
        buffer.seek(0)
        client.upload_fileobj(buffer, work.bucket, work.key)

    def load() -> State:
        buffer = io.BytesIO()
        client.download_fileobj(work.bucket, work.key, buffer)
        buffer.seek(0)
        return torch.load(buffer)

    return save, load


def s3torchconnector(work: Work) -> tuple[Save, Load]:
    """Use AWS's `S3Checkpoint`."""
    from s3torchconnector import S3Checkpoint, S3ClientConfig

    checkpoint = S3Checkpoint(REGION, work.endpoint, S3ClientConfig(force_path_style=True))

    def save(state: State) -> None:
        with checkpoint.writer(work.uri) as file:
            torch.save(state, file)

    def load() -> State:
        with checkpoint.reader(work.uri) as file:
            return torch.load(file)

    return save, load


def google_cloud_storage(work: Work) -> tuple[Save, Load]:
    """Use `upload_from_file` and `download_to_file` on a file in memory."""
    from google.cloud import storage

    blob = storage.Client().bucket(work.bucket).blob(work.key)

    def save(state: State) -> None:
        buffer = io.BytesIO()
        torch.save(state, buffer)
        blob.upload_from_file(buffer, rewind=True)

    def load() -> State:
        buffer = io.BytesIO()
        blob.download_to_file(buffer)
        buffer.seek(0)
        return torch.load(buffer)

    return save, load


def dataflux(work: Work) -> tuple[Save, Load]:
    """Use Google's `DatafluxCheckpoint`."""
    from dataflux_pytorch.dataflux_checkpoint import DatafluxCheckpoint

    checkpoint = DatafluxCheckpoint("benchmark", work.bucket)

    def save(state: State) -> None:
        with checkpoint.writer(work.key) as file:
            torch.save(state, file)

    def load() -> State:
        with checkpoint.reader(work.key) as file:
            return torch.load(file)

    return save, load


CONTENDERS: dict[str, Callable[[Work], tuple[Save, Load]]] = {
    "voxlane": voxlane,
    "boto3": boto3,
    "s3torchconnector": s3torchconnector,
    "s3fs": fsspec,
    "google-cloud-storage": google_cloud_storage,
    "dataflux": dataflux,
    "gcsfs": fsspec,
}


# -- sharded, on several ranks -----------------------------------------------------------------------------------------


def run_sharded(
    device: torch.device, contenders: list[str], rounds: int, endpoint: str, bucket: str, num_layers: int
) -> list[Sample]:
    """On every rank, save and load a sharded model with each contender in turn; the slowest rank counts."""
    from isolated_runs import interleaved
    from voxlane.bench import ranks
    from voxlane.bench.checkpoint import demo_model
    from voxlane.bench.process_usage import PeakMemory

    set_up(endpoint)
    make_model = functools.partial(demo_model.DemoTransformer, num_layers)
    state = demo_model.sharded_model(make_model, device).state_dict()
    size = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    calls: dict[str, Any] = {}
    samples: list[Sample] = []
    failed: set[str] = set()
    for name in contenders:
        try:
            calls[name] = SHARDED[name](endpoint)
        except ImportError as error:
            failed.add(name)
            samples.append({"contender": name, "operation": "save", "round": 0, "error": str(error)})
    for turn, name in interleaved(contenders, rounds):
        uri = f"s3://{bucket}/sharded/{name}-{turn}"
        for operation, call in zip(("save", "load"), calls.get(name, ()), strict=False):
            if name in failed:
                continue
            if operation == "load":
                demo_model.scramble(state)
            ranks.gather(None)
            error = ""
            with PeakMemory() as memory:
                start = time.perf_counter()
                try:
                    call(state, uri)
                except BaseException as raised:  # noqa: BLE001 - torch raises BaseExceptions; they become results
                    error = f"{type(raised).__name__}: {raised}"[:500]
                seconds = time.perf_counter() - start
            if not error and demo_model.first_difference(state) is not None:
                error = "the loaded values differ from the saved ones"
            rank_results: list[Any] = ranks.gather((seconds, memory.extra_bytes or 0, error))
            place: Sample = {"contender": name, "operation": operation, "round": turn, "bytes": size}
            if errors := [e for _, _, e in rank_results if e]:
                failed.add(name)
                samples.append({**place, "error": errors[0]})
                demo_model.restore(state)
                continue
            samples.append(
                {
                    **place,
                    "total_s": max(s for s, _, _ in rank_results),
                    "extra_bytes": max(x for _, x, _ in rank_results),
                }
            )
    return samples


def _voxlane_sharded(endpoint: str) -> Any:
    from voxlane import StoreConfig
    from voxlane.checkpoint.distributed_reader import load_sharded
    from voxlane.checkpoint.distributed_writer import save_sharded

    config = StoreConfig(endpoint=endpoint)
    return lambda state, uri: save_sharded(state, uri, config), lambda state, uri: load_sharded(state, uri, config)


def _fsspec_sharded(endpoint: str) -> Any:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

    return (
        lambda state, uri: dcp.save(state, storage_writer=FsspecWriter(uri, endpoint_url=endpoint)),
        lambda state, uri: dcp.load(state, storage_reader=FsspecReader(uri, endpoint_url=endpoint)),
    )


def _s3torchconnector_sharded(endpoint: str) -> Any:
    import torch.distributed.checkpoint as dcp
    from s3torchconnector import S3ClientConfig
    from s3torchconnector.dcp import S3StorageReader, S3StorageWriter

    config = S3ClientConfig(force_path_style=True)  # it reads the endpoint only from AWS_ENDPOINT_URL
    return (
        lambda state, uri: dcp.save(state, storage_writer=S3StorageWriter(REGION, uri, config)),
        lambda state, uri: dcp.load(state, storage_reader=S3StorageReader(REGION, uri, config)),
    )


SHARDED: dict[str, Callable[[str], Any]] = {
    "voxlane": _voxlane_sharded,
    "s3fs": _fsspec_sharded,
    "s3torchconnector": _s3torchconnector_sharded,
}


# -- how long an asynchronous save blocks training --------------------------------------------------------------------


def run_async(device: torch.device, endpoint: str, bucket: str, size_bytes: int, rounds: int) -> list[Sample]:
    """On one rank, measure the time until `AsyncSaver.save` returns and the time of a plain copy of the same state.

    Both reuse the memory of the previous round. The first round, which allocates it, is marked as `first`.
    """
    from voxlane import StoreConfig
    from voxlane.checkpoint.async_save import AsyncSaver

    set_up(endpoint)
    state = make_state("large", size_bytes, device)
    copies: State | None = None
    samples: list[Sample] = []
    with AsyncSaver(StoreConfig(endpoint=endpoint)) as saver:
        for turn in range(rounds + 1):
            start = time.perf_counter()
            if copies is None:
                copies = {name: tensor.clone() for name, tensor in state.items()}
            else:
                for name, tensor in state.items():
                    copies[name].copy_(tensor)
            copied_s = time.perf_counter() - start
            start = time.perf_counter()
            future = saver.save(state, f"s3://{bucket}/async/{turn}")
            blocked_s = time.perf_counter() - start
            future.result()
            whole_s = time.perf_counter() - start
            samples.append({"first": turn == 0, "copy_s": copied_s, "blocked_s": blocked_s, "whole_s": whole_s})
    return samples
