"""Weights of nnU-Net's networks under the names and in the axis order of `voxlane.model.networks`.

Checkpoints are pickles. They are read without running any code: only tensors, plain values and the few types of numpy
and torch that nnU-Net itself stores are accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from voxlane.checkpoint import Checkpoint
from voxlane.checkpoint.plain import load_file
from voxlane.errors import ImportedModelError, MismatchError, NotFoundError, UnsafeError
from voxlane.model.networks import build, count_convs
from voxlane.store import StoreConfig
from voxlane.volume.plan import Network, Triple

_TWINS = ("decoder.encoder.", ".all_modules.")
"""Parts of names of tensors that a checkpoint has a second time under another name."""
_WRAPPERS = ("module.", "_orig_mod.")
"""Prefixes that torch.compile and data-parallel training add to names."""


def load_checkpoint(folder_uri: str, name: str, config: StoreConfig | None = None) -> dict[str, Any]:
    """Return the content of a checkpoint of nnU-Net v2; raise UnsafeError if reading it would run code."""
    uri = f"{folder_uri}/{name}"
    fix = "Copy the folder again from a source that you trust"
    try:
        with Checkpoint(folder_uri, config).reader(name) as file, torch.serialization.safe_globals(_safe_types()):
            content = load_file(file, uri, "cpu", weights_only=True)
    except NotFoundError:
        raise
    except UnsafeError as error:
        raise UnsafeError(error.message, uri=uri, fix=fix) from None
    if not isinstance(content, dict) or not isinstance(content.get("network_weights"), dict):
        raise ImportedModelError("not a checkpoint of nnU-Net v2: it has no network_weights", uri=uri, fix=fix)
    return content


def _safe_types() -> list[Callable[..., Any] | tuple[Callable[..., Any], str]]:
    """Return what nnU-Net's checkpoints hold besides tensors: numbers and arrays of numpy in the history, under the
    names of numpy 1 and 2."""
    multiarray: Any = np.array(0.0).__reduce__()[0].__module__
    core: Any = __import__(multiarray, fromlist=["scalar"])
    types: list[Any] = [np.ndarray, np.dtype]
    types += sorted({type(np.dtype(code)) for code in "?bBhHiIlLqQefd"}, key=repr)
    for package in ("numpy.core", "numpy._core"):
        types += [(core.scalar, f"{package}.multiarray.scalar")]
        types += [(core._reconstruct, f"{package}.multiarray._reconstruct")]
    return types


def convert_weights(
    weights: Mapping[str, Tensor], network: Network, channels: int, outputs: int, axis_order: Triple, uri: str
) -> dict[str, Tensor]:
    """Return the weights of a PlainConvUNet or ResidualEncoderUNet as the state dict of `network`.

    axis_order: axis of `weights` that belongs to each of z, y, x.
    uri: the checkpoint, for errors.

    The head at the coarsest resolution, which voxlane's networks lack, is left out. Biases that nnU-Net's network lacks
    are zero. Raises MismatchError if the weights are those of another network.
    """
    tensors = {_strip_wrappers(name): value for name, value in weights.items()}
    with torch.device("meta"):
        expected = build(network, channels, outputs).state_dict()
    modules = dict(_module_names(network))
    result: dict[str, Tensor] = {}
    used = {name for name in tensors if any(twin in name for twin in _TWINS)}
    used |= {name for name in tensors if name.startswith("decoder.seg_layers.0.")}
    permutation = (0, 1, *(2 + axis for axis in axis_order))
    for name, target in expected.items():
        module, _, parameter = name.rpartition(".")
        source = f"{modules[module]}.{parameter}"
        used.add(source)
        value = tensors.get(source)
        if value is None and parameter == "bias" and f"{modules[module]}.weight" in tensors:
            value = torch.zeros(target.shape)
        if value is not None and value.ndim == 5:
            value = value.permute(permutation)
        if value is None or value.shape != target.shape:
            problem = "is missing" if value is None else f"has the shape {list(value.shape)}, not {list(target.shape)}"
            raise _mismatch(f"{source} {problem}", uri)
        result[name] = value.to(target.dtype).contiguous()
    if unknown := sorted(set(tensors) - used):
        raise _mismatch(f"{unknown[0]} is not part of the network", uri)
    return result


def _mismatch(problem: str, uri: str) -> MismatchError:
    return MismatchError(
        f"the weights are not those of the network in plans.json: {problem}",
        uri=uri,
        fix="Use the plans.json that this network was trained with",
    )


def _strip_wrappers(name: str) -> str:
    while prefix := next((prefix for prefix in _WRAPPERS if name.startswith(prefix)), ""):
        name = name.removeprefix(prefix)
    return name


def _module_names(network: Network) -> Iterator[tuple[str, str]]:
    """Yield the name of every module with weights, in voxlane's network and in nnU-Net's."""
    convs_down, convs_up = count_convs(network)
    if network.kind == "residual":
        yield from _stage_names("down.0.0", "encoder.stem.convs", 1)
    for level, count in enumerate(convs_down):
        if network.kind == "unet":
            yield from _stage_names(f"down.{level}", f"encoder.stages.{level}.0.convs", count)
            continue
        for block in range(count):
            target = f"down.{level}.{block + (level == 0)}"  # the first level begins with the stem
            source = f"encoder.stages.{level}.blocks.{block}"
            has_pool = block == 0 and network.strides[level] != (1, 1, 1)
            for part, name in (("first", "conv1"), ("second", "conv2"), ("skip", f"skip.{int(has_pool)}")):
                yield f"{target}.{part}.0", f"{source}.{name}.conv"
                yield f"{target}.{part}.1", f"{source}.{name}.norm"
    levels = len(network.features) - 1
    for step, count in enumerate(reversed(convs_up)):
        yield f"up.{step}", f"decoder.transpconvs.{step}"
        yield from _stage_names(f"merge.{step}", f"decoder.stages.{step}.convs", count)
        yield f"heads.{levels - 1 - step}", f"decoder.seg_layers.{step}"


def _stage_names(target: str, source: str, count: int) -> Iterator[tuple[str, str]]:
    """Yield the names in a stage of `count` convolutions, each followed by a norm and an activation."""
    for index in range(count):
        yield f"{target}.{3 * index}", f"{source}.{index}.conv"
        yield f"{target}.{3 * index + 1}", f"{source}.{index}.norm"
