"""Batches in one block of memory, from threads and from processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, default_collate

from voxlane.train.packed import Packed
from voxlane.train.segmenter import shorten


def sample(position: int) -> dict[str, Any]:
    rng = torch.Generator().manual_seed(position)
    return {
        "image": torch.randn((2, 3, 5, 7), generator=rng),
        "label": torch.randint(0, 4, (3, 5, 7), generator=rng).to(torch.uint8),
        "seed": 2**62 + position,
        "row": position % 3,
        "position": position,
    }


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_is_what_torch_makes_of_it(workers: int) -> None:
    samples = [sample(i) for i in range(6)]
    loader = DataLoader(samples, batch_size=4, collate_fn=Packed.of, num_workers=workers)  # type: ignore[arg-type]
    for own, first in zip(loader, (0, 4), strict=True):
        wanted = default_collate(samples[first : first + 4])
        found = own.opened()
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert found[name].dtype == value.dtype
            assert torch.equal(found[name], value), name


@pytest.mark.parametrize("to", [0.1, 1e6])
def test_gradients_are_shortened_as_by_torch(to: float) -> None:
    weights = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((3, 4), (5,), ())]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    own = [weight.grad.clone() for weight in weights if weight.grad is not None]
    shorten(own, to)
    torch.nn.utils.clip_grad_norm_(weights, to)
    torch.testing.assert_close(own, [weight.grad for weight in weights])
