"""The Lightning module: a network, its loss, augmentation on the device, and validation on whole volumes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Set
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from voxlane.distributed import gather_objects
from voxlane.model import metrics
from voxlane.model.augment import Augment
from voxlane.model.cuda_graphs import RecordedStep
from voxlane.model.loss import DiceCE
from voxlane.model.networks import build, check_patch
from voxlane.model.sliding_window import predict_windows, to_mask
from voxlane.train.config import OptimizerConfig, TrainConfig, resolve_learning_rate, resolve_network
from voxlane.train.timing import GpuPrefetch, Stopwatch
from voxlane.train.weight_transfer import find_frozen, scale_learning_rate
from voxlane.volume.description import Description
from voxlane.volume.plan import Plan

Batch = dict[str, Any]


class Segmenter(pl.LightningModule):
    """Trains on patches, validates on whole volumes. All randomness comes from each patch's own seed, so that a run
    which resumes from a checkpoint computes what it would have computed without the pause."""

    def __init__(
        self,
        config: TrainConfig,
        plan: Plan,
        description: Description,
        *,
        ranks: int = 1,
        parts: int = 1,
        starting_anew: Set[str] = frozenset(),
    ) -> None:
        """`parts`: number of parts in which a rank computes its share of a batch, one after another. `starting_anew`:
        tensors that a fine-tuned network did not take over; they are never frozen and train at the full rate."""
        super().__init__()
        self.ranks = ranks
        self.parts = parts
        self.settings = config
        self.plan = plan
        self.description = description
        self.patch = config.patch or plan.patch
        check_patch(resolve_network(config, plan), self.patch)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self.network = self._build_network(deep_supervision=config.deep_supervision)
        self._starting_anew = starting_anew
        self._frozen: set[str] = set()
        """Names of the parameters that get no gradient, weight decay or optimizer state."""
        if config.finetune.freeze_encoder and config.finetune.freeze_steps is None:
            self._freeze(self._encoder_names())
        self._optimized: list[int] = []
        """Number in the network of each parameter in the order of the optimizer."""
        self.sharded = config.strategy == "fsdp" and ranks > 1
        if self.sharded and config.finetune.freeze_steps is not None:
            self.strict_loading = False  # parameters that are frozen at first have no optimizer state yet
        # Before DDP lays out its buckets; FSDP does not accept such weights.
        if config.channels_last and not self.sharded:
            self.network.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
        self.loss = DiceCE(
            bool(description.regions),
            plan.batch_dice,
            target_values=description.target_values,
            recipe=config.loss,
            fused=config.fused,
        )
        self.augment = Augment(config.augment, self.patch)
        self._step: Callable[[Tensor, Tensor], Tensor] = self._compute_loss
        self.dice_by_target: dict[str, float | None] | None = None
        """Mean Dice of each target in the last validation, over all ranks; None if no case has the target."""
        self.mean_dice: float | None = None
        """Mean over these targets; None without a new validation, or if there is nothing to score."""
        self.drawn: list[Batch] = []
        """Volumes of this rank's last validation that are to be drawn."""
        self._dice_counts: list[tuple[int, Any]] = []
        self.dice: float | None = None
        """Mean Dice of the last validation for the progress bar; 0 if there is nothing to score."""
        self.watches: dict[str, Stopwatch] = {}
        self.prefetch: GpuPrefetch | None = None
        """On a GPU, copies and augments patches beside the previous step."""
        self.waited_s: Callable[[], float] = lambda: 0.0
        """Function that returns the seconds waited for the loader so far."""
        self._previous_waited_s = 0.0
        self.used_time_share = 0.0
        """Share of the run's time limit that is used, from 0 to 1: the learning rate is annealed by it if the steps
        would not end in time."""
        # The network that validates. Its attribute name is part of the parameter names in stored checkpoints.
        self._predicting = self.network

    def _build_network(self, *, deep_supervision: bool) -> torch.nn.Module:
        network, fused = resolve_network(self.settings, self.plan), self.settings.fused
        channels, outputs = len(self.description.channels), self.description.outputs
        return build(network, channels, outputs, deep_supervision=deep_supervision, fused=fused)

    # -- frozen weights ------------------------------------------------------------------------------------------

    def _encoder_names(self) -> set[str]:
        names = (name for name, _ in self.network.named_parameters())
        return find_frozen(names, resolve_network(self.settings, self.plan), self._starting_anew)

    def _freeze(self, names: set[str]) -> None:
        """Freeze exactly these parameters."""
        self._frozen = names
        for name, weight in self.network.named_parameters():
            weight.requires_grad_(name not in names)
        self.train(self.training)

    def train(self, mode: bool = True) -> Segmenter:
        """Set the mode of all layers. Frozen batch norms keep their statistics, as in evaluation."""
        super().train(mode)
        for module in self.network.modules() if self._frozen else ():
            if isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and not module.weight.requires_grad:
                module.eval()
        return self

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Train the encoder too once its frozen steps are over."""
        steps = self.settings.finetune.freeze_steps
        if steps is not None and self._frozen and self.global_step >= steps:
            self._freeze(set())
            if isinstance(self._step, RecordedStep):  # without the gradients of the encoder
                self._step = self._record_step

    def on_fit_start(self) -> None:
        """Choose how to compute a step on the device."""
        self.watches = {name: Stopwatch(self.device) for name in ("augment", "step")}
        self.watches["validate"] = Stopwatch()
        on_gpu = self.device.type == "cuda"
        self.prefetch = GpuPrefetch(self.device) if on_gpu else None
        is_single = self.ranks == 1
        if self.settings.compile:
            # With several parts, or with ranks whose sums DDP's hooks start, a replay would overwrite live memory.
            recorded = on_gpu and is_single and self.parts == 1
            self._step = torch.compile(self._compute_loss, mode="reduce-overhead" if recorded else None)
        elif on_gpu and is_single:
            # With small patches a GPU waits for its next kernel, so the step is recorded and replayed. Not across
            # ranks: hooks sum gradients during backward, which a replay does not call, and a loss over the whole batch
            # communicates with the other ranks in the middle of the step.
            self._step = self._record_step

    def on_fit_end(self) -> None:
        """Release the memory of a recorded step."""
        self._step = self._compute_loss

    # -- training ------------------------------------------------------------------------------------------------

    def transfer_batch_to_device(self, batch: Batch, device: torch.device, dataloader_idx: int) -> Batch:
        """Move image and label to the device. Seeds stay, and so do volumes, whose windows move one by one."""
        if not self.trainer.training:
            return batch
        if self.prefetch is None:
            return self._move(batch, device)
        waited_s = self.waited_s()
        loader_s, self._previous_waited_s = waited_s - self._previous_waited_s, waited_s
        return self.prefetch(lambda: self._augment_batch(self._move(batch, device)), loader_s)

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Augment training patches on the device."""
        if not self.trainer.training:
            return batch
        if self.prefetch is None:
            self.watches["augment"].start()
            batch = self._augment_batch(batch)
            self.watches["augment"].stop()
        self.watches["step"].start()
        return batch

    def _move(self, batch: Batch, device: torch.device) -> Batch:
        return {**batch, **{name: batch[name].to(device, non_blocking=True) for name in ("image", "label")}}

    def _augment_batch(self, batch: Batch) -> Batch:
        image, label = self.augment(batch["image"], batch["label"], batch["seed"].cpu())
        if image.is_cuda and self.settings.channels_last and not self.sharded:  # outside the recorded step
            image = image.contiguous(memory_format=torch.channels_last_3d)
        return {**batch, "image": image, "label": label}

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the loss of a batch of patches."""
        self.optimizers(use_pl_optimizer=False).zero_grad()  # type: ignore[union-attr]
        if self.parts == 1:
            # A copy, because torch.compile's recorded steps overwrite their results.
            loss = self._step(batch["image"], batch["label"])
            return loss.clone() if self.settings.compile else loss
        # Lightning's own accumulation counts batches, so steps, epochs and schedules would depend on it. Here a batch
        # stays one step: all parts but the last run backward at once, inside DDP's forward and before it expects
        # gradients, so DDP sums over ranks only once, with the last part.
        images, labels = batch["image"].chunk(self.parts), batch["label"].chunk(self.parts)
        summed: Tensor | float = 0.0
        for image, label in zip(images, labels, strict=True):
            loss = self._step(image, label) * (len(image) / len(batch["image"]))
            if image is not images[-1]:
                self.trainer.strategy.backward(loss, None)
                summed = summed + loss.detach()
        return loss + summed

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        """Do nothing: `training_step` resets the gradients. Lightning calls this after the forward pass, when the
        gradients of the first parts exist already, and those of a recorded step have been set aside."""

    def _compute_loss(self, image: Tensor, label: Tensor) -> Tensor:
        loss: Tensor = self.loss(self.network(image), label)
        return loss

    def _record_step(self, image: Tensor, label: Tensor) -> Tensor:
        """Record the step with its first patches, when weights no longer move in memory, and replay it from then on."""
        dtype = self.autocast_dtype

        def compute_loss(image: Tensor, label: Tensor) -> Tensor:
            with torch.autocast("cuda", dtype, enabled=dtype is not None, cache_enabled=False):
                return self._compute_loss(image, label)

        network = self.network
        self._step = RecordedStep(
            compute_loss, list(network.parameters()), (image, label), buffers=list(network.buffers())
        )
        return self._step(image, label)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Stop the step's watch, after the optimizer."""
        self.watches["step"].stop()
        if self.prefetch is not None:
            self.prefetch.end_step()

    def configure_optimizers(self) -> Any:
        """Return the optimizer and its schedule, which advances after every batch."""
        config = self.settings.optimizer
        # One kernel for all parameters; it cannot clip gradients while float16's scaler holds them scaled.
        is_fused = self.device.type == "cuda" and self.settings.precision != "float16" and not config.foreach
        optimizer_class: Any = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[config.name]
        lr = resolve_learning_rate(self.settings, self.plan)
        optimizer = optimizer_class(
            self._group_parameters(lr),
            lr=lr,
            fused=is_fused if config.fused is None else config.fused,
            **config.torch_arguments(),
        )
        numbers = {weight: number for number, weight in enumerate(self.parameters())}
        self._optimized = [numbers[weight] for group in optimizer.param_groups for weight in group["params"]]
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer,
            lambda step: learning_rate_factor(step, self.settings.total_steps, config, self.used_time_share),
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _group_parameters(self, lr: float) -> list[dict[str, Any]]:
        """Return the parameters that are ever trained, by their learning rates, the highest first. Within a group they
        have the network's order, on which checkpoints of sharded weights rely."""
        network, finetune = resolve_network(self.settings, self.plan), self.settings.finetune
        by_factor: dict[float, list[torch.nn.Parameter]] = {}
        factors = {"encoder_factor": finetune.encoder_lr_factor, "layer_decay": finetune.layer_decay}
        for name, weight in self.network.named_parameters():
            factor = 1.0 if name in self._starting_anew else scale_learning_rate(name, network, **factors)
            if weight.requires_grad:
                by_factor.setdefault(factor, []).append(weight)
        return [{"params": weights, "lr": lr * factor} for factor, weights in sorted(by_factor.items(), reverse=True)]

    def set_learning_rate(self) -> None:
        """Set the learning rate of the next step by the schedule."""
        schedule: Any = self.lr_schedulers()
        rates = zip(schedule.optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True)
        for group, base, factor in rates:
            group["lr"] = base * factor(schedule.last_epoch)

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        """Clip gradients. Lightning refuses to with any fused optimizer, though only float16's gradients are scaled."""
        if gradient_clip_val is None:
            return
        if str(self.trainer.precision) == "16-mixed":
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm or "norm")
        else:
            weights = [weight for group in optimizer.param_groups for weight in group["params"]]
            if self.device.type == "cuda" and not self.sharded:
                clip_gradients([weight.grad for weight in weights if weight.grad is not None], gradient_clip_val)
            else:
                torch.nn.utils.clip_grad_norm_(weights, gradient_clip_val)

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store tensors contiguously, whatever their memory format: loading others into sharded weights scrambles
        them."""
        state: dict[str, Tensor] = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name: tensor.contiguous() for name, tensor in state.items()}
        for saved in checkpoint["optimizer_states"]:
            # New dicts: the state dict shares its own with the optimizer, which continues to use them.
            saved["state"] = {
                key: {n: v.contiguous() if isinstance(v, Tensor) else v for n, v in values.items()}
                for key, values in saved.get("state", {}).items()
            }
            if not self.sharded and self._optimized:
                # Sharded weights are numbered as in the network, and so are all, so that either loads the other.
                saved["state"] = {self._optimized[key]: values for key, values in saved["state"].items()}
                for group in saved["param_groups"]:
                    group["params"] = [self._optimized[number] for number in group["params"]]

    def on_train_start(self) -> None:
        """Set the learning rate, because a run may resume with another schedule. Freeze what is frozen for some steps,
        now that DDP knows all parameters. Give loaded optimizer states the memory format of their weights, which fused
        kernels rely on."""
        self.set_learning_rate()
        optimizer: Any = self.optimizers(use_pl_optimizer=False)
        steps = self.settings.finetune.freeze_steps
        if steps is not None and self.global_step <= steps:
            self._freeze(self._encoder_names())
            for name, weight in self.network.named_parameters():
                if name in self._frozen:
                    optimizer.state.pop(weight, None)  # made up when a checkpoint of sharded weights was loaded
        for weight, values in optimizer.state.items():
            for name, value in values.items():
                if isinstance(value, Tensor) and value.shape == weight.shape and value.stride() != weight.stride():
                    values[name] = torch.empty_like(weight).copy_(value)

    # -- sharded weights -----------------------------------------------------------------------------------------

    def configure_model(self) -> None:
        """Shard the network's weights over the ranks if the strategy asks for it. This is done stage by stage, so that
        only one stage is unsharded at a time."""
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
        """Clear the previous validation."""
        self._dice_counts, self.drawn = [], []
        self.watches["validate"].start()
        self._predicting = self._unshard() if self.sharded else self.network

    def _unshard(self) -> torch.nn.Module:
        """Return the network with all its weights on this rank. Each rank predicts other volumes, with other numbers of
        windows; sharded weights need all ranks to compute alike."""
        network = self._build_network(deep_supervision=False).to(self.device)
        if self.settings.channels_last:
            network.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
        network.load_state_dict(
            {k: getattr(v, "full_tensor", lambda v=v: v)() for k, v in self.network.state_dict().items()}
        )
        return network.eval()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Predict a whole volume and count its hits and misses."""
        validation = self.settings.validation
        logits = predict_windows(
            self._predicting,
            batch["image"],
            self.patch,
            overlap=validation.overlap,
            batch=validation.window_batch,
            device=self.device,
            result_device=self.device,
            autocast=self.autocast_dtype,
        )
        mask = to_mask(logits, self.description)
        truth = batch["label"].to(mask.device)
        self._dice_counts.append((batch["row"], metrics.dice_counts(mask, truth, self.description)))
        if len(self.drawn) < validation.images:
            self.drawn.append({**batch, "predicted": mask.cpu()})

    def on_validation_epoch_end(self) -> None:
        """Compute the Dice of every case over all ranks, and log the mean, by which the best checkpoint is chosen."""
        targets = self.description.targets
        mine = {
            row: dict(zip(targets, metrics.dice_from_counts(counts).tolist(), strict=True))
            for row, counts in self._dice_counts
        }
        cases = {row: dice for part in gather_objects(mine) for row, dice in part.items()}
        self.dice_by_target = {target: _mean([dice[target] for dice in cases.values()]) for target in targets}
        self.mean_dice = _mean(self.dice_by_target.values())
        self.dice = self.mean_dice or 0.0
        self.log("dice", self.dice, prog_bar=True, rank_zero_only=False)
        self._predicting = self.network
        self.watches["validate"].stop()

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """Number format of the network's arithmetic under autocast; None: float32."""
        return {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(str(self.trainer.precision))


def clip_gradients(gradients: list[Tensor], max_norm: float) -> None:
    """Do what clip_grad_norm_ does, for tensors on one device, in four calls; torch's makes one call per tensor."""
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))


def _mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are numbers; None if there is none."""
    numbers = [value for value in values if value is not None and not math.isnan(value)]
    return sum(numbers) / len(numbers) if numbers else None


def learning_rate_factor(step: int, total_steps: int, config: OptimizerConfig, used_time_share: float = 0.0) -> float:
    """Return the factor of the peak learning rate at a step, counted from 0. The schedule ends with the last step or
    once all time is used, whichever comes first."""
    is_warming_up = step < config.warmup_steps
    warmup = (step + 1) / config.warmup_steps if is_warming_up else 1.0
    used_steps = 0.0 if is_warming_up else (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
    remaining = 1 - min(1.0, max(used_steps, used_time_share))
    if config.schedule == "poly":
        return warmup * float(remaining**config.power)
    if config.schedule == "cosine":
        return warmup * (1 - math.cos(math.pi * remaining)) / 2
    return warmup
