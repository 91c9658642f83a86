"""The model whose state is saved: the transformer of Lightning's demos, sized by its number of layers.

Its values follow from their place alone, so any rank can fill, and check, just its own shard, whatever the number of
ranks that saved.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Iterator

import torch
from torch import nn

_VOCABULARY, _WIDTH, _HEADS = 33278, 200, 2
_FACTOR, _PERIOD = 2654435761, 1 << 24
"""Multiplying by a large odd number scatters neighbours; 24 bits are what a float32 holds exactly."""
_FIRST_LAYER = ".layers.0."
_SHIFT = 40503
"""How far apart two parameters begin in the pool of values."""


class DemoTransformer(nn.Module):
    """Parameters of the same names and shapes as `lightning.pytorch.demos.Transformer(nlayers=...)`: 53 MB and 2.6 MB
    a layer (10: 79 MB, 100: 311 MB, 1000: 2.6 GB). It is only saved and loaded, so it has no `forward`."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, _WIDTH)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="enable_nested_tensor is True")
            self.transformer = nn.Transformer(
                d_model=_WIDTH,
                nhead=_HEADS,
                num_encoder_layers=num_layers,
                num_decoder_layers=num_layers,
                dim_feedforward=_WIDTH,
                batch_first=True,
            )
        self.decoder = nn.Linear(_WIDTH, _VOCABULARY)


def sharded_model(num_layers: int, device: torch.device) -> nn.Module:
    """The model with its values, sharded over all ranks of the default process group (FSDP2)."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with torch.device("meta"):  # no rank ever holds more than its share
        model = DemoTransformer(num_layers)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in [*model.transformer.encoder.layers, *model.transformer.decoder.layers]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device=device)
    restore(dict(model.named_parameters()))
    return model


def full_state(num_layers: int, device: torch.device) -> dict[str, torch.Tensor]:
    """The whole model's state dict. It is made from one layer's: building thousands of modules takes
    minutes. On the meta device it has shapes and no values."""
    with torch.device("meta"):
        of_one = DemoTransformer(1).state_dict()
    state: dict[str, torch.Tensor] = {}
    for stack, group in itertools.groupby(of_one, key=_stack):
        names = list(group)
        for index in range(num_layers if stack else 1):
            for name in names:
                state[name.replace(_FIRST_LAYER, f".layers.{index}.")] = torch.empty_like(of_one[name], device=device)
    if device.type != "meta":
        restore(state)
    return state


def _stack(name: str) -> str:
    """Of which stack of layers the parameter is, encoder's or decoder's; empty for those outside."""
    before, found, _ = name.partition(_FIRST_LAYER)
    return before if found else ""


def restore(state: dict[str, torch.Tensor]) -> None:
    """Give all values (of this rank) what they should be."""
    with torch.no_grad():
        for local, values in _expected(state):
            local.copy_(values)


def first_difference(state: dict[str, torch.Tensor]) -> str | None:
    """The first name of `state` whose values (of this rank) are not the model's; None when all are."""
    names = list(state)
    for name, (local, values) in zip(names, _expected(state), strict=True):
        if not torch.equal(local, values):
            return name
    return None


def scramble(state: dict[str, torch.Tensor]) -> None:
    """Overwrite all values, so that a load that does nothing is found out."""
    with torch.no_grad():
        for tensor in state.values():
            _local(tensor)[0].fill_(float("nan"))


def _expected(state: dict[str, torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each tensor's part on this rank, with the values it should have."""
    for index, tensor in enumerate(state.values()):
        local, start = _local(tensor)
        yield local, _values(start + index * _SHIFT, local.numel()).reshape(local.shape).to(local.device)


@functools.cache
def _pool() -> torch.Tensor:
    return (torch.arange(_PERIOD) * _FACTOR).remainder_(_PERIOD).float().div_(_PERIOD)


def _values(start: int, count: int) -> torch.Tensor:
    """`count` values of the pool, which repeats for ever, from place `start` on."""
    start %= _PERIOD
    pieces = []
    while count:
        pieces.append(_pool()[start : start + count])
        count -= len(pieces[-1])
        start = 0
    return pieces[0] if len(pieces) == 1 else torch.cat([*pieces, torch.empty(0)])


def _local(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The tensor's part on this rank, and the place of its first element in the whole."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not isinstance(tensor, DTensor):
        return tensor.detach(), 0
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    row = tensor.numel() // tensor.shape[0]  # FSDP2 shards the first dimension
    return tensor.to_local().detach(), offsets[0] * row
