"""Exported models for programs without voxlane: ONNX files, and programs of torch.export.

DST/NAME.onnx or .pt2   one network: a window (batch, channels, z, y, x) in, its logits out
DST/inference.json      everything around the networks, in words and figures. It is written last
DST/README.md           model card

The sliding window stays outside. Each network is compared with voxlane's own, on a window of noise, before it is
published.
"""

from __future__ import annotations

import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from voxlane import settings
from voxlane.errors import MissingExtraError, RunError
from voxlane.store import StoreConfig
from voxlane.temporary import temporary_folder
from voxlane.train.ensemble import group_by_configuration
from voxlane.train.export import CollectedModel
from voxlane.train.exported_model import CARD, build_with_weights
from voxlane.train.model_card import format_card
from voxlane.train.model_facts import Member
from voxlane.train.model_files import ModelWriter
from voxlane.volume.grid import MLPERF_RECIPE

GraphFormat = Literal["onnx", "torch-export"]
MAX_DIFFERENCE = 1e-3
"""Largest accepted difference of logits from voxlane's own."""
INFERENCE_JSON = "inference.json"
_SUFFIXES: dict[GraphFormat, str] = {"onnx": ".onnx", "torch-export": ".pt2"}
_INPUT, _OUTPUT = "image", "logits"
_USAGE: dict[GraphFormat, str] = {
    "onnx": 'onnxruntime.InferenceSession("NAME.onnx").run(["logits"], {"image": windows})',
    "torch-export": 'torch.export.load("NAME.pt2").module()(windows)',
}
_FILES = (
    "Each network is one file: windows in, logits out. `inference.json` has the SHA-256 of each, and the steps before "
    "and after the networks."
)


def export_graphs(
    model: CollectedModel,
    target: str,
    format: GraphFormat,  # noqa: A002
    config: StoreConfig | None = None,
    *,
    opset: int | None = None,
) -> list[str]:
    """Write each network of a model as a graph to the folder or .zip file `target`; return the names of the files.

    opset: version of ONNX's operators; None: torch's default. Raises RunError if a network differs from voxlane's own
    by more than MAX_DIFFERENCE, or if the runtime on this machine cannot run it.
    """
    if format == "onnx":
        import_onnxruntime()
    facts = model.facts
    networks = []
    with ModelWriter(target, config, description=INFERENCE_JSON) as writer, temporary_folder("graphs") as folder:
        for member in facts.members:
            network = build_with_weights(member, facts.description, model.load_weights(member), fused=False)
            name = member.name + _SUFFIXES[format]
            path = os.path.join(folder, name)
            program = trace(network, len(facts.description.channels), member.patch)
            if format == "onnx":
                save_onnx(program, path, opset)
                run = load_onnx(path)
            else:
                torch.export.save(program, path)
                run = torch.export.load(path).module()
            difference = compare(run, network, len(facts.description.channels), member.patch)
            entry = writer.copy_file(name, path)
            networks.append({"member": member.name, "file": name, **settings.to_plain(entry), "difference": difference})
            os.remove(path)
        writer.write(CARD, [format_card(facts, _USAGE[format], _FILES).encode()])
        writer.finish(json.dumps(_describe(model, networks, format, opset), indent=1).encode())
    return [str(network["file"]) for network in networks]


def trace(network: nn.Module, channels: int, patch: tuple[int, ...]) -> torch.export.ExportedProgram:
    """Return the program of a network for windows of one size in batches of any size.

    torch notes at each operation which lines of source called it, with their paths on this machine; they are removed.
    """
    example = torch.zeros(2, channels, *patch)
    with _quiet(), torch.no_grad():
        program = torch.export.export(network, (example,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)
    return program


def compare(run: Callable[[Tensor], Tensor], network: nn.Module, channels: int, patch: tuple[int, ...]) -> float:
    """Return the largest difference of logits on a window of noise; raise RunError if it is too large."""
    window = torch.randn(1, channels, *patch, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        difference = float((run(window) - network(window)).abs().max())
    if not difference <= MAX_DIFFERENCE:  # NaN is not either
        raise RunError(
            f"the exported network differs from voxlane's by {difference:.3g}, more than {MAX_DIFFERENCE:g}",
            fix="Report this, with the versions of torch and onnxruntime",
        )
    return difference


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress what torch's exporters say about themselves."""
    logger = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it lists the packages that it can do without
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


# -- ONNX --------------------------------------------------------------------------------------------------------------


def import_onnxruntime() -> Any:
    """Return the module onnxruntime, or raise MissingExtraError if one of the packages of the extra is missing."""
    try:
        import onnx  # noqa: F401
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError:
        raise MissingExtraError.of("onnx", "--format onnx") from None
    return onnxruntime


def save_onnx(program: torch.export.ExportedProgram, path: str, opset: int | None = None) -> None:
    """Write a program as one ONNX file."""
    with _quiet():
        converted = torch.onnx.export(
            program, input_names=[_INPUT], output_names=[_OUTPUT], opset_version=opset, verbose=False
        )
        assert converted is not None
        written = converted.model.opset_imports[""]
        if opset is not None and written != opset:
            raise RunError(
                f"--opset {opset}: torch {torch.__version__} writes version {written} of the operators instead",
                fix=f"Give --opset {written}, or leave it out",
            )
        converted.save(path, external_data=False)


def load_onnx(path: str) -> Callable[[Tensor], Tensor]:
    """Return a function that runs an ONNX file with onnxruntime; raise RunError if the runtime cannot run it."""
    runtime = import_onnxruntime()
    from onnxruntime.capi import onnxruntime_pybind11_state as states

    problems = (states.NotImplemented, states.Fail, states.InvalidGraph, states.InvalidArgument)
    try:
        session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    except problems as error:
        reason = str(error).splitlines()[0].rpartition(" : ")[2]
        raise RunError(
            f"onnxruntime {runtime.__version__} cannot run the exported network ({reason})",
            fix="Give a lower --opset, or install a newer onnxruntime",
        ) from None
    return lambda window: torch.from_numpy(session.run(None, {_INPUT: window.numpy()})[0])


# -- description -------------------------------------------------------------------------------------------------------


def _describe(
    model: CollectedModel, networks: list[dict[str, Any]], format_name: str, opset: int | None
) -> dict[str, Any]:
    """Return the content of inference.json."""
    facts = model.facts
    configurations = []
    files = {network["member"]: network for network in networks}
    for folds in group_by_configuration(facts.members):
        first = folds[0]
        configurations.append(
            {
                "networks": [files[member.name] for member in folds],
                "window": list(first.patch),
                "overlap": 0.5,
                "plan": settings.to_plain(first.plan),
                "mirror_axes": list(first.mirror_axes),
                "steps": describe_steps(first, has_regions=bool(facts.description.regions)),
            }
        )
    return {
        "format": format_name,
        **({"opset": opset} if opset is not None else {}),
        "name": facts.name,
        "input": {"name": _INPUT, "type": "float32", "axes": ["batch", "channel", "z", "y", "x"]},
        "output": {"name": _OUTPUT, "type": "float32", "axes": ["batch", "output", "z", "y", "x"]},
        "description": settings.to_plain(facts.description),
        "mask_values": list(facts.description.mask_values),
        "configurations": configurations,
        "combine": "If there are several configurations, average their probabilities on the grid of the scan.",
        "postprocessing": settings.to_plain(facts.postprocessing),
        "intended_use": facts.intended_use,
        "licence": facts.licence,
    }


def describe_steps(member: Member, *, has_regions: bool) -> list[str]:
    """Return what happens to a scan before and after the networks of a configuration, in words."""
    plan = member.plan
    spacing = " x ".join(f"{mm:g}" for mm in plan.spacing)
    if plan.recipe == MLPERF_RECIPE:
        prepare = [
            f"Resample trilinearly, with aligned corners, to {spacing} mm (z, y, x).",
            "Normalise each channel as plan.normalisation says.",
        ]
    else:
        prepare = [
            "Crop to the box of voxels that are nonzero in any channel.",
            "Normalise each channel as plan.normalisation says.",
            f"Resample by cubic splines with repeated edges to {spacing} mm (z, y, x). If the scan or this grid is "
            "more than 3 times coarser along one axis than along another, take the nearest slices along that axis.",
        ]
    decide = (
        "Each output is a region: set mask_values in order where its logit is above 0."
        if has_regions
        else "Take the largest logit: output 0 is background, the others have mask_values in order."
    )
    return [
        "Index the scan (channel, z, y, x) so that z, y and x run to the superior, anterior and right.",
        *prepare,
        "Cut windows that overlap by half, evenly spaced, the last one flush with the end; pad smaller scans with 0 on "
        "both sides.",
        "Average the logits of all networks, and those of overlapping windows with a Gaussian weight whose standard "
        "deviation is an eighth of the window.",
        "Resample the logits linearly to the cropped scan, and undo the crop with background.",
        decide,
    ]
