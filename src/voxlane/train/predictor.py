"""Trained networks applied to whole scans: one run's, or several folds' together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pydantic
import torch

from voxlane.checkpoint import Checkpoint
from voxlane.errors import ConfigError, NotFoundError, RunError, ScanError
from voxlane.model.networks import build
from voxlane.model.windows import predict_windows
from voxlane.settings import record
from voxlane.train.config import network_for
from voxlane.train.run import Run, Trained
from voxlane.volume.description import Description
from voxlane.volume.grid import Grid, image_to_grid, mask_to_scan, outputs_to_scan, plan_grid
from voxlane.volume.plan import Plan, Triple

Mask = npt.NDArray[np.uint8]


@record
class PredictConfig:
    """How masks are predicted."""

    checkpoint: Literal["last", "best"] = "last"
    """Which weights of the run. best: those with the highest Dice of the validations while training, which were over
    the same held-out cases, so that their scores flatter; where nothing was held out, the last."""
    overlap: float = pydantic.Field(default=0.5, ge=0, lt=1)
    """Share of a window that its neighbour covers too."""
    mirror: bool = False
    """Average over all mirrorings: eight times the work for a little accuracy."""
    window_batch: int = pydantic.Field(default=4, ge=1)
    """Windows predicted at once."""
    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    """Where to predict; auto: on a GPU where there is one."""
    precision: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Arithmetic of the network; auto: bfloat16 on GPUs, float32 elsewhere."""


@dataclass
class Predictor:
    """Networks that were trained alike, whose outputs are averaged.

    Memory on the host for a scan of V voxels and C channels, on a plan's grid of P voxels, with K outputs: the scan as
    it is stored, 4CP for its image, 2KP for the outputs (6KP with several networks), 10V for two outputs on the scan's
    grid and the mask, and one slab of windows (see `predict_windows`). For 400 x 512 x 512 voxels of int16, one
    channel, three outputs and no resampling that is about 3 GB, libraries included; a test holds it below 3.3.
    """

    networks: list[torch.nn.Module]
    plan: Plan
    description: Description
    patch: Triple
    device: torch.device
    how: PredictConfig

    @classmethod
    def load(cls, runs: Sequence[Run], how: PredictConfig | None = None) -> Predictor:
        """The networks of `runs`, with the weights that `how.checkpoint` names."""
        how = how or PredictConfig()
        if how.accelerator == "gpu" and not torch.cuda.is_available():
            raise ConfigError("accelerator: no GPU that torch can use is here", fix="Leave it out to use the CPU")
        device = torch.device("cuda" if how.accelerator != "cpu" and torch.cuda.is_available() else "cpu")
        every = [Trained.of(run) for run in runs]
        first = every[0]
        for run, trained in zip(runs, every, strict=True):
            for what, own, other in (
                ("for other channels or labels", trained.description, first.description),
                ("by another plan", trained.plan, first.plan),
                ("with another patch", trained.patch, first.patch),
            ):
                if own != other:
                    raise ConfigError(
                        f"this run was trained {what} than {runs[0].where}",
                        uri=run.where,
                        fix="Predict together with runs over one prepared dataset and of one config only",
                    )
        networks = [_network(run, trained, how).to(device) for run, trained in zip(runs, every, strict=True)]
        if device.type == "cuda":
            for network in networks:
                network.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
        return cls(networks, first.plan, first.description, first.patch, device, how)

    def outputs(self, image: torch.Tensor, progress: Callable[[int, int], None] | None = None) -> torch.Tensor:
        """Mean logits (K, Z, Y, X), float16 on the CPU, of an image (C, Z, Y, X) on the plan's grid."""
        mean: torch.Tensor | None = None
        for number, network in enumerate(self.networks):

            def step(done: int, total: int, before: int = number) -> None:
                if progress is not None:
                    progress(before * total + done, len(self.networks) * total)

            logits = predict_windows(
                network,
                image,
                self.patch,
                overlap=self.how.overlap,
                batch=self.how.window_batch,
                mirror_axes=(0, 1, 2) if self.how.mirror else (),
                device=self.device,
                autocast=self._autocast,
                result_dtype=torch.float16,
                progress=step,
            )
            if len(self.networks) == 1:
                return logits
            mean = logits.float() if mean is None else mean.add_(logits)
        assert mean is not None
        return mean.div_(len(self.networks)).half()

    @property
    def _autocast(self) -> torch.dtype | None:
        if self.how.precision == "auto":
            return torch.bfloat16 if self.device.type == "cuda" else None
        return None if self.how.precision == "float32" else getattr(torch, self.how.precision)

    def predict(
        self,
        image: npt.NDArray[Any],
        spacing: tuple[float, float, float],
        *,
        uri: str = "",
        progress: Callable[[int, int], None] | None = None,
    ) -> Mask:
        """The mask (Z, Y, X) of a scan (C, Z, Y, X) in its own canonical grid."""
        wanted = self.description.channels
        if len(image) != len(wanted):
            raise ScanError(
                f"the scan has {len(image)} channel{'s' * (len(image) != 1)}, and the model was trained on "
                f"{len(wanted)} ({', '.join(wanted)})",
                uri=uri,
                fix="Give one file a channel, joined by commas, in this order" * (len(wanted) > 1),
            )
        grid = plan_grid(image, spacing, self.plan)
        outputs = self.outputs(torch.from_numpy(image_to_grid(image, grid, self.plan)), progress)
        return self.mask_in_scan(outputs, grid)

    def mask_in_scan(self, outputs: torch.Tensor, grid: Grid) -> Mask:
        """The mask of a scan from the outputs on the plan's grid; one output at a time goes to the scan's grid."""
        values = self.description.mask_values
        mask: torch.Tensor | None = None
        best: torch.Tensor | None = None
        for index, output in enumerate(outputs):
            channel = outputs_to_scan(output[None].float(), grid)[0]
            if mask is None:
                mask = torch.zeros(channel.shape, dtype=torch.uint8)
            if self.description.regions:
                mask[channel > 0] = values[index]
            elif best is None:
                best = channel
            else:
                higher = channel > best
                mask[higher] = values[index - 1]
                best = torch.maximum(best, channel, out=best)
        assert mask is not None
        return mask_to_scan(mask.numpy(), grid)


def _network(run: Run, trained: Trained, how: PredictConfig) -> torch.nn.Module:
    network = build(
        network_for(trained.config, trained.plan),
        len(trained.description.channels),
        trained.description.outputs,
        deep_supervision=False,
    )
    try:
        network.load_state_dict(weights(run, how.checkpoint))
    except RuntimeError:
        raise RunError(
            "its checkpoint does not fit the network that run.json describes",
            uri=run.where,
            fix="Restore the run's own files, or train again into another folder",
        ) from None
    return network.eval()


def weights(run: Run, which: Literal["best", "last"]) -> dict[str, Any]:
    """The network's weights of a run's checkpoint."""
    names = ["best", "last"] if which == "best" else ["last"]
    for name in names:
        try:
            loaded = Checkpoint(run.checkpoints, run.config).load(f"{name}.ckpt", map_location="cpu")
        except NotFoundError as error:
            if type(error) is not NotFoundError:
                raise
            continue
        prefix = "network."
        state = loaded.get("state_dict") if isinstance(loaded, dict) else None
        return {k.removeprefix(prefix): v for k, v in (state or {}).items() if k.startswith(prefix)}
    raise RunError(
        "the run has no checkpoint yet", uri=run.where, fix="Train on: voxlane train DATA --run RUN --resume"
    )
