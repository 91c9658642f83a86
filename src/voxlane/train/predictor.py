"""Apply trained networks, of one run or of several folds together, to whole scans, and write masks of new scans.

Nothing here needs more than the base install: exported models are used on machines that train nothing.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import pydantic
import torch
from tqdm import tqdm

from voxlane import uri as uris
from voxlane.checkpoint import Checkpoint
from voxlane.errors import ConfigError, RunError, ScanError
from voxlane.model.networks import build
from voxlane.model.sliding_window import predict_windows
from voxlane.settings import record
from voxlane.store import StoreConfig
from voxlane.store.bucket import ignore_missing_object
from voxlane.train.config import resolve_network
from voxlane.train.run import Run, TrainedRun
from voxlane.train.scan_inputs import ScanInput, parse_scan
from voxlane.volume.case_checks import count_values
from voxlane.volume.description import Description
from voxlane.volume.formats import open_store
from voxlane.volume.geometry import Geometry
from voxlane.volume.grid import Grid, image_to_grid, mask_to_scan, outputs_to_scan, plan_grid
from voxlane.volume.memory import available_bytes
from voxlane.volume.plan import NNUNET_RECIPE, Plan, Triple, to_triple
from voxlane.volume.scan import Scan, Spacing, strip_scan_suffix, write_mask
from voxlane.volume.scan_checks import check_growth
from voxlane.volume.scan_reader import read_channels

Mask = npt.NDArray[np.uint8]


@record
class PredictConfig:
    """The config of prediction."""

    checkpoint: Literal["last", "best"] = "last"
    """Checkpoint of a run to use; an exported model has only one. best: the one with the highest Dice in the
    validations while training; those used the same held-out cases, so its scores are too high. Without held-out cases,
    best means last."""
    overlap: float = pydantic.Field(default=0.5, ge=0, lt=1)
    """Fraction of a window that the next window overlaps."""
    mirror: bool | None = None
    """Average the predictions of all mirror images: eight times the work for slightly better accuracy. null: as nnU-Net
    does, models that were imported from it mirror along the axes they were trained with; others do not."""
    window_batch: int = pydantic.Field(default=4, ge=1)
    """Number of windows predicted at once."""
    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    """Device to predict on. auto: a GPU if there is one."""
    precision: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format of the network's arithmetic. auto: bfloat16 on GPUs, float32 elsewhere."""
    scan_timeout_s: float = pydantic.Field(default=1800.0, gt=0)
    """Seconds that reading one scan may take. A scan that takes longer is given up."""


@dataclass(frozen=True)
class RunCheckpoint:
    """The weights of a run that a prediction uses."""

    run_uri: str
    name: str
    """last or best."""
    step: int | None
    """Number of steps that the weights were trained."""
    digest: str
    """SHA-256 (hexadecimal) of the weights."""


@dataclass
class Predictor:
    """Networks of one architecture, whose outputs are averaged.

    Host memory for a scan of V voxels and C channels, on a plan's grid of P voxels, with K outputs: the scan as stored,
    4CP bytes for its image, 2KP for the outputs (6KP with several networks), 10V for two outputs on the scan's grid and
    the mask, and one slab of windows (see `predict_windows`). For 400 x 512 x 512 voxels of int16, one channel, three
    outputs and no resampling that is about 3 GB including libraries; a test keeps it below 3.3 GB.
    """

    networks: list[torch.nn.Module]
    plan: Plan
    description: Description
    patch: Triple
    device: torch.device
    config: PredictConfig
    checkpoints: tuple[RunCheckpoint, ...] = ()
    """The weights of each network."""
    mirror_axes: tuple[int, ...] = (0, 1, 2)
    """Axes (z, y, x) to mirror along."""

    @classmethod
    def load(cls, runs: Sequence[Run], config: PredictConfig | None = None) -> Predictor:
        """Load the networks of `runs`, with the weights that `config.checkpoint` names."""
        config = config or PredictConfig()
        device = choose_device(config)
        trained_runs = [TrainedRun.load(run) for run in runs]
        first = trained_runs[0]
        for run, trained in zip(runs, trained_runs, strict=True):
            for difference, value, expected in (
                ("for other channels or labels", trained.description, first.description),
                ("by another plan", trained.plan, first.plan),
                ("with another patch", trained.patch, first.patch),
            ):
                if value != expected:
                    raise ConfigError(
                        f"this run was trained {difference} than {runs[0].folder_uri}",
                        uri=run.folder_uri,
                        fix="Combine only runs with the same prepared dataset and config",
                    )
        loaded = [_load_network(run, trained, config) for run, trained in zip(runs, trained_runs, strict=True)]
        networks = [place_network(network, device) for network, _ in loaded]
        checkpoints = tuple(checkpoint for _, checkpoint in loaded)
        return cls(networks, first.plan, first.description, first.patch, device, config, checkpoints=checkpoints)

    def predict_outputs(self, image: torch.Tensor, progress: Callable[[int, int], None] | None = None) -> torch.Tensor:
        """Return the mean logits (K, Z, Y, X), float16 on the CPU, of an image (C, Z, Y, X) on the plan's grid."""
        mean: torch.Tensor | None = None
        for number, network in enumerate(self.networks):

            def step(done: int, total: int, before: int = number) -> None:
                if progress is not None:
                    progress(before * total + done, len(self.networks) * total)

            logits = predict_windows(
                network,
                image,
                self.patch,
                overlap=self.config.overlap,
                batch=self.config.window_batch,
                mirror_axes=self.mirror_axes if self._mirrors else (),
                device=self.device,
                autocast=self._autocast,
                result_dtype=torch.float16,
                float16_sums=self._rounds_as_nnunet,
                progress=step,
            )
            if len(self.networks) == 1:
                return logits
            if mean is None:
                mean = logits if self._rounds_as_nnunet else logits.float()
            else:
                mean.add_(logits)
        assert mean is not None
        return mean.div_(len(self.networks)).half()

    @property
    def _rounds_as_nnunet(self) -> bool:
        """Whether logits are rounded to float16 wherever nnU-Net does, so that an imported model gives its masks."""
        return self.plan.recipe == NNUNET_RECIPE

    @property
    def _mirrors(self) -> bool:
        return self.plan.recipe == NNUNET_RECIPE if self.config.mirror is None else self.config.mirror

    @property
    def _autocast(self) -> torch.dtype | None:
        if self.config.precision == "auto":
            if self.device.type != "cuda":
                return None
            return torch.float16 if self._rounds_as_nnunet else torch.bfloat16
        return None if self.config.precision == "float32" else getattr(torch, self.config.precision)

    def predict(
        self,
        image: npt.NDArray[Any],
        spacing: tuple[float, float, float],
        *,
        geometry: Geometry | None = None,
        uri: str = "",
        progress: Callable[[int, int], None] | None = None,
    ) -> Mask:
        """Return the mask (Z, Y, X) of a scan (C, Z, Y, X) in its own canonical grid.

        geometry: the scan's, which models need that see scans along the axes of their files.
        """
        mask = self.mask_in_scan(*self._predict_on_grid(image, spacing, geometry, uri, progress))
        return geometry.from_stored(mask) if geometry is not None and self.plan.axes == "stored" else mask

    def predict_probabilities(
        self,
        image: npt.NDArray[Any],
        spacing: tuple[float, float, float],
        *,
        geometry: Geometry | None = None,
        uri: str = "",
        progress: Callable[[int, int], None] | None = None,
    ) -> torch.Tensor:
        """Return the probability (K, Z, Y, X) of each output, float32, in the scan's own canonical grid; outside of the
        scan's nonzero part all is background. Memory: twice the result."""
        outputs, grid = self._predict_on_grid(image, spacing, geometry, uri, progress)
        logits = outputs_to_scan(outputs.float(), grid, separate=self.plan.resampling.separate)
        result = torch.zeros((len(logits), *grid.scan_shape))
        if self.description.regions:
            torch.sigmoid(logits, out=logits)
        else:
            result[0] = 1
            logits = logits.softmax(0)
        result[(slice(None), *grid.crop)] = logits
        if geometry is not None and self.plan.axes == "stored":
            result = torch.from_numpy(np.ascontiguousarray(geometry.from_stored(result.numpy())))
        return result

    def _predict_on_grid(
        self,
        image: npt.NDArray[Any],
        spacing: tuple[float, float, float],
        geometry: Geometry | None,
        uri: str,
        progress: Callable[[int, int], None] | None,
    ) -> tuple[torch.Tensor, Grid]:
        """Return the mean logits of a scan (C, Z, Y, X) on the plan's grid, and that grid."""
        if self.plan.axes == "stored":
            if geometry is None:
                raise ConfigError("geometry: this model needs it, to see scans along the axes of their files")
            image, spacing = np.ascontiguousarray(geometry.to_stored(image)), geometry.stored_spacing
        channels = self.description.channels
        if len(image) != len(channels):
            raise ScanError(
                f"the scan has {len(image)} channel{'s' * (len(image) != 1)}, but the model was trained on "
                f"{len(channels)} ({', '.join(channels)})",
                uri=uri,
                fix="Give one file per channel, joined by commas, in this order" * (len(channels) > 1),
            )
        grid = plan_grid(image, spacing, self.plan)
        crop_shape = to_triple(stop - start for start, stop in zip(grid.crop_start, grid.crop_stop, strict=True))
        if text := check_growth(crop_shape, grid.shape, spacing, len(channels), available_bytes()):
            raise ScanError(text, uri=uri, fix="Check the spacing in its header")
        return self.predict_outputs(torch.from_numpy(image_to_grid(image, grid, self.plan)), progress), grid

    def mask_in_scan(self, outputs: torch.Tensor, grid: Grid) -> Mask:
        """Return a scan's mask from outputs on the plan's grid, resampled to the scan's grid one output at a time."""
        dtype = torch.float16 if self._rounds_as_nnunet else torch.float32
        separate = self.plan.resampling.separate
        channels = (outputs_to_scan(output[None].float(), grid, separate=separate)[0].to(dtype) for output in outputs)
        best = None if self.description.regions else next(channels)
        mask = torch.zeros([side.stop - side.start for side in grid.crop], dtype=torch.uint8)
        for value, channel in zip(self.description.mask_values, channels, strict=True):
            mask[channel > (0 if best is None else best)] = value
            if best is not None:
                torch.maximum(best, channel, out=best)
        return mask_to_scan(mask.numpy(), grid)


def choose_device(config: PredictConfig) -> torch.device:
    """Return the device that `config.accelerator` chooses."""
    if config.accelerator == "gpu" and not torch.cuda.is_available():
        raise ConfigError("accelerator: torch finds no GPU on this machine", fix="Leave it out to use the CPU")
    return torch.device("cuda" if config.accelerator != "cpu" and torch.cuda.is_available() else "cpu")


def place_network(network: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """Move a network to the device, in the memory format that is fast there."""
    network = network.to(device)
    if device.type == "cuda":
        network.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
    return network


def _load_network(run: Run, trained: TrainedRun, config: PredictConfig) -> tuple[torch.nn.Module, RunCheckpoint]:
    name, saved = load_checkpoint(run, config.checkpoint)
    weights = select_weights(saved)
    network = build(
        resolve_network(trained.config, trained.plan),
        len(trained.description.channels),
        trained.description.outputs,
        deep_supervision=False,
    )
    try:
        network.load_state_dict(weights)
    except RuntimeError:
        raise RunError(
            "the checkpoint does not match the network in run.json",
            uri=run.folder_uri,
            fix="Restore the run's own files, or train again into another folder",
        ) from None
    return network.eval(), RunCheckpoint(run.folder_uri, name, saved.get("global_step"), compute_digest(weights))


def compute_digest(weights: Mapping[str, torch.Tensor]) -> str:
    """Return the SHA-256 (hexadecimal) of weights on the CPU: of their names, types, shapes and values."""
    digest = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def load_weights(run: Run, checkpoint: Literal["best", "last"]) -> dict[str, Any]:
    """Load the network's weights from a run's checkpoint; from `last` if there is no `best`."""
    return select_weights(load_checkpoint(run, checkpoint)[1])


def select_weights(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the network's weights from the content of a run's checkpoint."""
    prefix = "network."
    return {k.removeprefix(prefix): v for k, v in (saved.get("state_dict") or {}).items() if k.startswith(prefix)}


def load_checkpoint(run: Run, checkpoint: Literal["best", "last"]) -> tuple[str, dict[str, Any]]:
    """Return the name and content of a run's checkpoint; of `last` if there is no `best`."""
    for name in dict.fromkeys((checkpoint, "last")):
        with ignore_missing_object():
            loaded = Checkpoint(run.checkpoints_uri, run.config).load(f"{name}.ckpt", map_location="cpu")
            return name, loaded if isinstance(loaded, dict) else {}
    raise RunError(
        "the run has no checkpoint yet", uri=run.folder_uri, fix="Continue it: voxlane train DATA --run RUN --resume"
    )


# -- new scans ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PredictionJob:
    """A scan and the mask to write for it."""

    scan: str
    """The scan as the user gave it."""
    files: tuple[str, ...]
    """Files of the scan: one per channel, or one with all channels."""
    mask: str


@dataclass(frozen=True)
class Prediction:
    """A mask that was written."""

    scan: str
    mask: str
    volumes_ml: dict[str, float]
    """Volume of each target in millilitres."""
    seconds: float
    """Time that reading, predicting and writing took."""
    warnings: tuple[str, ...] = ()
    """What is suspicious about the scan."""


def plan_predictions(scans: Sequence[str | ScanInput], out: str) -> list[PredictionJob]:
    """Return the files to read and write, without reading a scan. Masks go below `out`, as NAME.nii.gz.

    A scan is a NIfTI or .npy file, a folder of one DICOM series, or, for a model with several channels, one file per
    channel joined by commas. Raises ConfigError if a mask would overwrite another mask or a scan.
    """
    folder = str(uris.parse(out)).rstrip("/")
    jobs: dict[str, PredictionJob] = {}
    for each in scans:
        scan = parse_scan(each) if isinstance(each, str) else each
        job = PredictionJob(scan.scan, scan.files, f"{folder}/{scan.name}.nii.gz")
        if job.mask in jobs:
            raise ConfigError(
                f"{jobs[job.mask].scan} and {scan.scan} would both write {scan.name}.nii.gz",
                fix="Predict them into two folders",
            )
        jobs[job.mask] = job
    masks = {_resolve_links(job.mask) for job in jobs.values()}
    for job in jobs.values():
        for file in job.files:
            if _resolve_links(file) in masks:
                raise ConfigError("a mask would overwrite this scan", uri=file, fix="Choose another folder (-o)")
    return list(jobs.values())


def _resolve_links(uri: str) -> str:
    """Resolve links in a local URI, so that two names of one file compare equal."""
    parsed = uris.parse(uri)
    return os.path.realpath(f"/{parsed.key}") if parsed.scheme == "file" else uri


class ScanPredictor(Protocol):
    """Whatever segments scans: the networks of runs, or an exported model."""

    @property
    def description(self) -> Description:
        """Channels and labels."""

    def predict(
        self,
        image: npt.NDArray[Any],
        spacing: tuple[float, float, float],
        *,
        geometry: Geometry | None = None,
        uri: str = "",
        progress: Callable[[int, int], None] | None = None,
    ) -> Mask:
        """Return the mask (Z, Y, X) of a scan (C, Z, Y, X) in its own canonical grid."""


def predict(
    predictor: ScanPredictor,
    job: PredictionJob,
    config: StoreConfig | None = None,
    *,
    progress: bool | None = None,
    read: Callable[[Sequence[str], StoreConfig | None, Spacing | None], Scan] = read_channels,
) -> Prediction:
    """Read a scan with `read`, segment it and write its mask.

    The mask has the scan's grid, affine and integer type; uint8 if the scan has floats, or integers that cannot hold
    the labels. `progress` forces the bar on or off; by default it shows on a terminal.
    """
    started_at = time.perf_counter()
    target = uris.parse(job.mask)
    open_store(target.root, config).check_writable(target.key)
    scan = read(job.files, config, predictor.description.spacing)
    with tqdm(
        desc=strip_scan_suffix(job.mask), unit="window", disable=None if progress is None else not progress
    ) as bar:

        def step(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        geometry = scan.geometry
        mask = predictor.predict(scan.image, geometry.spacing, geometry=geometry, uri=job.scan, progress=step)
    description = predictor.description
    write_mask(job.mask, mask, scan.geometry, dtype=mask_dtype(scan.dtype, description), config=config)
    voxel_ml = float(np.prod(scan.geometry.spacing)) / 1000
    counts = count_values(mask)
    members = zip(description.targets, description.target_values, strict=True)
    volumes = {target: float(counts[list(values)].sum()) * voxel_ml for target, values in members}
    warnings = tuple(remark.detail for remark in scan.remarks)
    return Prediction(job.scan, job.mask, volumes, time.perf_counter() - started_at, warnings)


class RemainingTime:
    """Estimates how long the rest of many scans takes, from the mean time of those that are done."""

    def __init__(self, total: int) -> None:
        self.total, self.done = total, 0
        self._started_at = time.perf_counter()

    def finish_one(self) -> str:
        """Count a scan; return text such as "; 3 of 120, 8 min left", empty if there is only one scan."""
        self.done += 1
        if self.total == 1:
            return ""
        left = self.total - self.done
        minutes = (time.perf_counter() - self._started_at) / self.done * left / 60
        estimate = f", {minutes:.0f} min left" if minutes >= 1 else ", less than a minute left" if left else ""
        return f"; {self.done} of {self.total}{estimate}"


def mask_dtype(scan_dtype: np.dtype[Any], description: Description) -> np.dtype[Any]:
    """Return the scan's type if it is an integer that holds every label, else uint8."""
    if scan_dtype.kind in "iu" and np.iinfo(scan_dtype).max >= max(description.labels.values()):
        return scan_dtype
    return np.dtype(np.uint8)
