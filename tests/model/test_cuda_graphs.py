"""Recorded steps give the same losses and gradients as the function itself.

Replays need a GPU. On the CPU the tests run with replays that compute the step again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from voxlane.model.cuda_graphs import RecordedStep

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="replays CUDA graphs")


class RecomputedStep(RecordedStep):
    """A step whose replays compute the function again, into the same memory."""

    def _record(self, buffers: Sequence[Tensor]) -> None:
        def compute() -> tuple[Tensor, list[Tensor | None]]:
            with torch.enable_grad():
                loss = self._function(*self._inputs)
                return loss.detach(), self._gradients(loss, self._seed)

        def forward() -> None:
            self._loss.copy_(compute()[0])
            for buffer in self._results:  # a graph may reuse its outputs as scratch memory until it ends
                if buffer is not None:
                    buffer.fill_(torch.nan)

        def backward() -> None:
            for buffer, gradient in zip(self._results, compute()[1], strict=True):
                assert (buffer is None) == (gradient is None)
                if buffer is not None:
                    buffer.copy_(gradient)  # type: ignore[arg-type]

        self._seed = torch.ones(())
        self._loss, self._results = compute()
        self._forward = SimpleNamespace(replay=forward)  # type: ignore[assignment]
        self._backward = SimpleNamespace(replay=backward)  # type: ignore[assignment]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=needs_gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


def record_step(
    function: Callable[..., Tensor], parameters: Sequence[nn.Parameter], sample: tuple[Tensor, ...]
) -> RecordedStep:
    step_class = RecordedStep if sample[0].is_cuda else RecomputedStep
    return step_class(function, parameters, sample)


def make_network_and_loss(device: torch.device) -> tuple[nn.Module, Callable[..., Tensor]]:
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv3d(1, 4, 3, padding=1), nn.InstanceNorm3d(4, affine=True), nn.ReLU(), nn.Conv3d(4, 2, 1)
    ).to(device)
    network.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]

    def loss(image: Tensor, label: Tensor) -> Tensor:
        return nn.functional.cross_entropy(network(image), label)

    return network, loss


def make_batches(device: torch.device, count: int, size: int = 2) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(size, 1, 6, 6, 6, generator=generator).to(device),
            torch.randint(0, 2, (size, 6, 6, 6), generator=generator).to(device),
        )
        for _ in range(count)
    ]


def train(
    device: torch.device, *, replayed: bool, accumulation: int = 1, scale: float = 1.0
) -> tuple[list[float], Tensor]:
    network, loss = make_network_and_loss(device)
    step = record_step(loss, list(network.parameters()), make_batches(device, 1)[0]) if replayed else loss
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for index, (image, label) in enumerate(make_batches(device, 6)):
        if index % accumulation == 0:
            optimizer.zero_grad()
        value = step(image, label)
        (value * scale).backward()
        losses.append(value.detach())
        if index % accumulation == accumulation - 1:
            nn.utils.clip_grad_norm_(network.parameters(), 0.5)
            optimizer.step()
    return [float(value) for value in losses], torch.cat([p.detach().flatten() for p in network.parameters()])


@pytest.mark.parametrize(("accumulation", "scale"), [(1, 1.0), (2, 1.0), (3, 8.0)])
def test_recorded_steps_match_the_function(device: torch.device, accumulation: int, scale: float) -> None:
    """Gradients may accumulate over several batches, and the loss may be scaled."""
    plain, recorded = (
        train(device, replayed=replayed, accumulation=accumulation, scale=scale) for replayed in (False, True)
    )
    assert recorded[0] == pytest.approx(plain[0], rel=1e-4)
    torch.testing.assert_close(recorded[1], plain[1], rtol=1e-3, atol=1e-5)


def test_recording_has_no_side_effects(device: torch.device) -> None:
    network, loss = make_network_and_loss(device)
    before = [p.detach().clone() for p in network.parameters()]
    random_states = torch.get_rng_state(), torch.cuda.get_rng_state() if device.type == "cuda" else torch.zeros(1)
    record_step(loss, list(network.parameters()), make_batches(device, 1)[0])
    assert all(p.grad is None for p in network.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, network.parameters(), strict=True))
    assert torch.equal(torch.get_rng_state(), random_states[0])
    if device.type == "cuda":
        assert torch.equal(torch.cuda.get_rng_state(), random_states[1])


@needs_gpu
def test_recording_restores_buffers() -> None:
    norm = nn.BatchNorm3d(1, device="cuda")
    before = [buffer.clone() for buffer in norm.buffers()]
    image = torch.randn(2, 1, 4, 4, 4, device="cuda")
    step = RecordedStep(
        lambda x: norm(x).square().mean(), list(norm.parameters()), (image,), buffers=list(norm.buffers())
    )
    assert all(torch.equal(a, b) for a, b in zip(before, norm.buffers(), strict=True))
    step(image).backward()
    assert int(norm.num_batches_tracked) == 1  # type: ignore[arg-type]


def test_other_shapes_call_the_function(device: torch.device) -> None:
    network, loss = make_network_and_loss(device)
    step = record_step(loss, list(network.parameters()), make_batches(device, 1)[0])
    larger = make_batches(device, 1, size=3)[0]
    assert not step.fits(*larger)
    assert float(step(*larger).detach()) == pytest.approx(float(loss(*larger).detach()))
    step(*larger).backward()
    assert all(p.grad is not None for p in network.parameters())


def test_later_steps_do_not_overwrite_a_loss(device: torch.device) -> None:
    network, loss = make_network_and_loss(device)
    first, second = make_batches(device, 2)
    step = record_step(loss, list(network.parameters()), first)
    values = [step(*first).detach(), step(*second).detach()]
    assert [float(v) for v in values] == pytest.approx([float(loss(*b).detach()) for b in (first, second)], rel=1e-4)


def test_backward_after_the_next_step_is_rejected(device: torch.device) -> None:
    network, loss = make_network_and_loss(device)
    first, second = make_batches(device, 2)
    step = record_step(loss, list(network.parameters()), first)
    first_loss = step(*first)
    last_loss = step(*second)
    with pytest.raises(RuntimeError, match="after the next step had overwritten"):
        first_loss.backward()
    last_loss.backward()
    with pytest.raises(RuntimeError, match="twice"):
        last_loss.backward()


def test_parameters_without_a_gradient_or_with_equal_gradients(device: torch.device) -> None:
    a, b, unused = (nn.Parameter(torch.ones(3, device=device)) for _ in range(3))
    fixed = nn.Parameter(torch.ones(3, device=device), requires_grad=False)
    inputs = torch.arange(3.0, device=device)
    step = record_step(lambda x: ((a + b + fixed) * x).sum(), [a, b, unused, fixed], (inputs,))
    step(inputs).backward()
    assert unused.grad is None
    assert fixed.grad is None
    assert a.grad is not None
    assert b.grad is not None
    assert a.grad.data_ptr() != b.grad.data_ptr(), "what is done to one would be done to the other"
    torch.testing.assert_close(a.grad, inputs)
    torch.testing.assert_close(b.grad, inputs)


def test_loaded_values_are_used(device: torch.device) -> None:
    network, loss = make_network_and_loss(device)
    first = make_batches(device, 1)[0]
    step = record_step(loss, list(network.parameters()), first)
    network.load_state_dict({name: value * 0.5 for name, value in network.state_dict().items()})
    assert float(step(*first).detach()) == pytest.approx(float(loss(*first).detach()), rel=1e-4)
