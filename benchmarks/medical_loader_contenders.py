"""Loaders of training patches, each used as its documentation recommends: the work of a measured process.

Every contender yields batches of patches with labels, with the same number of worker processes. What is counted:

- Time starts when the dataset is built and ends with the last batch. Imports are excluded (and reported separately),
  because every measured process has imported torch already. `first_batch_s` includes listing, reading headers, filling
  a cache that the loader fills before it starts, starting workers, and the first batch. `samples_per_s` counts from the
  batch at which every worker has yielded one, unless the contender says otherwise.
- No contender augments or moves data to a device.
- Bytes from a bucket are counted by the server. Bytes from disk are those that the processes requested from the kernel
  (`rchar`). The page cache holds them, because the data were written just before.

Choices that a loader leaves open were made in its favour: loaders of whole objects decode without a copy and crop at a
random position, without the public demo's search for foreground in each volume.
"""

from __future__ import annotations

import importlib
import io
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import torch
from torch.utils.data import DataLoader, Dataset

import medical_loader_data
from isolated_runs import Sample, Stopwatch
from servers import ACCESS_KEY, REGION, SECRET_KEY

FOREGROUND_SHARE = 1 / 3
"""Fraction of patches around foreground, for loaders that know its positions; nnU-Net's default."""
Batch = tuple[torch.Tensor, torch.Tensor]
"""Images and labels, each (B, 1, Z, Y, X) or (B, Z, Y, X)."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One measurement of a contender."""

    contender: str
    folder: str
    """Local folder that `medical_loader_data` wrote to."""
    endpoint: str
    bucket: str
    """Bucket with the same data: raw/, prepared/, litdata/, litdata-zstd/."""
    volumes: int
    volume_side: int
    """Voxels of a volume along each axis."""
    patches: int
    side: int
    """Voxels of a patch along each axis."""
    batch: int
    workers: int
    cache: str
    """Folder for contenders that cache on disk."""
    proof: str
    """File for the first batch, which is then compared with the volumes."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A loader of patches."""

    place: str
    """Source of the data: disk or bucket."""
    modules: tuple[str, ...]
    """Modules that are imported before the measured time."""
    open: Callable[[Job], Iterator[Batch]]
    """Builds the loader and yields batches."""
    packages: tuple[str, ...] = field(default=())
    """Packages whose versions the result file records."""
    from_start: bool = False
    """Whether samples per second count from the start, for loaders that run only one epoch."""


def load_patches(**arguments: Any) -> Sample:
    """Load the job's patches; return the times, CPU time and bytes read of this process and its workers."""
    job = Job(**arguments)
    contender = CONTENDERS[job.contender]
    _set_up(job)
    imports = perf_counter()
    for module in contender.modules:
        importlib.import_module(module)
    import_s = perf_counter() - imports
    read_before = _read_bytes()
    watch = Stopwatch()
    first: Batch | None = None
    taken, arrivals, cpu_s = [0], [0.0], [0.0]
    for batch in contender.open(job):
        first = first or batch
        taken.append(taken[-1] + len(batch[0]))
        arrivals.append(watch.elapsed_s())
        cpu_s.append(watch.cpu_s() + _workers_cpu_s())
        if taken[-1] >= job.patches:
            break
    if first is None or taken[-1] < job.patches:
        raise AssertionError(f"{taken[-1]} patches of {job.patches}")
    read = _read_bytes() - read_before
    mark = 0 if contender.from_start else min(job.workers, len(taken) - 2)
    np.savez(job.proof, image=first[0].numpy(), label=first[1].numpy())
    return {
        "import_s": import_s,
        "first_batch_s": arrivals[1],
        "total_s": arrivals[-1],
        "samples": taken[-1],
        "samples_per_s": (taken[-1] - taken[mark]) / (arrivals[-1] - arrivals[mark]),
        "client_cpu_s": cpu_s[-1],
        "client_cpu_s_per_sample": (cpu_s[-1] - cpu_s[mark]) / (taken[-1] - taken[mark]),
        "read_calls_bytes": read,
    }


def _set_up(job: Job) -> None:
    warnings.filterwarnings("ignore")  # every library warns about something; real problems raise errors
    torch.set_num_threads(1)
    os.environ.update(
        STORAGE_EMULATOR_HOST=job.endpoint,
        AWS_ACCESS_KEY_ID=ACCESS_KEY,
        AWS_SECRET_ACCESS_KEY=SECRET_KEY,
        AWS_DEFAULT_REGION=REGION,
        AWS_REGION=REGION,
        GOOGLE_CLOUD_PROJECT="benchmark",
        LITDATA_DISABLE_VERSION_CHECK="1",  # otherwise it asks PyPI for a newer version
        nnUNet_raw=job.folder,  # otherwise nnU-Net prints that these are missing
        nnUNet_preprocessed=job.folder,
        nnUNet_results=job.folder,
    )


def _workers() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def _workers_cpu_s() -> float:
    """Return the CPU time of running workers; the stopwatch counts those that have ended."""
    total = 0.0
    for process in _workers():
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def _read_bytes() -> int:
    """Return the bytes that this process and its workers, running or ended, have read by calls."""
    total = 0
    for process in [psutil.Process(), *_workers()]:
        try:
            total += process.io_counters().read_chars
        except psutil.NoSuchProcess:
            continue
    return total


# -- ours --------------------------------------------------------------------------------------------------------------


def _voxlane_patches(root: Callable[[Job], str]) -> Callable[[Job], Iterator[Batch]]:
    """Use our stream of patches with its defaults, but without its memory cache, which would soon hold all volumes of
    such a small dataset. Every patch comes from the bucket or the disk."""

    def open_stream(job: Job) -> Iterator[Batch]:
        import voxlane
        from voxlane.volume.case_volumes import CacheLimits

        uri = root(job)
        config = medical_loader_data.store_config(job.endpoint if "://" in uri and not uri.startswith("file:") else "")
        stream = voxlane.PatchStream(
            voxlane.Prepared.load(uri, config),
            samples=job.patches,
            patch=(job.side,) * 3,
            foreground_share=FOREGROUND_SHARE,
            caching=CacheLimits(ram_bytes=0),
        )
        for batch in voxlane.DataLoader(stream, job.batch, num_workers=job.workers):
            yield batch["image"], batch["label"]

    return open_stream


def _voxlane_whole(job: Job) -> Iterator[Batch]:
    """Use our client to read whole objects, with image and label matched by key; it lists when built."""
    import voxlane

    parts = {
        kind: voxlane.MapDataset(
            f"s3://{job.bucket}/raw/{kind}/", decode=_npy, config=medical_loader_data.store_config(job.endpoint)
        )
        for kind in ("images", "labels")
    }
    pairs = voxlane.MapDataset.zip(**parts)
    len(pairs)  # lists

    def read(indices: Sequence[int]) -> list[tuple[Any, Any]]:
        return [(pair["images"], pair["labels"]) for pair in pairs.__getitems__(indices)]

    return _whole(job, read)


# -- whole objects -----------------------------------------------------------------------------------------------------


Pair = tuple[npt.NDArray[np.float32], npt.NDArray[np.uint8]]


def _npy(body: Any) -> npt.NDArray[Any]:
    """Return the array of a .npy file, without a copy."""
    view = memoryview(body)
    start = io.BytesIO(view[:256])  # numpy writes a header of 128 bytes for arrays such as ours
    np.lib.format.read_magic(start)
    shape, _, dtype = np.lib.format.read_array_header_1_0(start)
    return np.frombuffer(view, dtype, offset=start.tell()).reshape(shape)


class _Crops(Dataset[Batch]):
    """Crops each volume that `read` returns for an index at a random position."""

    def __init__(self, volumes: int, side: int, read: Callable[[Sequence[int]], list[Pair]]) -> None:
        self._volumes = volumes
        self._side = side
        self._read = read

    def __len__(self) -> int:
        return self._volumes

    def __getitem__(self, index: int) -> Batch:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Batch]:
        return [_crop(image, label, self._side) for image, label in self._read(indices)]


def _crop(image: npt.NDArray[Any], label: npt.NDArray[Any], side: int) -> Batch:
    # torch seeds itself in each worker, numpy does not
    start = [int(torch.randint(0, n - side + 1, ())) for n in image.shape]
    box = tuple(slice(a, a + side) for a in start)
    patch = image[box].copy() if image.dtype == np.float32 else medical_loader_data.normalised(image[box])
    return torch.from_numpy(patch), torch.from_numpy(label[box].copy())


def _whole(job: Job, read: Callable[[Sequence[int]], list[Pair]]) -> Iterator[Batch]:
    """Use torch's DataLoader over all volumes in turn, until there are enough patches."""
    order = [i % job.volumes for i in range(job.patches)]
    crops = _Crops(job.volumes, job.side, read)
    loader = DataLoader(crops, job.batch, sampler=order, num_workers=job.workers)
    return iter(loader)


def _dataflux(job: Job) -> Iterator[Batch]:
    """Use Google's connector as its segmentation demo does: list images and labels first, then download a batch of
    each with composed download at its default limit of 100 MB (labels are composed, images are too large)."""
    import dataflux_core
    from dataflux_pytorch.dataflux_mapstyle_dataset import Config
    from google.cloud import storage

    config = Config(sort_listing_results=True)
    download_options = dataflux_core.download.DataFluxDownloadOptimizationParams(
        max_composite_object_size=config.max_composite_object_size
    )
    client = storage.Client(project="benchmark")
    listed = {
        kind: dataflux_core.fast_list.ListingController(
            max_parallelism=config.num_processes,
            project="benchmark",
            bucket=job.bucket,
            sort_results=True,
            prefix=f"raw/{kind}/",
        ).run()
        for kind in ("images", "labels")
    }

    def read(indices: Sequence[int]) -> list[Pair]:
        bodies = [
            dataflux_core.download.dataflux_download(
                project_name="benchmark",
                bucket_name=job.bucket,
                objects=[listed[kind][i] for i in indices],
                storage_client=client,
                dataflux_download_optimization_params=download_options,
            )
            for kind in ("images", "labels")
        ]
        return [(_npy(image), _npy(label)) for image, label in zip(*bodies, strict=True)]

    return _whole(job, read)


def _s3torchconnector(job: Job) -> Iterator[Batch]:
    """Use AWS's connector: map-style datasets of images and labels, listed when built, with sequential readers, as it
    recommends for whole objects."""
    from s3torchconnector import S3ClientConfig, S3MapDataset, S3ReaderConstructor

    parts = [
        S3MapDataset.from_prefix(
            f"s3://{job.bucket}/raw/{kind}/",
            region=REGION,
            endpoint=job.endpoint,
            transform=lambda reader: _npy(reader.read()),
            s3client_config=S3ClientConfig(force_path_style=True),
            reader_constructor=S3ReaderConstructor.sequential(),
        )
        for kind in ("images", "labels")
    ]
    for part in parts:
        len(part)  # lists

    def read(indices: Sequence[int]) -> list[Pair]:
        return [(parts[0][i], parts[1][i]) for i in indices]

    return _whole(job, read)


def _litdata_dataset(job: Job, form: str, **arguments: Any) -> Any:
    """Return litdata's StreamingDataset of whole volumes in its chunks, with its defaults except for the cache size."""
    import litdata
    from litdata.streaming import downloader

    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # its fast downloader rejects servers without TLS
    return litdata.StreamingDataset(
        f"s3://{job.bucket}/{form}",
        cache_dir=job.cache,
        max_cache_size="100GB",  # otherwise it caches nothing if less than 50 GB of disk are free
        storage_options={
            "endpoint_url": job.endpoint,
            "aws_access_key_id": ACCESS_KEY,
            "aws_secret_access_key": SECRET_KEY,
            "region_name": REGION,
        },
        **arguments,
    )


def _litdata(form: str) -> Callable[[Job], Iterator[Batch]]:
    """Use litdata's StreamingDataLoader on shuffled whole volumes; chunks pass through the cache folder on disk."""

    def open_stream(job: Job) -> Iterator[Batch]:
        import litdata

        dataset = _litdata_dataset(job, form, shuffle=True, transform=_LitdataCrop(job.side))
        loader = litdata.StreamingDataLoader(
            dataset, batch_size=job.batch, num_workers=job.workers, persistent_workers=True
        )
        while True:
            yield from loader

    return open_stream


class _LitdataCrop:
    """Crops an item in litdata's workers."""

    def __init__(self, side: int) -> None:
        self._side = side

    def __call__(self, item: dict[str, Any]) -> Batch:
        return _crop(item["image"], item["label"], self._side)


def _litdata_windows(job: Job) -> Iterator[Batch]:
    """Use litdata's `read_window`, made for long recordings: it reads by range the slices of a crop, and nothing
    else of the volume. Nothing is cached. The windows of a batch are read concurrently."""
    return _whole(job, _LitdataWindows(job))


class _LitdataWindows:
    """Reads windows with a dataset that each worker opens, as litdata requires."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._opened: tuple[Any, ThreadPoolExecutor] | None = None

    def __call__(self, indices: Sequence[int]) -> list[Pair]:
        job = self._job
        if self._opened is None:
            self._opened = _litdata_dataset(job, "litdata"), ThreadPoolExecutor(job.batch)
        dataset, pool = self._opened
        starts = [int(torch.randint(0, job.volume_side - job.side + 1, ())) for _ in indices]
        windows = pool.map(lambda i, z: dataset.read_window(i, start=z, frames=job.side), indices, starts)
        return [(window["image"], window["label"]) for window in windows]


# -- from local disk ---------------------------------------------------------------------------------------------------


def _nnunet(workers: bool, mapped: bool) -> Callable[[Job], Iterator[Batch]]:
    """Use nnU-Net's nnUNetDataLoader on its blosc2 files, in the multi-process augmenter that its trainer uses, without
    transforms and at the final patch size (its trainer reads larger patches to rotate them)."""

    def open_loader(job: Job) -> Iterator[Batch]:
        from batchgenerators.dataloading.nondet_multi_threaded_augmenter import NonDetMultiThreadedAugmenter
        from nnunetv2.training.dataloading.data_loader import nnUNetDataLoader
        from nnunetv2.training.dataloading.nnunet_dataset import nnUNetDatasetBlosc2
        from nnunetv2.utilities.label_handling.label_handling import LabelManager

        dataset = nnUNetDatasetBlosc2(str(Path(job.folder, "nnunet")))
        if not mapped:
            dataset.mmap_kwargs = {}  # as nnU-Net does on Windows: read calls are counted, mapped pages are not
        labels = LabelManager({"background": 0, **{f"class {c}": c for c in medical_loader_data.CLASSES}}, None)
        patch = (job.side,) * 3
        loader: Any = nnUNetDataLoader(
            dataset, job.batch, patch, patch, labels, oversample_foreground_percent=FOREGROUND_SHARE
        )
        if workers:
            loader = NonDetMultiThreadedAugmenter(
                data_loader=loader, transform=None, num_processes=job.workers, num_cached=6, wait_time=0.002
            )
        for batch in loader:
            yield batch["data"], batch["target"]

    return open_loader


def _monai_items(job: Job) -> list[dict[str, str]]:
    return [
        {
            kind[:-1]: str(Path(job.folder, "raw", kind, f"{medical_loader_data.name(i)}.npy"))
            for kind in ("images", "labels")
        }
        for i in range(job.volumes)
    ]


def _monai_transform(job: Job) -> Any:
    """Return transforms that load a volume and crop a batch of patches from it, as MONAI's tutorials do. The
    positions to crop at are found once and cached with the volume, as in its fast training guide."""
    from monai.data import set_track_meta
    from monai.transforms import (
        Compose,
        EnsureChannelFirstd,
        EnsureTyped,
        FgBgToIndicesd,
        LoadImaged,
        RandCropByPosNegLabeld,
    )

    set_track_meta(False)  # plain tensors are faster
    both = ["image", "label"]
    above_air = (medical_loader_data.LOWER_HU - medical_loader_data.MEAN_HU + 0.5) / medical_loader_data.STD_HU
    shares = {"pos": FOREGROUND_SHARE, "neg": 1 - FOREGROUND_SHARE}
    places = {"fg_indices_key": "label_fg", "bg_indices_key": "label_bg"}
    return Compose(
        [
            LoadImaged("image", dtype=np.float32),
            LoadImaged("label", dtype=np.uint8),
            EnsureChannelFirstd(both, channel_dim="no_channel"),
            EnsureTyped(both),
            FgBgToIndicesd("label", "_fg", "_bg", image_key="image", image_threshold=above_air),
            RandCropByPosNegLabeld(both, "label", (job.side,) * 3, num_samples=job.batch, **shares, **places),
        ]
    )


def _monai_batches(job: Job, dataset: Any) -> Iterator[Batch]:
    """Yield batches of the patches of one volume."""
    from monai.data import DataLoader as MonaiLoader

    order = [i % job.volumes for i in range(-(-job.patches // job.batch))]
    loader = MonaiLoader(dataset, batch_size=1, sampler=order, num_workers=job.workers)
    for batch in loader:
        yield batch["image"], batch["label"]


def _monai_cache(job: Job) -> Iterator[Batch]:
    """Use MONAI's CacheDataset: it reads all volumes (float32 .npy) and the positions to crop at into memory before the
    first batch. Cached volumes are not copied, which its documentation allows if transforms only crop."""
    from monai.data import CacheDataset

    dataset = CacheDataset(
        _monai_items(job),
        _monai_transform(job),
        cache_rate=1.0,
        num_workers=job.workers,
        progress=False,
        copy_cache=False,
    )
    return _monai_batches(job, dataset)


def monai_persistent(job: Job) -> Any:
    """Return MONAI's PersistentDataset in the folder `persistent`; it writes the files that are missing there."""
    from monai.data import PersistentDataset

    cache = str(Path(job.folder, "persistent"))
    return PersistentDataset(_monai_items(job), _monai_transform(job), cache_dir=cache)


def _monai_persistent(job: Job) -> Iterator[Batch]:
    """Use MONAI's PersistentDataset with files written before the measurement: every access loads a whole volume and
    the positions to crop at."""
    return _monai_batches(job, monai_persistent(job))


_NNUNET = ("nnunetv2.training.dataloading.data_loader", "nnunetv2.training.dataloading.nnunet_dataset")
_NNUNET += ("nnunetv2.utilities.label_handling.label_handling",)
_NNUNET += ("batchgenerators.dataloading.nondet_multi_threaded_augmenter",)
_OURS = ("voxlane.dataset", "voxlane.volume.patch_stream", "voxlane.volume.case_volumes", "obstore")

CONTENDERS: dict[str, Contender] = {
    "voxlane patches": Contender(
        place="bucket",
        modules=_OURS,
        packages=("voxlane", "obstore"),
        open=_voxlane_patches(lambda job: f"s3://{job.bucket}/prepared"),
    ),
    "voxlane whole objects": Contender(place="bucket", modules=_OURS, open=_voxlane_whole),
    "dataflux": Contender(
        place="bucket",
        modules=("dataflux_core", "dataflux_pytorch.dataflux_mapstyle_dataset", "google.cloud.storage"),
        packages=("gcs-torch-dataflux", "google-cloud-storage"),
        open=_dataflux,
    ),
    "s3torchconnector": Contender(
        place="bucket", modules=("s3torchconnector",), packages=("s3torchconnector",), open=_s3torchconnector
    ),
    "litdata, empty cache": Contender(
        place="bucket", modules=("litdata",), packages=("litdata",), open=_litdata("litdata"), from_start=True
    ),
    "litdata, zstd, empty cache": Contender(
        place="bucket", modules=("litdata",), open=_litdata("litdata-zstd"), from_start=True
    ),
    "litdata, windows": Contender(place="bucket", modules=("litdata",), open=_litdata_windows),
    "litdata, full cache": Contender(place="bucket", modules=("litdata",), open=_litdata("litdata")),
    "voxlane patches from disk": Contender(
        place="disk", modules=_OURS, open=_voxlane_patches(lambda job: f"file://{job.folder}/prepared")
    ),
    "nnU-Net blosc2": Contender(
        place="disk",
        modules=_NNUNET,
        packages=("nnunetv2", "blosc2", "batchgenerators"),
        open=_nnunet(workers=True, mapped=True),
    ),
    "MONAI CacheDataset": Contender(
        place="disk", modules=("monai.data", "monai.transforms"), packages=("monai",), open=_monai_cache
    ),
    "MONAI PersistentDataset": Contender(
        place="disk", modules=("monai.data", "monai.transforms"), open=_monai_persistent
    ),
    # This one is not timed; it counts the bytes of "nnU-Net blosc2".
    "nnU-Net blosc2, counted": Contender(place="disk", modules=_NNUNET, open=_nnunet(workers=False, mapped=False)),
}
