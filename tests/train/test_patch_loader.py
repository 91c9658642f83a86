"""Tests of batches packed into one block of memory, within a process and across processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, default_collate

from voxlane.train.patch_loader import PackedBatch
from voxlane.train.segmenter import clip_gradients


def make_sample(position: int) -> dict[str, Any]:
    rng = torch.Generator().manual_seed(position)
    return {
        "image": torch.randn((2, 3, 5, 7), generator=rng),
        "label": torch.randint(0, 4, (3, 5, 7), generator=rng).to(torch.uint8),
        "seed": 2**62 + position,
        "row": position % 3,
        "position": position,
    }


@pytest.mark.parametrize("workers", [0, 1])
def test_packed_batches_equal_the_default_collation(workers: int) -> None:
    samples = [make_sample(i) for i in range(6)]
    loader = DataLoader(samples, batch_size=4, collate_fn=PackedBatch.collate, num_workers=workers)  # type: ignore[arg-type]
    for packed, first in zip(loader, (0, 4), strict=True):
        expected = default_collate(samples[first : first + 4])
        batch = packed.unpack()
        assert batch.keys() == expected.keys()
        for name, value in expected.items():
            assert batch[name].dtype == value.dtype
            assert torch.equal(batch[name], value), name


@pytest.mark.parametrize("max_norm", [0.1, 1e6])
def test_gradients_are_clipped_as_torch_clips_them(max_norm: float) -> None:
    weights = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((3, 4), (5,), ())]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    gradients = [weight.grad.clone() for weight in weights if weight.grad is not None]
    clip_gradients(gradients, max_norm)
    torch.nn.utils.clip_grad_norm_(weights, max_norm)
    torch.testing.assert_close(gradients, [weight.grad for weight in weights])
