"""Tests of the training step on a GPU (recorded, with prefetched patches), as far as they need no GPU."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.model.test_cuda_graphs import RecomputedStep
from tests.train.test_fit import TINY, fold_with_cases, weights
from tests.volume import sample_data
from voxlane.train import fit as fitting
from voxlane.train import segmenter, timing
from voxlane.train.config import build_config
from voxlane.train.fit import train
from voxlane.train.segmenter import Segmenter
from voxlane.train.timing import GpuPrefetch, GpuWaits
from voxlane.volume.case_volumes import Cases
from voxlane.volume.description import Description
from voxlane.volume.plan import Network, Plan
from voxlane.volume.prepared_dataset import Prepared

SMALL = Network(features=(4, 8), strides=((1, 1, 1), (2, 2, 2)), kernels=((3, 3, 3),) * 2)
PLAN = Plan(spacing=(1, 1, 1), normalisation=(), patch=(8, 8, 8), batch=2, network=SMALL)
DESCRIPTION = Description(name="t", channels=("CT",), labels={"background": 0, "a": 1})


@pytest.mark.parametrize(
    ("config_values", "ranks", "is_recorded"),
    [({}, 1, True), ({"compile": False}, 1, True), ({"compile": True}, 1, False), ({}, 2, False)],
)
def test_steps_are_recorded_on_a_single_gpu_only(
    monkeypatch: pytest.MonkeyPatch, config_values: dict[str, Any], ranks: int, is_recorded: bool
) -> None:
    modes = []

    def compiled(function: Any, mode: str | None) -> Any:
        modes.append(mode)
        return "compiled"

    monkeypatch.setattr(torch, "compile", compiled)
    module = Segmenter(build_config(config_values), PLAN, DESCRIPTION, ranks=ranks)
    module.on_fit_start()
    assert module.prefetch is None, "a CPU prefetches nothing"
    assert (module._step == module._compute_loss) == (not config_values.get("compile"))
    monkeypatch.setattr(Segmenter, "device", property(lambda self: torch.device("cuda")))
    monkeypatch.setattr(segmenter, "GpuPrefetch", lambda device: "prefetch")
    module.on_fit_start()
    assert module.prefetch == "prefetch"
    assert (module._step == module._record_step) == is_recorded
    assert modes == ([None, "reduce-overhead"] if config_values.get("compile") else [])
    module.on_fit_end()
    assert module._step == module._compute_loss


def test_kernels_can_be_switched_off() -> None:
    for fused in (True, False):
        module = Segmenter(build_config({"fused": fused}), PLAN, DESCRIPTION)
        assert module.loss.fused == fused
        kinds = {type(layer).__name__ for layer in module.network.modules()}
        assert ("InstanceNormAct" in kinds) == fused


@pytest.mark.parametrize("more", [{}, {"device_batch": 1}])
def test_recorded_steps_train_the_same_network(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, more: dict[str, Any]
) -> None:
    """Also in parts, all but the last of which run backward inside the step."""
    sample_data.prepare_dataset(
        sample_data.write_folder(tmp_path / "scans", sample_data.make_kits19()), str(tmp_path / "data")
    )
    data = str(tmp_path / "data")
    config_values = {**TINY, "fold": fold_with_cases(Prepared.load(data)), "epochs": 2, **more}
    train(data, str(tmp_path / "plain"), config_values, progress=False)
    forwards = []

    def start_recording(self: Segmenter) -> None:
        original(self)
        self._step = self._record_step

    class Counted(RecomputedStep):
        def forward(self, inputs: Any) -> torch.Tensor:
            forwards.append(1)
            return super().forward(inputs)

    original = Segmenter.on_fit_start
    monkeypatch.setattr(Segmenter, "on_fit_start", start_recording)
    monkeypatch.setattr(segmenter, "RecordedStep", Counted)
    train(data, str(tmp_path / "recorded"), config_values, progress=False)
    assert len(forwards) == 6 * (2 if more else 1)
    plain, recorded = weights(tmp_path / "plain"), weights(tmp_path / "recorded")
    for name, weight in plain.items():
        torch.testing.assert_close(recorded[name], weight, rtol=1e-5, atol=1e-6)


def test_volumes_that_are_read_ahead_are_the_same(tmp_path: Path) -> None:
    sample_data.prepare_dataset(
        sample_data.write_folder(tmp_path / "scans", sample_data.make_kits19()), str(tmp_path / "data")
    )
    cases, rows = Cases(Prepared.load(str(tmp_path / "data"))), [2, 0, 1]
    plain, ahead = (list(fitting._VolumeDataset(cases, rows, read_ahead=n)) for n in (0, 2))
    assert [volume["row"] for volume in ahead] == rows
    for prefetched, expected in zip(ahead, plain, strict=True):
        assert torch.equal(prefetched["image"], expected["image"])
        assert torch.equal(prefetched["label"], expected["label"])
    some = iter(fitting._VolumeDataset(cases, rows, read_ahead=2))
    next(some)
    some.close()  # type: ignore[attr-defined]


class FakeEvent:
    """An event of a simulated GPU: it reads a counter of seconds that the test advances."""

    now = 0.0

    def __init__(self, *, blocking: bool = False) -> None:
        self.at = FakeEvent.now
        self.done = False
        self.waited_for = False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.done = self.waited_for = True

    def elapsed_time(self, later: FakeEvent) -> float:
        return 1000 * (later.at - self.at)


class Stream:
    def __init__(self, *_: Any) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass


def test_prefetch_limits_steps_ahead_and_counts_their_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[FakeEvent] = []

    def record_event(*, blocking: bool = False) -> FakeEvent:
        events.append(FakeEvent(blocking=blocking))
        return events[-1]

    monkeypatch.setattr(timing, "record_event", record_event)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: [setattr(p, "done", True) for p in events])
    prefetch = GpuPrefetch(torch.device("cuda"))

    def augment() -> dict[str, Any]:
        FakeEvent.now += 2  # two seconds of work
        return {"image": torch.zeros(1), "row": 3}

    ends = []
    for _ in range(4):
        FakeEvent.now += 1  # waiting for the loader
        assert prefetch(augment, 1.0)["row"] == 3
        FakeEvent.now += 5
        prefetch.end_step()
        ends.append(events[-1])
    assert [end.waited_for for end in ends] == [True, True, False, False], "two steps are launched but not finished"
    assert prefetch.waits().augment_s == 0, "reading the waits does not wait for the GPU"
    # On this clock nothing overlaps: each step waits for the loader and then for the augmentation, except the first,
    # which has no step before it and waits for the augmentation only.
    assert prefetch.waits(wait=True) == GpuWaits(augment_s=8, loader_s=3)
    assert prefetch.waits(wait=True) == GpuWaits(augment_s=8, loader_s=3), "each is counted once"


def test_saving_does_not_change_the_optimizer(tmp_path: Path) -> None:
    """Fused optimizers need states in the memory format of the weights; a checkpoint stores them contiguously."""
    module = Segmenter(build_config({}), PLAN, DESCRIPTION)
    optimizer = torch.optim.SGD(module.network.parameters(), lr=0.1, momentum=0.9)
    out = module.network(torch.randn(2, 1, 8, 8, 8))
    sum(each.sum() for each in (out if isinstance(out, list) else [out])).backward()
    optimizer.step()
    checkpoint = {"state_dict": module.state_dict(), "optimizer_states": [optimizer.state_dict()]}
    module.on_save_checkpoint(checkpoint)
    in_use = [state["momentum_buffer"] for state in optimizer.state.values()]
    channels_last = [each for each in in_use if each.dim() == 5 and each.shape[2] > 1]
    assert channels_last
    assert all(each.is_contiguous(memory_format=torch.channels_last_3d) for each in channels_last)
    saved = [state["momentum_buffer"] for state in checkpoint["optimizer_states"][0]["state"].values()]
    assert all(each.is_contiguous() for each in saved)
    assert all(torch.equal(a, b) for a, b in zip(in_use, saved, strict=True))
    assert any(not each.is_contiguous() for each in in_use), "the two formats are the same, so the test shows nothing"
