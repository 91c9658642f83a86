"""The model whose state is saved: the transformer of Lightning's demos, sized by its number of layers.

Its values follow from their place alone, so any rank can fill, and check, just its own shard, whatever the number of
ranks that saved.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch
from torch import nn

_VOCABULARY, _WIDTH, _HEADS = 33278, 200, 2
_FACTOR, _MODULUS = 2654435761, 1 << 24
"""Multiplying by a large odd number scatters neighbours; 24 bits are what a float32 holds exactly."""


class DemoTransformer(nn.Module):
    """Parameters of the same names and shapes as `lightning.pytorch.demos.Transformer(nlayers=...)`: 53 MB and 2.4 MB
    a layer (10: 78 MB, 100: 296 MB, 1000: 2.5 GB). It is only saved and loaded, so it has no `forward`."""

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


def build(num_layers: int, device: torch.device, *, sharded: bool) -> nn.Module:
    """The model with its values; `sharded` over all ranks of the default process group (FSDP2)."""
    with torch.device("meta"):  # no rank ever holds more than its share
        model = DemoTransformer(num_layers)
    if sharded:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for layer in [*model.transformer.encoder.layers, *model.transformer.decoder.layers]:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    model.to_empty(device=device)
    with torch.no_grad():
        for local, values in _expected(dict(model.named_parameters())):
            local.copy_(values)
    return model


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
        places = torch.arange(start, start + local.numel(), dtype=torch.int64)
        values = (places * _FACTOR + index * 40503).remainder_(_MODULUS).float().div_(_MODULUS)
        yield local, values.reshape(local.shape).to(local.device)


def _local(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The tensor's part on this rank, and the place of its first element in the whole."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not isinstance(tensor, DTensor):
        return tensor.detach(), 0
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    row = tensor.numel() // tensor.shape[0]  # FSDP2 shards the first dimension
    return tensor.to_local().detach(), offsets[0] * row
