"""Training steps on a simulated accelerator: everything is real but the arithmetic, which is waited for instead.

The network is the run's own, its gradients have their real sizes and are averaged over the ranks by DDP; patches come
through the real loader from the bucket. What an accelerator would compute takes a fixed time: the forward pass a third
of it, the backward pass the rest, shared out over the layers by their multiplications. A layer's gradients are there
when its share has passed, so that averaging them overlaps with the layers that are still to come, as on a real device.

As on a real device, too, the time of a step runs from its launch, whatever the host does meanwhile: a host that is late
for a layer catches up on the next. What it is late for at the end of the step (the last gradients, the optimizer, the
next batch) makes the step longer.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

FORWARD_SHARE = 1 / 3
"""Of a step: the backward pass computes two gradients, of inputs and of weights, for every product of the forward."""
LEARNING_RATE = 1e-3


def multiplications(network: nn.Module, channels: int, patch: Sequence[int]) -> dict[str, float]:
    """Modules that hold parameters themselves, by name in the order of the forward pass, with about the multiplications
    of each for one patch. `network` is on the meta device: nothing is computed."""
    counts: dict[nn.Module, float] = {}

    def count(module: nn.Module, _: Any, output: Tensor) -> None:
        each = 4.0  # of a norm: mean, variance, scale, shift
        if isinstance(module, nn.Conv3d):
            each = module.weight[0].numel()
        elif isinstance(module, nn.ConvTranspose3d):
            each = module.weight[:, 0].numel() / torch.Size(module.stride).numel()
        counts[module] = counts.get(module, 0.0) + each * output.numel()

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


def ready_shares(costs: Sequence[float]) -> list[float]:
    """For each layer in forward order, the share of a step after which its gradients are there; the first layer's come
    last, at 1."""
    total = sum(costs)
    left, shares = total, []
    for cost in costs:
        shares.append(FORWARD_SHARE + (1 - FORWARD_SHARE) * left / total)
        left -= cost
    return shares


class _Layer(torch.autograd.Function):
    """Passes its input on; going backward, its parameters' gradients come at `ready` seconds of the step."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: _Clock, ready: float, gradients: Sequence[Tensor], *_: Tensor) -> Tensor:
        ctx.clock, ctx.ready, ctx.gradients = clock, ready, gradients
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.clock.wait(ctx.ready)
        return (grads[0], None, None, None, *ctx.gradients)


class _Clock:
    """Since the step was launched."""

    def __init__(self) -> None:
        self._began = 0.0

    def launch(self) -> None:
        self._began = time.perf_counter()

    def wait(self, seconds: float) -> None:
        """Until so long after the launch."""
        left = seconds - self.passed_s()
        if left > 0:
            time.sleep(left)

    def passed_s(self) -> float:
        return time.perf_counter() - self._began


class SimulatedNetwork(nn.Module):
    """A network whose step takes `step_s` seconds, and whose gradients are what they are set to."""

    def __init__(self, network: nn.Module, costs: Mapping[str, float], *, step_s: float) -> None:
        """`costs`: see `multiplications`."""
        super().__init__()
        self.network = network
        self._step_s = step_s
        self._clock = _Clock()
        self._layers: list[tuple[float, list[Tensor], list[nn.Parameter]]] = []
        for name, share in zip(costs, ready_shares(list(costs.values())), strict=True):
            parameters = list(network.get_submodule(name).parameters(recurse=False))
            self._layers.append((step_s * share, [torch.zeros_like(p) for p in parameters], parameters))

    def set_gradient(self, gradient: float) -> None:
        """What every element of every gradient is from now on."""
        for _, gradients, _ in self._layers:
            for tensor in gradients:
                tensor.fill_(gradient)

    def late_s(self) -> float:
        """How long ago the device was done with its step."""
        return self._clock.passed_s() - self._step_s

    def forward(self, image: Tensor) -> Tensor:
        """A scalar that depends on every parameter. Returns at once, as launching does; backward waits."""
        self._clock.launch()
        x = image.reshape(-1)[:1].detach().requires_grad_()
        for ready, gradients, parameters in self._layers:
            x = _Layer.apply(x, self._clock, ready, gradients, *parameters)  # type: ignore[no-untyped-call]
        return x.sum()


class SimulatedModule(pl.LightningModule):
    """Trains a `SimulatedNetwork`. Rank r's gradients are r + 1, so that what the mean over ranks must come to is
    known."""

    def __init__(self, network: SimulatedNetwork) -> None:
        super().__init__()
        self.network = network
        self.exposed_s: list[float] = []
        """Of each step, the time from the device's end to the last averaged gradient: what averaging added to it."""

    def on_train_start(self) -> None:
        """The group stands."""
        self.network.set_gradient(float(self.trainer.global_rank + 1))

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """Launch a step."""
        loss: Tensor = self.network(batch["image"])
        return loss

    def on_after_backward(self) -> None:
        """Gradients are averaged."""
        self.exposed_s.append(self.network.late_s())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """One kernel for all parameters. A device would run it; here the host does, and it counts."""
        return torch.optim.SGD(self.network.parameters(), lr=LEARNING_RATE, fused=True)
