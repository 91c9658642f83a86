"""The model whose state is saved: the transformer of Lightning's demos, sized by its number of layers, or plain tensors
of any number and size.

Each value follows from its position alone, so any rank can fill and check its own shard, however many ranks saved it.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import nn

_VOCABULARY, _WIDTH, _HEADS = 33278, 200, 2
_FACTOR, _PERIOD = 2654435761, 1 << 24
"""Multiplying by a large odd number scatters neighbours; 24 bits are what a float32 holds exactly."""
_FIRST_LAYER = ".layers.0."
_SHIFT = 40503
"""Distance between the first values of two consecutive parameters in the pool."""
_PIECE = _VOCABULARY * _WIDTH
"""Most values that are set or compared at once: those of the transformer's largest tensor."""


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


class PaddingTensors(nn.Module):
    """Tensors of `num_rows` x 1000 values named as those of Dataflux's simulated benchmark."""

    def __init__(self, num_rows: int, num_tensors: int) -> None:
        super().__init__()
        for index in range(num_tensors):
            self.register_parameter(f"dummy_tensor_{index}", nn.Parameter(torch.empty(num_rows, 1000)))


def sharded_model(make_model: Callable[[], nn.Module], device: torch.device) -> nn.Module:
    """Return a model with its values, sharded over all ranks of the default process group (FSDP2)."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with torch.device("meta"):  # no rank ever holds more than its share
        model = make_model()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    if isinstance(model, DemoTransformer):
        for layer in [*model.transformer.encoder.layers, *model.transformer.decoder.layers]:
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device=device)
    restore(dict(model.named_parameters()))
    return model


def padding_state(num_rows: int, num_tensors: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Return the state dict of all `PaddingTensors`."""
    with torch.device(device), torch.no_grad():
        state = PaddingTensors(num_rows, num_tensors).state_dict()
    restore(state)
    return state


def full_state(num_layers: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Return the state dict of the complete model. It is derived from that of one layer, because building thousands of
    modules takes minutes. On the meta device it has shapes and no values."""
    with torch.device("meta"):
        one_layer = DemoTransformer(1).state_dict()
    state: dict[str, torch.Tensor] = {}
    # The layers of the encoder come first, one after the other, and then those of the decoder.
    for stack, group in itertools.groupby(one_layer, lambda name: name.rpartition(_FIRST_LAYER)[0]):
        names = list(group)
        for index in range(num_layers if stack else 1):
            for name in names:
                state[name.replace(_FIRST_LAYER, f".layers.{index}.")] = torch.empty_like(
                    one_layer[name], device=device
                )
    if device.type != "meta":
        restore(state)
    return state


def restore(state: dict[str, torch.Tensor]) -> None:
    """Set all values of this rank to the model's own."""
    with torch.no_grad():
        for _, local, values in _expected(state):
            local.copy_(values)


def first_difference(state: dict[str, torch.Tensor]) -> str | None:
    """Return the first name in `state` whose values on this rank differ from the model's; None if all are equal."""
    return next((name for name, local, values in _expected(state) if not torch.equal(local, values)), None)


def scramble(state: dict[str, torch.Tensor]) -> None:
    """Overwrite all values, so that a load that does nothing is detected."""
    with torch.no_grad():
        for tensor in state.values():
            _local(tensor)[0].fill_(float("nan"))


def _expected(state: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield the name of each tensor, a piece of its part on this rank, and the expected values of that piece."""
    for index, (name, tensor) in enumerate(state.items()):
        local, offset = _local(tensor)
        for piece in torch.split(local.view(-1), _PIECE):
            start = (offset + index * _SHIFT) % _PERIOD
            yield name, piece, _pool()[start : start + piece.numel()].to(piece.device)
            offset += piece.numel()


@functools.cache
def _pool() -> torch.Tensor:
    """Return one period of values, continued by as many as the largest piece has."""
    values = torch.arange(_PERIOD + _PIECE) * _FACTOR
    return values.remainder_(_PERIOD).float().div_(_PERIOD)


def _local(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the tensor's part on this rank and the index of its first element in the full tensor."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not isinstance(tensor, DTensor):
        return tensor.detach(), 0
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    row = tensor.numel() // tensor.shape[0]  # FSDP2 shards the first dimension
    return tensor.to_local().detach(), offsets[0] * row
