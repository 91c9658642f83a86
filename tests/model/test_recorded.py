"""Recorded steps: the same numbers and gradients as the function itself. Replays need a GPU; what surrounds them is
tested on the CPU too, with replays that compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from voxlane.model.recorded import Recorded

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="replays CUDA graphs")


class Computed(Recorded):
    """What a GPU replays, computed again, into the same memory."""

    def _record(self, buffers: Sequence[Tensor]) -> None:
        def once() -> tuple[Tensor, list[Tensor | None]]:
            with torch.enable_grad():
                loss = self._function(*self._inputs)
                return loss.detach(), self._gradients(loss, self._seed)

        def forward() -> None:
            self._loss.copy_(once()[0])
            for own in self._results:  # a graph may use for anything what its end has not filled yet
                if own is not None:
                    own.fill_(torch.nan)

        def backward() -> None:
            for own, new in zip(self._results, once()[1], strict=True):
                assert (own is None) == (new is None)
                if own is not None:
                    own.copy_(new)  # type: ignore[arg-type]

        self._seed = torch.ones(())
        self._loss, self._results = once()
        self._forward = SimpleNamespace(replay=forward)  # type: ignore[assignment]
        self._backward = SimpleNamespace(replay=backward)  # type: ignore[assignment]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=needs_gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


def record(function: Callable[..., Tensor], parameters: Sequence[nn.Parameter], sample: tuple[Tensor, ...]) -> Recorded:
    kind = Recorded if sample[0].is_cuda else Computed
    return kind(function, parameters, sample)


def make(device: torch.device) -> tuple[nn.Module, Callable[..., Tensor]]:
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv3d(1, 4, 3, padding=1), nn.InstanceNorm3d(4, affine=True), nn.ReLU(), nn.Conv3d(4, 2, 1)
    ).to(device)
    network.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]

    def loss(image: Tensor, label: Tensor) -> Tensor:
        return nn.functional.cross_entropy(network(image), label)

    return network, loss


def batches(device: torch.device, count: int, size: int = 2) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(size, 1, 6, 6, 6, generator=generator).to(device),
            torch.randint(0, 2, (size, 6, 6, 6), generator=generator).to(device),
        )
        for _ in range(count)
    ]


def train(device: torch.device, *, replayed: bool, parts: int = 1, scale: float = 1.0) -> tuple[list[float], Tensor]:
    network, loss = make(device)
    step = record(loss, list(network.parameters()), batches(device, 1)[0]) if replayed else loss
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for at, (image, label) in enumerate(batches(device, 6)):
        if at % parts == 0:
            optimizer.zero_grad()
        value = step(image, label)
        (value * scale).backward()
        losses.append(value.detach())
        if at % parts == parts - 1:
            nn.utils.clip_grad_norm_(network.parameters(), 0.5)
            optimizer.step()
    return [float(value) for value in losses], torch.cat([p.detach().flatten() for p in network.parameters()])


@pytest.mark.parametrize(("parts", "scale"), [(1, 1.0), (2, 1.0), (3, 8.0)])
def test_steps_are_those_of_the_function(device: torch.device, parts: int, scale: float) -> None:
    """Also where gradients of several parts add up, and where the loss is scaled."""
    plain, recorded = (train(device, replayed=replayed, parts=parts, scale=scale) for replayed in (False, True))
    assert recorded[0] == pytest.approx(plain[0], rel=1e-4)
    torch.testing.assert_close(recorded[1], plain[1], rtol=1e-3, atol=1e-5)


def test_recording_changes_nothing(device: torch.device) -> None:
    network, loss = make(device)
    before = [p.detach().clone() for p in network.parameters()]
    random = torch.get_rng_state(), torch.cuda.get_rng_state() if device.type == "cuda" else torch.zeros(1)
    record(loss, list(network.parameters()), batches(device, 1)[0])
    assert all(p.grad is None for p in network.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, network.parameters(), strict=True))
    assert torch.equal(torch.get_rng_state(), random[0])
    if device.type == "cuda":
        assert torch.equal(torch.cuda.get_rng_state(), random[1])


@needs_gpu
def test_recording_leaves_buffers_alone() -> None:
    norm = nn.BatchNorm3d(1, device="cuda")
    before = [buffer.clone() for buffer in norm.buffers()]
    image = torch.randn(2, 1, 4, 4, 4, device="cuda")
    step = Recorded(lambda x: norm(x).square().mean(), list(norm.parameters()), (image,), buffers=list(norm.buffers()))
    assert all(torch.equal(a, b) for a, b in zip(before, norm.buffers(), strict=True))
    step(image).backward()
    assert int(norm.num_batches_tracked) == 1  # type: ignore[arg-type]


def test_other_shapes_go_to_the_function(device: torch.device) -> None:
    network, loss = make(device)
    step = record(loss, list(network.parameters()), batches(device, 1)[0])
    larger = batches(device, 1, size=3)[0]
    assert not step.fits(*larger)
    assert float(step(*larger).detach()) == pytest.approx(float(loss(*larger).detach()))
    step(*larger).backward()
    assert all(p.grad is not None for p in network.parameters())


def test_a_loss_stays_what_it_was(device: torch.device) -> None:
    network, loss = make(device)
    first, second = batches(device, 2)
    step = record(loss, list(network.parameters()), first)
    values = [step(*first).detach(), step(*second).detach()]
    assert [float(v) for v in values] == pytest.approx([float(loss(*b).detach()) for b in (first, second)], rel=1e-4)


def test_backward_after_the_next_step_is_refused(device: torch.device) -> None:
    network, loss = make(device)
    first, second = batches(device, 2)
    step = record(loss, list(network.parameters()), first)
    late = step(*first)
    last = step(*second)
    with pytest.raises(RuntimeError, match="after the next one was begun"):
        late.backward()
    last.backward()
    with pytest.raises(RuntimeError, match="twice"):
        last.backward()


def test_parameters_without_a_gradient_or_with_a_shared_one(device: torch.device) -> None:
    a, b, unused = (nn.Parameter(torch.ones(3, device=device)) for _ in range(3))
    fixed = nn.Parameter(torch.ones(3, device=device), requires_grad=False)
    given = torch.arange(3.0, device=device)
    step = record(lambda x: ((a + b + fixed) * x).sum(), [a, b, unused, fixed], (given,))
    step(given).backward()
    assert unused.grad is None
    assert fixed.grad is None
    assert a.grad is not None
    assert b.grad is not None
    assert a.grad.data_ptr() != b.grad.data_ptr(), "what is done to one would be done to the other"
    torch.testing.assert_close(a.grad, given)
    torch.testing.assert_close(b.grad, given)


def test_loaded_values_are_used(device: torch.device) -> None:
    network, loss = make(device)
    first = batches(device, 1)[0]
    step = record(loss, list(network.parameters()), first)
    network.load_state_dict({name: value * 0.5 for name, value in network.state_dict().items()})
    assert float(step(*first).detach()) == pytest.approx(float(loss(*first).detach()), rel=1e-4)
