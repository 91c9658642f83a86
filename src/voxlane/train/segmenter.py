"""The Lightning module: a network, its loss, its augmentation on the device, and whole-volume validation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor

from voxlane.model import scores
from voxlane.model.augment import Augment
from voxlane.model.loss import DiceCE
from voxlane.model.networks import build, check_patch
from voxlane.model.recorded import Recorded
from voxlane.model.windows import predict_windows, to_mask
from voxlane.train.config import Optimizer, TrainConfig, learning_rate, network_for
from voxlane.train.prefetch import Prefetch
from voxlane.train.timing import Stopwatch
from voxlane.volume.description import Description
from voxlane.volume.plan import Plan

Batch = dict[str, Any]


class Segmenter(pl.LightningModule):
    """Trains on patches, validates on whole volumes.

    Nothing random happens outside of a patch's own seed, so that a run that goes on from a checkpoint computes what
    it would have computed without the pause.
    """

    def __init__(
        self,
        config: TrainConfig,
        plan: Plan,
        description: Description,
        total_steps: int,
        *,
        ranks: int = 1,
        parts: int = 1,
    ) -> None:
        """`parts`: how many a rank's share of a batch is done in, one after another."""
        super().__init__()
        self.ranks = ranks
        self.parts = parts
        self.settings = config
        self.plan = plan
        self.description = description
        self.total_steps = total_steps
        self.patch = config.patch or plan.patch
        network = network_for(config, plan)
        check_patch(network, self.patch)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self.network = build(
                network,
                len(description.channels),
                description.outputs,
                deep_supervision=config.deep_supervision,
                fused=config.fused,
            )
        self.sharded = config.strategy == "fsdp" and ranks > 1
        if config.channels_last and not self.sharded:  # before DDP lays its buckets out; FSDP takes no such weights
            self.network.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
        self.loss = DiceCE.of(description, batch_dice=plan.batch_dice, recipe=config.loss, fused=config.fused)
        self.augment = Augment(config.augment, self.patch)
        self._step: Callable[[Tensor, Tensor], Tensor] = self._loss_of
        self.validated: dict[int, dict[str, float]] = {}
        """Row to Dice by target, of the last validation, over all ranks."""
        self.drawn: list[Batch] = []
        """Volumes of the last validation to draw, on this rank."""
        self._counted: list[tuple[int, Any]] = []
        self.dice: float | None = None
        """Mean of the last validation."""
        self.watches: dict[str, Stopwatch] = {}
        self.prefetch: Prefetch | None = None
        """On a GPU: makes patches ready beside the step before."""
        self.waited_s: Callable[[], float] = lambda: 0.0
        """How long the loader was waited for, of all batches."""
        self._waited_before_s = 0.0
        self._predicting = self.network

    def on_fit_start(self) -> None:
        """Choose how a step is computed on the device."""
        self.watches = {name: Stopwatch(self.device) for name in ("augment", "step")}
        self.watches["validate"] = Stopwatch()
        on_gpu = self.device.type == "cuda"
        self.prefetch = Prefetch(self.device) if on_gpu else None
        alone = self.ranks == 1
        if self.settings.compile:
            # With several parts, or ranks whose sums DDP's hooks begin, replaying would write over what is still used.
            recorded = on_gpu and alone and self.parts == 1
            self._step = torch.compile(self._loss_of, mode="reduce-overhead" if recorded else None)
        elif on_gpu and alone:
            # Small patches leave a GPU waiting for its next kernel. Across ranks gradients are summed while backward
            # goes on, by hooks that a replay, which gives all of them at its end, does not call; and a loss over the
            # whole batch speaks with the other ranks in between.
            self._step = self._record

    def on_fit_end(self) -> None:
        """A recorded step gives its memory back."""
        self._step = self._loss_of

    # -- training ------------------------------------------------------------------------------------------------

    def transfer_batch_to_device(self, batch: Batch, device: torch.device, dataloader_idx: int) -> Batch:
        """Image and label go to the device; seeds stay, and so do volumes, of which windows go one by one."""
        if not self.trainer.training:
            return batch
        if self.prefetch is None:
            return self._moved(batch, device)
        waited_s = self.waited_s()
        loader_s, self._waited_before_s = waited_s - self._waited_before_s, waited_s
        return self.prefetch(lambda: self._augmented(self._moved(batch, device)), loader_s)

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Augment training patches, where they are trained on."""
        if not self.trainer.training:
            return batch
        if self.prefetch is None:
            with self.watches["augment"]():
                batch = self._augmented(batch)
        self.watches["step"].start()
        return batch

    def _moved(self, batch: Batch, device: torch.device) -> Batch:
        return {**batch, **{name: batch[name].to(device, non_blocking=True) for name in ("image", "label")}}

    def _augmented(self, batch: Batch) -> Batch:
        image, label = self.augment(batch["image"], batch["label"], batch["seed"].cpu())
        if image.is_cuda and self.settings.channels_last and not self.sharded:  # here, and not within the step
            image = image.contiguous(memory_format=torch.channels_last_3d)
        return {**batch, "image": image, "label": label}

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Dice and cross-entropy of a batch of patches."""
        self.optimizers(use_pl_optimizer=False).zero_grad()  # type: ignore[union-attr]
        if self.parts == 1:
            # A copy, because torch.compile's recorded steps write over their results.
            loss = self._step(batch["image"], batch["label"])
            return loss.clone() if self.settings.compile else loss
        # Lightning's own accumulation counts batches, so that steps, epochs and schedules would depend on it. Here a
        # batch stays one step: all parts but the last are gone through backwards at once. They do so within DDP's
        # forward, before it expects gradients, so it sums over ranks only once, with the last part.
        images, labels = batch["image"].chunk(self.parts), batch["label"].chunk(self.parts)
        done: Tensor | float = 0.0
        for image, label in zip(images, labels, strict=True):
            loss = self._step(image, label) * (len(image) / len(batch["image"]))
            if image is not images[-1]:
                self.trainer.strategy.backward(loss, None)
                done = done + loss.detach()
        return loss + done

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        """Lightning's place for it is after the forward pass, when the first parts' gradients are there already, and a
        recorded step would have moved the last one's aside."""

    def _loss_of(self, image: Tensor, label: Tensor) -> Tensor:
        loss: Tensor = self.loss(self.network(image), label)
        return loss

    def _record(self, image: Tensor, label: Tensor) -> Tensor:
        """Record the step with its first patches, when the weights are where they stay; from then on it is replayed."""
        lower = self.autocast_dtype

        def loss_of(image: Tensor, label: Tensor) -> Tensor:
            with torch.autocast("cuda", lower, enabled=lower is not None, cache_enabled=False):
                return self._loss_of(image, label)

        network = self.network
        self._step = Recorded(loss_of, list(network.parameters()), (image, label), buffers=list(network.buffers()))
        return self._step(image, label)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """The step ends with the optimizer's."""
        self.watches["step"].stop()
        if self.prefetch is not None:
            self.prefetch.stepped()

    def configure_optimizers(self) -> Any:
        """The optimizer and its schedule, stepped after every batch."""
        how = dataclasses.replace(self.settings.optimizer, lr=learning_rate(self.settings, self.plan))
        # One kernel for all parameters; it cannot clip gradients that float16's scaler still holds scaled.
        fused = self.device.type == "cuda" and self.settings.precision != "float16"
        optimizer = make_optimizer(how, self.network, fused=fused)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: learning_rate_factor(step, self.total_steps, how)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        """Shorten long gradients. Lightning refuses to for any fused optimizer, though only float16's are scaled."""
        if gradient_clip_val is None:
            return
        if str(self.trainer.precision) == "16-mixed":
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm or "norm")
        else:
            weights = [weight for group in optimizer.param_groups for weight in group["params"]]
            if self.device.type == "cuda" and not self.sharded:
                shorten([weight.grad for weight in weights if weight.grad is not None], gradient_clip_val)
            else:
                torch.nn.utils.clip_grad_norm_(weights, gradient_clip_val)

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Tensors are kept in their own order, whatever it is in memory: sharding scrambles others when it loads
        them."""
        state: dict[str, Tensor] = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name: tensor.contiguous() for name, tensor in state.items()}
        for saved in checkpoint["optimizer_states"]:
            # Other dicts: those that the state dict has are the optimizer's own, which goes on with them.
            saved["state"] = {
                key: {name: _in_order(value) for name, value in held.items()}
                for key, held in saved.get("state", {}).items()
            }

    def on_train_start(self) -> None:
        """Loaded optimizer states go back to the order of their weights, which fused kernels count on."""
        optimizer: Any = self.optimizers(use_pl_optimizer=False)
        for weight, held in optimizer.state.items():
            for name, value in held.items():
                if isinstance(value, Tensor) and value.shape == weight.shape and value.stride() != weight.stride():
                    held[name] = torch.empty_like(weight).copy_(value)

    # -- sharded weights -----------------------------------------------------------------------------------------

    def configure_model(self) -> None:
        """Spread the network's weights over the ranks, where the strategy is to; stage by stage, so that only one is
        whole at a time."""
        if not self.sharded:
            return
        from torch.distributed.fsdp import FSDPModule, fully_shard

        if isinstance(self.network, FSDPModule):
            return
        mesh = self.device_mesh["data_parallel"]  # type: ignore[index]
        for part in self.network.children():
            for stage in part if isinstance(part, torch.nn.ModuleList) else [part]:
                fully_shard(stage, mesh=mesh)
        fully_shard(self.network, mesh=mesh)

    # -- validation ----------------------------------------------------------------------------------------------

    def on_validation_epoch_start(self) -> None:
        """Forget the validation before."""
        self._counted, self.drawn = [], []
        if self.watches:
            self.watches["validate"].start()
        self._predicting = self._whole() if self.sharded else self.network

    def _whole(self) -> torch.nn.Module:
        """The network with all its weights on this rank: each predicts other volumes, of so many windows, and sharded
        weights are only there while all ranks compute alike."""
        description = self.description
        network = build(
            network_for(self.settings, self.plan),
            len(description.channels),
            description.outputs,
            deep_supervision=False,
            fused=self.settings.fused,
        ).to(self.device)
        if self.settings.channels_last:
            network.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
        network.load_state_dict(
            {k: getattr(v, "full_tensor", lambda v=v: v)() for k, v in self.network.state_dict().items()}
        )
        return network.eval()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Predict a whole volume and count its hits and misses."""
        how = self.settings.validation
        logits = predict_windows(
            self._predicting,
            batch["image"],
            self.patch,
            overlap=how.overlap,
            batch=how.window_batch,
            device=self.device,
            result_device=self.device,
            autocast=self.autocast_dtype,
        )
        mask = to_mask(logits, self.description)
        truth = batch["label"].to(mask.device)
        self._counted.append((batch["row"], scores.dice_counts(mask, truth, self.description)))
        if len(self.drawn) < how.images:
            self.drawn.append({**batch, "predicted": mask.cpu()})

    def on_validation_epoch_end(self) -> None:
        """Dice of every case, over all ranks; the mean is what checkpoints are chosen by."""
        targets = self.description.targets
        mine = {row: dict(zip(targets, scores.dice_of(counts).tolist(), strict=True)) for row, counts in self._counted}
        parts: list[Any] = [mine]
        if dist.is_available() and dist.is_initialized():
            parts = [None] * dist.get_world_size()
            dist.all_gather_object(parts, mine)
        self.validated = {row: dice for part in parts for row, dice in part.items()}
        by_target = mean_dice(self.validated, targets)
        found = [dice for dice in by_target.values() if not math.isnan(dice)]
        self.dice = sum(found) / len(found) if found else 0.0
        self.log("dice", self.dice, prog_bar=True, rank_zero_only=False)
        self._predicting = self.network
        if self.watches:
            self.watches["validate"].stop()

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """What the network computes in."""
        return {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(str(self.trainer.precision))


def _in_order(value: Any) -> Any:
    return value.contiguous() if isinstance(value, Tensor) else value


def shorten(gradients: list[Tensor], to: float) -> None:
    """clip_grad_norm_ of tensors on one device, in four calls; torch's makes one a tensor."""
    length = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    torch._foreach_mul_(gradients, (to / (length + 1e-6)).clamp(max=1.0))


def mean_dice(cases: dict[int, dict[str, float]], targets: tuple[str, ...]) -> dict[str, float]:
    """Mean over the cases that have the target in truth or prediction; NaN where none has."""
    means = {}
    for target in targets:
        values = [dice[target] for dice in cases.values() if not math.isnan(dice[target])]
        means[target] = sum(values) / len(values) if values else math.nan
    return means


def make_optimizer(how: Optimizer, network: torch.nn.Module, *, fused: bool = False) -> torch.optim.Optimizer:
    """The optimizer of a network's parameters."""
    if how.name == "adamw":
        return torch.optim.AdamW(network.parameters(), lr=how.lr, weight_decay=how.weight_decay, fused=fused)
    return torch.optim.SGD(
        network.parameters(),
        lr=how.lr,
        momentum=how.momentum,
        nesterov=how.nesterov and how.momentum > 0,
        weight_decay=how.weight_decay,
        fused=fused,
    )


def learning_rate_factor(step: int, total_steps: int, how: Optimizer) -> float:
    """What the highest learning rate is multiplied by at a step, counted from 0."""
    if step < how.warmup_steps:
        return (step + 1) / how.warmup_steps
    left = 1 - min(1.0, (step - how.warmup_steps) / max(1, total_steps - how.warmup_steps))
    if how.schedule == "poly":
        return float(left**how.power)
    if how.schedule == "cosine":
        return (1 - math.cos(math.pi * left)) / 2
    return 1.0
