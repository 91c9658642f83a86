"""Plan which tensors of one network another network takes over. Pure: only names and shapes matter here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from voxlane.model.stages import locate_tensor
from voxlane.sizes import format_plural
from voxlane.volume.plan import Network

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of a network's tensors by their names in its state dict."""
_MAX_NAMES = 6
"""Most tensors that a line for the terminal names."""


@dataclass(frozen=True)
class WeightTransfer:
    """The fate of every tensor of two networks."""

    taken: Mapping[str, str]
    """Name of the source's tensor by the name of the tensor that takes its values."""
    replaced: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
    """Shape here and in the source, by name, of tensors that start anew although the source has a counterpart."""
    missing: Shapes
    """Tensors that start anew because the source has none in their place."""
    unused: Shapes
    """Tensors of the source without a counterpart, by their names in the source."""

    def to_plain(self) -> dict[str, Any]:
        """Return the transfer as JSON-compatible data."""
        replaced = [{"name": n, "shape": shape, "source_shape": old} for n, (shape, old) in self.replaced.items()]
        missing, unused = (
            [{"name": n, "shape": s} for n, s in shapes.items()] for shapes in (self.missing, self.unused)
        )
        return {"taken": list(self.taken), "replaced": replaced, "missing": missing, "unused": unused}


def plan_transfer(
    source: Shapes, source_network: Network, target: Shapes, target_network: Network, *, new_heads: bool = False
) -> WeightTransfer:
    """Match tensors by their place in the networks, counted from the finest resolution.

    A layer's tensors are taken together or not at all. `new_heads`: take no layer that computes logits.
    """
    by_place = {locate_tensor(name, source_network): name for name in source}
    places = {name: locate_tensor(name, target_network) for name in target}
    source_layers, target_layers = _group_shapes(source, source_network), _group_shapes(target, target_network)
    taken, replaced, missing, matched = {}, {}, {}, set()
    for name, place in places.items():
        counterpart = by_place.get(place)
        if counterpart is None:
            missing[name] = target[name]
            continue
        matched.add(counterpart)
        is_kept = place.part != "head" or not new_heads
        if is_kept and source_layers[place.layer] == target_layers[place.layer]:
            taken[name] = counterpart
        else:
            replaced[name] = target[name], source[counterpart]
    return WeightTransfer(taken, replaced, missing, {n: shape for n, shape in source.items() if n not in matched})


def _group_shapes(shapes: Shapes, network: Network) -> dict[Any, dict[str, tuple[int, ...]]]:
    layers: dict[Any, dict[str, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        place = locate_tensor(name, network)
        layers.setdefault(place.layer, {})[place.name] = shape
    return layers


def fits(transfer: WeightTransfer, target: Shapes, network: Network) -> bool:
    """Return whether a convolution is taken that depends neither on the channels nor on the labels."""
    inner = [name for name in target if len(target[name]) == 5 and locate_tensor(name, network).part != "head"]
    return any(name in transfer.taken for name in inner[1:])


def find_frozen(names: Iterable[str], network: Network, starting_anew: Iterable[str]) -> set[str]:
    """Return the names of the encoder's tensors, except those that start anew."""
    return {name for name in names if locate_tensor(name, network).part == "encoder"} - set(starting_anew)


def scale_learning_rate(name: str, network: Network, *, encoder_factor: float, layer_decay: float) -> float:
    """Return the factor of the run's learning rate for a tensor that was taken."""
    place = locate_tensor(name, network)
    factor: float = layer_decay ** place.stages_after(network)
    return factor * (encoder_factor if place.part == "encoder" else 1.0)


def format_transfer(start: Mapping[str, Any]) -> list[str]:
    """Return lines about the weights that a run starts from, as run.json describes them under `init`."""
    taken, new = start["taken"], [*start["replaced"], *start["missing"]]
    share = start["parameters_taken"] / start["parameters"]
    lines = [
        f"starts from {start['uri']} ({start['origin']}, weights {start['digest'][:12]})",
        f"taken: {len(taken)} of {format_plural(len(taken) + len(new), 'tensor')}, {share:.1%} of the parameters",
    ]
    replaced = [f"{e['name']} {_size(e['shape'])} (source: {_size(e['source_shape'])})" for e in start["replaced"]]
    for title, entries in (
        ("replaced, start anew", replaced),
        ("not in the source, start anew", [f"{e['name']} {_size(e['shape'])}" for e in start["missing"]]),
        ("of the source, not used", [f"{e['name']} {_size(e['shape'])}" for e in start["unused"]]),
    ):
        if entries:
            lines.append(f"{title}: {_shorten(entries)}")
    return [*lines, *start["notes"]]


def _shorten(entries: Sequence[str]) -> str:
    more = len(entries) - _MAX_NAMES
    return ", ".join(entries[:_MAX_NAMES]) + (f" and {more} more, which run.json lists" if more > 0 else "")


def _size(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) if shape else "scalar"
