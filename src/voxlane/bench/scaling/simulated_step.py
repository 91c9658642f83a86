"""Training steps on a simulated accelerator: everything is real except the arithmetic, which is replaced by a wait.

The network is the run's own, its gradients have their real sizes and are averaged over the ranks by DDP; patches come
through the real loader from the bucket. The computation takes a fixed time: the forward pass a third of it, the
backward pass the rest, divided among the layers by their multiplications. A layer's gradients are available when its
share has passed, so that averaging them overlaps with the remaining layers, as on a real device.

Also as on a real device, the time of a step runs from its launch, whatever the host does meanwhile: a host that is late
for a layer catches up on the next. Delays at the end of the step (the last gradients, the optimizer, the next batch)
make the step longer.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

FORWARD_SHARE = 1 / 3
"""Fraction of a step: for every product of the forward pass, the backward pass computes two gradients."""
LEARNING_RATE = 1e-3


def count_multiplications(network: nn.Module, channels: int, patch: Sequence[int]) -> dict[str, float]:
    """Return the approximate multiplications per patch of each module that holds parameters itself, by name, in the
    order of the forward pass. `network` is on the meta device: nothing is computed."""
    counts: dict[nn.Module, float] = {}

    def count(module: nn.Module, _: Any, output: Tensor) -> None:
        per_output = 4.0  # a norm: mean, variance, scale, shift
        if isinstance(module, nn.Conv3d):
            per_output = module.weight[0].numel()
        elif isinstance(module, nn.ConvTranspose3d):
            per_output = module.weight[:, 0].numel() / torch.Size(module.stride).numel()
        counts[module] = counts.get(module, 0.0) + per_output * output.numel()

    names = {module: name for name, module in network.named_modules()}
    holders = [module for module in names if next(module.parameters(recurse=False), None) is not None]
    handles = [module.register_forward_hook(count) for module in holders]
    try:
        with torch.no_grad():
            network(torch.empty(1, channels, *patch, device="meta"))
    finally:
        for handle in handles:
            handle.remove()
    return {names[module]: cost for module, cost in counts.items()}


def compute_ready_shares(costs: Sequence[float]) -> list[float]:
    """Return, for each layer in forward order, the fraction of a step after which its gradients are available; the
    first layer's come last, at 1."""
    total = sum(costs)
    left, shares = total, []
    for cost in costs:
        shares.append(FORWARD_SHARE + (1 - FORWARD_SHARE) * left / total)
        left -= cost
    return shares


class _Layer(torch.autograd.Function):
    """Passes its input on; in the backward pass, the gradients of its parameters come `ready` seconds into the step."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, network: SimulatedNetwork, ready: float, gradients: Sequence[Tensor], *_: Tensor
    ) -> Tensor:
        ctx.network, ctx.ready, ctx.gradients = network, ready, gradients
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        time.sleep(max(0.0, ctx.ready - ctx.network.elapsed_s()))
        return (grads[0], None, None, None, *ctx.gradients)


class SimulatedNetwork(nn.Module):
    """A network whose step takes `step_s` seconds, and whose gradients have a given value."""

    def __init__(self, network: nn.Module, costs: Mapping[str, float], *, step_s: float) -> None:
        """Wrap `network`, whose `costs` come from `count_multiplications`."""
        super().__init__()
        self.network = network
        self._step_s = step_s
        self._launched_at = 0.0
        self._layers: list[tuple[float, list[Tensor], list[nn.Parameter]]] = []
        for name, share in zip(costs, compute_ready_shares(list(costs.values())), strict=True):
            parameters = list(network.get_submodule(name).parameters(recurse=False))
            self._layers.append((step_s * share, [torch.zeros_like(p) for p in parameters], parameters))

    def elapsed_s(self) -> float:
        """Return the seconds since the step was launched."""
        return time.perf_counter() - self._launched_at

    def set_gradient(self, gradient: float) -> None:
        """Set the value of every element of every gradient."""
        for _, gradients, _ in self._layers:
            for tensor in gradients:
                tensor.fill_(gradient)

    def late_s(self) -> float:
        """Return the seconds since the device finished its step."""
        return self.elapsed_s() - self._step_s

    def forward(self, image: Tensor) -> Tensor:
        """Return a scalar that depends on every parameter, at once, as a launch does; backward waits."""
        self._launched_at = time.perf_counter()
        x = image.reshape(-1)[:1].detach().requires_grad_()
        for ready, gradients, parameters in self._layers:
            x = _Layer.apply(x, self, ready, gradients, *parameters)  # type: ignore[no-untyped-call]
        return x.sum()


class SimulatedModule(pl.LightningModule):
    """Trains a `SimulatedNetwork`. The gradients of rank r are r + 1, so that their mean over ranks is known."""

    def __init__(self, network: SimulatedNetwork) -> None:
        super().__init__()
        self.network = network
        self.exposed_s: list[float] = []
        """Seconds that averaging added to each step: from the end of the device's part to the last averaged
        gradient."""

    def on_train_start(self) -> None:
        """Set the gradients by rank, now that the process group exists."""
        self.network.set_gradient(float(self.trainer.global_rank + 1))

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """Launch a step."""
        loss: Tensor = self.network(batch["image"])
        return loss

    def on_after_backward(self) -> None:
        """Note the delay once the gradients are averaged."""
        self.exposed_s.append(self.network.late_s())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return an optimizer with one kernel for all parameters. Here the host runs it, so it counts."""
        return torch.optim.SGD(self.network.parameters(), lr=LEARNING_RATE, fused=True)
