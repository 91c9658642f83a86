"""Forward and backward of a training step, recorded once as CUDA graphs and then replayed.

A step launches a thousand kernels. With small patches the GPU waits for Python between them; a replay is one launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

WARM_UP = 3
"""Number of runs before recording, in which libraries choose and compile their kernels."""


class RecordedStep:
    """A function from tensors to a scalar loss, and its gradients, replayed from CUDA graphs.

    A call with tensors of the sample's shapes copies them to the graphs' inputs and returns the loss; other shapes are
    passed to the function itself. `backward()` on the loss adds the gradients to the parameters' `.grad`, so loss
    scaling and gradient accumulation work; parameter hooks, such as DDP's, are not called. `backward()` may be called
    once, and only before the next call, which overwrites what it needs. Gradients that still exist at the next call are
    copied first; setting them to None, as for a new step, avoids that.

    The graphs contain the addresses of the parameters: their values may change, but they must not be replaced. The
    graphs also keep their own memory, about as much as the function needs, as long as this object exists.
    """

    def __init__(
        self,
        function: Callable[..., Tensor],
        parameters: Sequence[nn.Parameter],
        sample: tuple[Tensor, ...],
        *,
        buffers: Sequence[Tensor] = (),
    ) -> None:
        """Record the function without visible side effects.

        function: takes tensors on the GPU that need no gradient. It must not synchronise or draw random numbers, and
            enters its own autocast, with cache_enabled=False.
        parameters: the parameters to differentiate by. No result of an earlier call without `backward()` may exist,
            because autograd would draw that call's stream into the recording.
        sample: arguments whose shapes, types and memory formats the graphs support.
        buffers: tensors that the function writes to, such as batch norm's; they are restored.
        """
        self._function = function
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.turn = 0  # changes with every replay
        # The loss depends on this token for autograd; a node for each of a hundred parameters would take half a
        # millisecond.
        self._token = torch.zeros((), device=sample[0].device, requires_grad=True)
        with torch.no_grad():
            self._inputs = [torch.empty_like(tensor).copy_(tensor) for tensor in sample]
        self._record(buffers)

    def _record(self, buffers: Sequence[Tensor]) -> None:
        device = self._inputs[0].device
        with (
            torch.cuda.device(device),
            torch.enable_grad(),
            torch.autocast("cuda", enabled=False, cache_enabled=False),
            preserve_state(buffers, device),
        ):
            self._warm_up()
            self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
            pool = torch.cuda.graph_pool_handle()
            with recording(self._forward, pool):
                loss = self._function(*self._inputs)
            self._seed = torch.ones_like(loss)
            with recording(self._backward, pool):
                self._results = self._gradients(loss, self._seed)
            # Detached, because its history would keep autograd's nodes, and with them the recording's stream, alive.
            self._loss = loss.detach()

    def _warm_up(self) -> None:
        side_stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side_stream):
            for _ in range(WARM_UP):
                loss = self._function(*self._inputs)
                self._gradients(loss, torch.ones_like(loss))
                del loss
        torch.cuda.current_stream().wait_stream(side_stream)

    def _gradients(self, loss: Tensor, seed: Tensor) -> list[Tensor | None]:
        """Return the gradients, each in its own memory and with the parameter's strides, as autograd does."""
        gradients = torch.autograd.grad(loss, self._parameters, seed, allow_unused=True)
        results: list[Tensor | None] = []
        used_addresses = {seed.data_ptr()}
        for gradient, parameter in zip(gradients, self._parameters, strict=True):
            result = gradient
            if result is not None:
                if result.stride() != parameter.stride() or result.data_ptr() in used_addresses:
                    result = torch.empty_like(parameter, requires_grad=False).copy_(result)
                used_addresses.add(result.data_ptr())
            results.append(result)
        return results

    def fits(self, *inputs: Tensor) -> bool:
        """Return whether the graphs support these arguments."""
        return len(inputs) == len(self._inputs) and all(
            argument.shape == own.shape and argument.dtype == own.dtype and argument.device == own.device
            for argument, own in zip(inputs, self._inputs, strict=True)
        )

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Return the loss."""
        if not self.fits(*inputs):
            return self._function(*inputs)
        loss: Tensor = _Replay.apply(self, inputs, self._token)  # type: ignore[no-untyped-call]
        return loss

    def forward(self, inputs: Sequence[Tensor]) -> Tensor:
        """Replay the function."""
        # Gradients are in the graphs' memory, which this replay may reuse. Copy those that are still needed, as between
        # parts of a batch.
        for parameter, result in zip(self._parameters, self._results, strict=True):
            gradient = parameter.grad
            if gradient is not None and result is not None and gradient.data_ptr() == result.data_ptr():
                parameter.grad = gradient.clone()
        for own, new_input in zip(self._inputs, inputs, strict=True):
            own.copy_(new_input, non_blocking=True)
        self._forward.replay()
        self.turn += 1
        return self._loss.clone()

    @torch.no_grad()
    def backward(self, turn: int, seed: Tensor) -> None:
        """Replay the gradients and add them to the parameters'."""
        if turn != self.turn:
            raise RuntimeError(
                "backward() of a recorded step was called twice, or after the next step had overwritten its values"
            )
        self.turn += 1
        self._seed.copy_(seed, non_blocking=True)
        self._backward.replay()
        sums: list[Tensor] = []
        added: list[Tensor] = []
        for parameter, result in zip(self._parameters, self._results, strict=True):
            if parameter.grad is None:
                parameter.grad = result
            elif result is not None:
                sums.append(parameter.grad)
                added.append(result)
        if sums:
            torch._foreach_add_(sums, added)


class _Replay(torch.autograd.Function):
    """Autograd function whose forward and backward are the two replays."""

    @staticmethod
    def forward(ctx: Any, recorded: RecordedStep, inputs: tuple[Tensor, ...], token: Tensor) -> Tensor:
        loss = recorded.forward(inputs)
        ctx.recorded, ctx.turn = recorded, recorded.turn
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, seed: Tensor) -> tuple[None, None, None]:
        ctx.recorded.backward(ctx.turn, seed)
        return None, None, None


@contextmanager
def recording(graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    """Record launches into the graph instead of running them."""
    try:
        # Data-loading threads may call CUDA meanwhile, to pin memory; their calls are not recorded.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            yield
    except RuntimeError as error:
        # Ending a failed recording raises another error, which would hide this one.
        if isinstance(error.__context__, torch.OutOfMemoryError):
            raise error.__context__ from None
        raise


@contextmanager
def preserve_state(buffers: Sequence[Tensor], device: torch.device) -> Iterator[None]:
    """Restore buffers and random state afterwards."""
    with torch.no_grad():
        before = [buffer.clone() for buffer in buffers]
    try:
        with torch.random.fork_rng(devices=[device], device_type="cuda"):
            yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)
