"""Background saves of a state on a GPU are exact, although the copy to the CPU overlaps training.

The module uses none of the shared fixtures, so that it runs where only torch and voxlane are installed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from voxlane import errors
from voxlane.checkpoint import AsyncSaver, load_sharded
from voxlane.checkpoint.async_save import Stager

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def _gpu_state() -> dict[str, Any]:
    tensors = {f"w{i}": torch.full((1 << 22,), float(i), device="cuda") for i in range(16)}
    return {**tensors, "strided": torch.zeros(512, 1024, device="cuda").t(), "step": torch.zeros(()), "epoch": 3}


@pytest.mark.parametrize("free_bytes", [None, 0, 200 << 20], ids=["fits", "does not fit", "fits in part"])
def test_changes_on_a_gpu_after_save_returns_are_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_bytes: int | None
) -> None:
    if free_bytes is not None:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free_bytes, 0))
    state = _gpu_state()
    with AsyncSaver() as saver:
        for step in range(3):
            saver.save(state, f"{tmp_path}/step-{step}")
            for tensor in state.values():
                if isinstance(tensor, torch.Tensor):
                    tensor += 1
    for step in range(3):
        loaded = {k: torch.zeros_like(v, device="cpu") for k, v in state.items() if isinstance(v, torch.Tensor)}
        load_sharded(loaded, f"{tmp_path}/step-{step}")
        assert all(bool((loaded[f"w{i}"] == i + step).all()) for i in range(16))
        assert bool((loaded["strided"] == step).all())
        assert loaded["step"] == step


def test_failure_while_a_gpu_state_is_copied_fails_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("no memory to pin")

    with AsyncSaver() as saver:
        monkeypatch.setattr(Stager, "fill_buffer", fail)
        future = saver.save({"w": torch.zeros(10, device="cuda")}, f"{tmp_path}/x")
        with pytest.raises(errors.CheckpointError, match="no memory to pin"):
            future.result(timeout=300)
        saver._running = None
    assert list(tmp_path.rglob(".metadata")) == []
