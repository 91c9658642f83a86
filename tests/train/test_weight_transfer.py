"""The plan of which tensors a network takes over from another."""

from __future__ import annotations

from typing import Any

import pytest

from voxlane.model.networks import build
from voxlane.model.stages import locate_tensor
from voxlane.train.initial_weights import network_shapes
from voxlane.train.weight_transfer import (
    WeightTransfer,
    find_frozen,
    fits,
    format_transfer,
    plan_transfer,
    scale_learning_rate,
)
from voxlane.volume.description import Description
from voxlane.volume.plan import Network

MLPERF = Network(kind="mlperf")


def make_network(*features: int, **fields: Any) -> Network:
    levels = len(features)
    strides = ((1, 1, 1), *((2, 2, 2),) * (levels - 1))
    return Network(**{"features": features, "strides": strides, "kernels": ((3, 3, 3),) * levels} | fields)


def transfer(
    source: Network, target: Network, *, channels: int = 1, classes: int = 2, **options: Any
) -> WeightTransfer:
    def shapes(network: Network, channels: int, classes: int) -> Any:
        labels = {str(value): value for value in range(classes)} | {"background": 0}
        labels.pop("0")
        description = Description(name="t", channels=tuple(map(str, range(channels))), labels=labels)
        return network_shapes(network, description, deep_supervision=True)

    return plan_transfer(shapes(source, 1, 2), source, shapes(target, channels, classes), target, **options)


def test_equal_networks_share_everything() -> None:
    network = make_network(4, 8, 16)
    planned = transfer(network, network)
    assert planned.taken == {name: name for name in build(network, 1, 2).state_dict()}
    assert not planned.replaced
    assert not planned.missing
    assert not planned.unused


def test_other_channels_and_labels_replace_the_first_and_the_last_layer() -> None:
    network = make_network(4, 8, 16, 32)
    planned = transfer(network, network, channels=2, classes=5)
    assert planned.replaced == {
        "down.0.0.weight": ((4, 2, 3, 3, 3), (4, 1, 3, 3, 3)),
        "down.0.0.bias": ((4,), (4,)),
        "heads.0.weight": ((5, 4, 1, 1, 1), (2, 4, 1, 1, 1)),
        "heads.0.bias": ((5,), (2,)),
        "heads.1.weight": ((5, 8, 1, 1, 1), (2, 8, 1, 1, 1)),
        "heads.1.bias": ((5,), (2,)),
    }
    assert not planned.missing
    assert not planned.unused
    with_new_heads = transfer(network, network, new_heads=True)
    assert set(with_new_heads.replaced) == {name for name in planned.replaced if name.startswith("heads")}


def test_networks_of_other_depth_share_their_finest_stages() -> None:
    shallow, deep = make_network(4, 8, 16), make_network(4, 8, 16, 32)
    planned = transfer(shallow, deep)
    assert planned.taken["up.2.weight"] == "up.1.weight"  # both to the finest resolution
    assert planned.taken["merge.1.0.weight"] == "merge.0.0.weight"
    assert {name.rpartition(".")[0] for name in planned.missing} >= {"down.3.0", "up.0", "merge.0.0", "heads.1"}
    back = transfer(deep, shallow)
    assert set(back.unused) == set(planned.missing)
    assert {new: old for old, new in back.taken.items()} == dict(planned.taken)


def test_layers_are_taken_as_a_whole() -> None:
    planned = transfer(make_network(4, 8, 16), make_network(4, 8, 16, norm="batch"))
    assert "down.1.0.weight" in planned.taken
    assert planned.replaced["down.1.1.weight"] == ((8,), (8,)), "without the running statistics it is another layer"
    assert "down.1.1.running_mean" in planned.missing


@pytest.mark.parametrize(
    ("target", "is_usable"),
    [(make_network(4, 8, 32), True), (make_network(4, 9, 32), True), (make_network(5, 9, 17), False)],
)
def test_a_network_without_a_layer_in_common_does_not_fit(target: Network, is_usable: bool) -> None:
    description = Description(name="t", channels=("CT",), labels={"background": 0, "a": 1})
    shapes = network_shapes(target, description, deep_supervision=True)
    assert fits(transfer(make_network(4, 8, 16), target), shapes, target) == is_usable


@pytest.mark.parametrize("network", [make_network(4, 8, 16), MLPERF])
def test_every_tensor_has_a_place(network: Network) -> None:
    names = [name for name, _ in build(network, 1, 2).named_parameters()]
    places = [locate_tensor(name, network) for name in names]
    assert len(set(places)) == len(names)
    levels = 6 if network is MLPERF else 3
    assert {place.stages_after(network) for place in places} == set(range(2 * levels))
    first, last = locate_tensor(names[0], network), locate_tensor(names[-1], network)
    assert (first.stages_after(network), last.part) == (2 * levels - 1, "head")
    with pytest.raises(ValueError, match=r"'other\.weight' belongs to no stage"):
        locate_tensor("other.weight", network)


def test_learning_rates_fall_toward_the_input() -> None:
    network = make_network(4, 8, 16)

    def factor(name: str) -> float:
        return scale_learning_rate(name, network, encoder_factor=0.1, layer_decay=0.5)

    assert [factor(f"{name}.0.weight") for name in ("heads", "merge.1", "up.0")] == [1, 0.5, 0.25]
    assert [factor(f"down.{level}.0.weight") for level in (2, 1, 0)] == [0.1 / 8, 0.1 / 16, 0.1 / 32]


def test_layers_that_start_anew_are_not_frozen() -> None:
    network = make_network(4, 8)
    names = ["down.0.0.weight", "down.1.0.weight", "up.0.weight", "heads.0.weight"]
    assert find_frozen(names, network, ["down.0.0.weight"]) == {"down.1.0.weight"}


def test_lines_name_what_did_not_fit() -> None:
    network = make_network(4, 8, 16, 32, 64)
    planned = transfer(network, network, classes=3)
    start = {"uri": "gs://b/r", "origin": "best checkpoint", "digest": "ab" * 32, "notes": ["note: n"]}
    lines = format_transfer({**start, **planned.to_plain(), "parameters": 1000, "parameters_taken": 990})
    assert lines[0] == "starts from gs://b/r (best checkpoint, weights abababababab)"
    assert lines[1] == f"taken: {len(planned.taken)} of {len(planned.taken) + 6} tensors, 99.0% of the parameters"
    assert lines[2].startswith("replaced, start anew: heads.0.weight 3x4x1x1x1 (source: 2x4x1x1x1), heads.0.bias 3 (")
    assert lines[3:] == ["note: n"]
