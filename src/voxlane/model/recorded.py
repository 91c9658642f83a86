"""A training step's forward and backward, recorded once as CUDA graphs and replayed.

A step launches a thousand kernels. With small patches the GPU waits for Python between them; a replay is one launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

WARM_UP = 3
"""Runs before the recording, in which libraries choose their kernels and compile them."""


class Recorded:
    """A function of tensors to one number, and its gradients, replayed from CUDA graphs.

    Called with tensors of the sample's shapes, it copies them to where the graphs read them and returns the number;
    `backward()` on it adds the gradients to the parameters' `.grad`, so that scaling of the loss and adding up over
    several calls work; hooks of the parameters, as DDP's, are not called. Other shapes go to the function itself. A
    call's `backward()` comes once, and before the next call, which writes over what it needs. Gradients that are still
    there at the next call are moved aside first; set to None before it, as for a new step, they cost nothing.

    The graphs hold the addresses of the parameters: values may be loaded into them, but they may not be replaced. They
    hold their own memory too, about what the function needs, as long as this object lives.
    """

    def __init__(
        self,
        function: Callable[..., Tensor],
        parameters: Sequence[nn.Parameter],
        sample: tuple[Tensor, ...],
        *,
        buffers: Sequence[Tensor] = (),
    ) -> None:
        """Record. Nothing that can be seen changes: no gradient, no random state, and none of `buffers`, those that the
        function writes to, as batch norm's.

        function: what is to be replayed. It takes tensors on the GPU that need no gradient, waits for nothing, draws
            nothing, and enters its own autocast, with cache_enabled=False.
        parameters: what it is differentiated by. No result of an earlier call that was not gone through backwards may
            be alive: autograd would draw the stream of that call into the recording.
        sample: its arguments, whose shapes, types and orders in memory the graphs are for.
        """
        self._function = function
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._turn = 0
        # What the number depends on, for autograd: through a node for each of a hundred parameters it takes half a
        # millisecond.
        self._token = torch.zeros((), device=sample[0].device, requires_grad=True)
        with torch.no_grad():
            self._inputs = [torch.empty_like(given).copy_(given) for given in sample]
        self._record(buffers)

    def _record(self, buffers: Sequence[Tensor]) -> None:
        device = self._inputs[0].device
        with (
            torch.cuda.device(device),
            torch.enable_grad(),
            torch.autocast("cuda", enabled=False, cache_enabled=False),
            unchanged(buffers, device),
        ):
            self._warm_up()
            self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
            pool = torch.cuda.graph_pool_handle()
            with recording(self._forward, pool):
                loss = self._function(*self._inputs)
            self._seed = torch.ones_like(loss)
            with recording(self._backward, pool):
                self._results = self._gradients(loss, self._seed)
            # Without its history, which would keep autograd's nodes, and with them the recording's stream, alive.
            self._loss = loss.detach()

    def _warm_up(self) -> None:
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(WARM_UP):
                loss = self._function(*self._inputs)
                self._gradients(loss, torch.ones_like(loss))
                del loss
        torch.cuda.current_stream().wait_stream(aside)

    def _gradients(self, loss: Tensor, seed: Tensor) -> list[Tensor | None]:
        """Each in its own memory and in the parameter's order there, as autograd would leave them."""
        found = torch.autograd.grad(loss, self._parameters, seed, allow_unused=True)
        results: list[Tensor | None] = []
        taken = {seed.data_ptr()}
        for gradient, parameter in zip(found, self._parameters, strict=True):
            result = gradient
            if gradient is not None and (gradient.stride() != parameter.stride() or gradient.data_ptr() in taken):
                result = torch.empty_like(parameter, requires_grad=False).copy_(gradient)
            if result is not None:
                taken.add(result.data_ptr())
            results.append(result)
        return results

    def fits(self, *inputs: Tensor) -> bool:
        """Whether the graphs are for such arguments."""
        return len(inputs) == len(self._inputs) and all(
            given.shape == own.shape and given.dtype == own.dtype and given.device == own.device
            for given, own in zip(inputs, self._inputs, strict=True)
        )

    def __call__(self, *inputs: Tensor) -> Tensor:
        """The function's number."""
        if not self.fits(*inputs):
            return self._function(*inputs)
        loss: Tensor = _Replay.apply(self, inputs, self._token)  # type: ignore[no-untyped-call]
        return loss

    def forward(self, inputs: Sequence[Tensor]) -> Tensor:
        """Replay the function."""
        # Gradients lie in the graphs' memory, of which this replay may use any for something else. Those that are still
        # wanted, as between parts of a batch, make room.
        for parameter, result in zip(self._parameters, self._results, strict=True):
            held = parameter.grad
            if held is not None and result is not None and held.data_ptr() == result.data_ptr():
                parameter.grad = held.clone()
        for own, given in zip(self._inputs, inputs, strict=True):
            own.copy_(given, non_blocking=True)
        self._forward.replay()
        self._turn += 1
        return self._loss.clone()

    @torch.no_grad()
    def backward(self, turn: int, seed: Tensor) -> None:
        """Replay its gradients, and add them to the parameters'."""
        if turn != self._turn:
            raise RuntimeError(
                "backward() of a recorded step twice, or after the next one was begun: it is written over"
            )
        self._turn += 1
        self._seed.copy_(seed, non_blocking=True)
        self._backward.replay()
        sums: list[Tensor] = []
        more: list[Tensor] = []
        for parameter, result in zip(self._parameters, self._results, strict=True):
            if result is None:
                continue
            if parameter.grad is None:
                parameter.grad = result
            else:
                sums.append(parameter.grad)
                more.append(result)
        if sums:
            torch._foreach_add_(sums, more)

    @property
    def turn(self) -> int:
        """Changes with every replay."""
        return self._turn


class _Replay(torch.autograd.Function):
    """Calls the two replays where autograd's forward and backward are."""

    @staticmethod
    def forward(ctx: Any, recorded: Recorded, inputs: tuple[Tensor, ...], token: Tensor) -> Tensor:
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
    """What is launched inside goes into the graph instead."""
    try:
        # Threads of this process that load data may call CUDA meanwhile, to pin memory: theirs is not recorded.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            yield
    except RuntimeError as error:
        # Ending a recording that failed fails in turn, in words of its own.
        if isinstance(error.__context__, torch.OutOfMemoryError):
            raise error.__context__ from None
        raise


@contextmanager
def unchanged(buffers: Sequence[Tensor], device: torch.device) -> Iterator[None]:
    """Buffers and random state are afterwards as they were."""
    with torch.no_grad():
        before = [buffer.clone() for buffer in buffers]
    try:
        with torch.random.fork_rng(devices=[device], device_type="cuda"):
            yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)
