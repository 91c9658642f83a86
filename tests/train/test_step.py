"""The step on a GPU: recorded, its patches made ready beside it. What can be tested without one is."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.model.test_recorded import Computed
from tests.train.test_fit import TINY, fold_with_cases, weights
from tests.volume import made
from voxlane.train import fit as fitting
from voxlane.train import prefetch as prefetching
from voxlane.train import segmenter
from voxlane.train.config import build
from voxlane.train.fit import train
from voxlane.train.prefetch import Prefetch
from voxlane.train.segmenter import Segmenter
from voxlane.train.timing import Waits
from voxlane.volume.cases import Cases
from voxlane.volume.description import Description
from voxlane.volume.plan import Network, Plan
from voxlane.volume.prepared import Prepared

SMALL = Network(features=(4, 8), strides=((1, 1, 1), (2, 2, 2)), kernels=((3, 3, 3),) * 2)
PLAN = Plan(spacing=(1, 1, 1), normalisation=(), patch=(8, 8, 8), batch=2, network=SMALL)
DESCRIPTION = Description(name="t", channels=("CT",), labels={"background": 0, "a": 1})


@pytest.mark.parametrize(
    ("said", "ranks", "recorded"),
    [({}, 1, True), ({"compile": False}, 1, True), ({"compile": True}, 1, False), ({}, 2, False)],
)
def test_where_steps_are_recorded(
    monkeypatch: pytest.MonkeyPatch, said: dict[str, Any], ranks: int, recorded: bool
) -> None:
    modes = []

    def compiled(function: Any, mode: str | None) -> Any:
        modes.append(mode)
        return "compiled"

    monkeypatch.setattr(torch, "compile", compiled)
    module = Segmenter(build(said), PLAN, DESCRIPTION, 10, ranks=ranks)
    module.on_fit_start()
    assert module.prefetch is None, "beside a CPU nothing is made ready ahead"
    assert (module._step == module._loss_of) == (not said.get("compile"))
    monkeypatch.setattr(Segmenter, "device", property(lambda self: torch.device("cuda")))
    monkeypatch.setattr(segmenter, "Prefetch", lambda device: "prefetch")
    module.on_fit_start()
    assert module.prefetch == "prefetch"
    assert (module._step == module._record) == recorded
    assert modes == ([None, "reduce-overhead"] if said.get("compile") else [])
    module.on_fit_end()
    assert module._step == module._loss_of


def test_kernels_can_be_switched_off() -> None:
    for fused in (True, False):
        module = Segmenter(build({"fused": fused}), PLAN, DESCRIPTION, 10)
        assert module.loss.fused == fused
        kinds = {type(layer).__name__ for layer in module.network.modules()}
        assert ("InstanceNormAct" in kinds) == fused


@pytest.mark.parametrize("more", [{}, {"device_batch": 1}])
def test_recorded_steps_train_the_same_network(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, more: dict[str, Any]
) -> None:
    """Also in parts, of which all but the last are gone through backwards within the step."""
    made.prepared(made.save(tmp_path / "scans", made.kits()), str(tmp_path / "data"))
    data = str(tmp_path / "data")
    said = {**TINY, "fold": fold_with_cases(Prepared.load(data)), "epochs": 2, **more}
    train(data, str(tmp_path / "plain"), said, progress=False)
    used = []

    def start(self: Segmenter) -> None:
        real(self)
        self._step = self._record

    class Counted(Computed):
        def forward(self, inputs: Any) -> torch.Tensor:
            used.append(1)
            return super().forward(inputs)

    real = Segmenter.on_fit_start
    monkeypatch.setattr(Segmenter, "on_fit_start", start)
    monkeypatch.setattr(segmenter, "Recorded", Counted)
    train(data, str(tmp_path / "recorded"), said, progress=False)
    assert len(used) == 6 * (2 if more else 1)
    plain, recorded = weights(tmp_path / "plain"), weights(tmp_path / "recorded")
    for name, weight in plain.items():
        torch.testing.assert_close(recorded[name], weight, rtol=1e-5, atol=1e-6)


def test_volumes_read_ahead_are_the_same(tmp_path: Path) -> None:
    made.prepared(made.save(tmp_path / "scans", made.kits()), str(tmp_path / "data"))
    cases, rows = Cases(Prepared.load(str(tmp_path / "data"))), [2, 0, 1]
    plain, ahead = (list(fitting._Whole(cases, rows, ahead=ahead)) for ahead in (0, 2))
    assert [volume["row"] for volume in ahead] == rows
    for ours, theirs in zip(ahead, plain, strict=True):
        assert torch.equal(ours["image"], theirs["image"])
        assert torch.equal(ours["label"], theirs["label"])
    some = iter(fitting._Whole(cases, rows, ahead=2))
    next(some)
    some.close()  # type: ignore[attr-defined]


class Clock:
    """Points in time of a GPU that is not there: a counter of seconds, set by the test."""

    now = 0.0

    def __init__(self, *, blocking: bool = False) -> None:
        self.at = Clock.now
        self.done = False
        self.waited_for = False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.done = self.waited_for = True

    def elapsed_time(self, later: Clock) -> float:
        return 1000 * (later.at - self.at)


class Stream:
    def __init__(self, *_: Any) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass


def test_steps_ahead_and_what_they_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    points: list[Clock] = []

    def event(*, blocking: bool = False) -> Clock:
        points.append(Clock(blocking=blocking))
        return points[-1]

    monkeypatch.setattr(prefetching, "event", event)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: [setattr(p, "done", True) for p in points])
    prefetch = Prefetch(torch.device("cuda"))

    def augment() -> dict[str, Any]:
        Clock.now += 2  # two seconds of work
        return {"image": torch.zeros(1), "row": 3}

    ends = []
    for _ in range(4):
        Clock.now += 1  # the loader is waited for
        assert prefetch(augment, 1.0)["row"] == 3
        Clock.now += 5
        prefetch.stepped()
        ends.append(points[-1])
    assert [end.waited_for for end in ends] == [True, True, False, False], "two steps are launched and not done"
    assert prefetch.waits().augment_s == 0, "nothing is waited for to know it"
    # As this clock goes nothing overlaps: a step waits for the loader, then for the augmentation, but the first one,
    # which has no step before it, only for the latter.
    assert prefetch.waits(wait=True) == Waits(augment_s=8, loader_s=3)
    assert prefetch.waits(wait=True) == Waits(augment_s=8, loader_s=3), "each is counted once"


def test_saving_leaves_the_optimizer_its_own_states(tmp_path: Path) -> None:
    """Fused optimizers need them in the order of their weights, while a checkpoint has them in their own."""
    module = Segmenter(build({}), PLAN, DESCRIPTION, 10)
    optimizer = torch.optim.SGD(module.network.parameters(), lr=0.1, momentum=0.9)
    out = module.network(torch.randn(2, 1, 8, 8, 8))
    sum(each.sum() for each in (out if isinstance(out, list) else [out])).backward()
    optimizer.step()
    checkpoint = {"state_dict": module.state_dict(), "optimizer_states": [optimizer.state_dict()]}
    module.on_save_checkpoint(checkpoint)
    kept = [held["momentum_buffer"] for held in optimizer.state.values()]
    last = [each for each in kept if each.dim() == 5 and each.shape[2] > 1]
    assert last
    assert all(each.is_contiguous(memory_format=torch.channels_last_3d) for each in last)
    saved = [held["momentum_buffer"] for held in checkpoint["optimizer_states"][0]["state"].values()]
    assert all(each.is_contiguous() for each in saved)
    assert all(torch.equal(one, two) for one, two in zip(kept, saved, strict=True))
    assert any(not each.is_contiguous() for each in kept), "nothing was at stake"
