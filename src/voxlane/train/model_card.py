"""The model card of an exported model: one Markdown page for people who get the model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from voxlane.train.model_facts import Member, ModelFacts
from voxlane.volume.plan import Normalisation

_USAGE = "voxlane predict MODEL SCAN... -o MASKS"
_FILES = (
    "`model.json` describes the networks, plans and labels, and has the SHA-256 of every other file. Weights are "
    "safetensors."
)


def format_card(facts: ModelFacts, usage: str = _USAGE, files: str = _FILES) -> str:
    """Return the model card as Markdown, with a header that model hubs read.

    usage: the command that runs the model. files: what its files hold, in words. Both are by default those of voxlane's
    own format.
    """
    return "\n".join(line for section in _sections(facts, usage, files) for line in (*section, ""))


def _sections(facts: ModelFacts, usage: str, files: str) -> Iterator[list[str]]:
    description = facts.description
    yield ["---", "library_name: voxlane", f"license: {json.dumps(facts.licence or 'unknown')}", "---"]
    yield [
        f"# {facts.name}",
        "",
        f"Segments {', '.join(description.targets)} in {' + '.join(description.channels)} scans with "
        f"{len(facts.members)} network{'s' * (len(facts.members) != 1)}. Exported on {facts.created[:10]}.",
    ]
    yield [f"    {usage}"]
    yield ["## Intended use", "", facts.intended_use or "Not stated by whoever exported the model."]
    yield ["## Licence", "", facts.licence or "Not stated by whoever exported the model: ask before using the weights."]
    yield ["## Input and output", "", *_format_channels(facts)]
    yield ["", *_table(("label", "value in masks"), description.labels.items())]
    yield ["## Networks", "", *_format_members(facts)]
    yield ["## Training data", "", *_format_data(facts)]
    yield ["## Scores", "", *_format_scores(facts)]
    yield ["## Files", "", files]


def _format_channels(facts: ModelFacts) -> list[str]:
    plan = facts.members[0].plan
    rows = [
        (number, name, _describe_normalisation(norm))
        for number, (name, norm) in enumerate(zip(facts.description.channels, plan.normalisation, strict=True))
    ]
    return _table(("channel", "name", "normalisation"), rows)


def _describe_normalisation(norm: Normalisation) -> str:
    if norm.scheme == "ct":
        return f"clipped to {norm.lower:g} to {norm.upper:g}, mean {norm.mean:g}, standard deviation {norm.std:g}"
    schemes = {
        "zscore": "each scan's own mean and standard deviation",
        "rescale": "each scan's own range",
        "none": "none",
    }
    return schemes[norm.scheme]


def _format_members(facts: ModelFacts) -> list[str]:
    sizes = ("spacing in mm (z, y, x)", "window (z, y, x)")
    headers = ("network", "source", "held-out fold", "epochs", "step", "digest of weights", *sizes)

    def row(member: Member) -> tuple[Any, ...]:
        origin = member.provenance
        training = (_or_dash(value) for value in (origin.fold, origin.epoch, origin.step, origin.digest[:12] or None))
        spacing = " x ".join(f"{mm:g}" for mm in member.plan.spacing)
        return member.name, origin.source or "-", *training, spacing, " x ".join(map(str, member.patch))

    return _table(headers, map(row, facts.members))


def _format_data(facts: ModelFacts) -> list[str]:
    origins = (member.provenance for member in facts.members)
    rows = dict.fromkeys((origin.data or "-", origin.data_digest or "-") for origin in origins)
    return _table(("dataset", "digest"), rows)


def _format_scores(facts: ModelFacts) -> list[str]:
    targets = facts.scores.get("targets")
    lines: list[str] = []
    if isinstance(targets, Mapping):
        rows = [
            (name, *(_mean(scores, m) for m in ("dice", "hd95_mm", "surface_dice"))) for name, scores in targets.items()
        ]
        lines += [f"Over all {facts.scores.get('cases', '')} held-out cases:".replace("  ", " "), ""]
        lines += _table(("target", "mean Dice", "mean HD95 in mm", "mean surface Dice"), rows)
    scored = [member for member in facts.members if member.provenance.scores]
    if scored:
        names = facts.description.targets
        rows = [(m.name, *(_or_dash(m.provenance.scores.get(name)) for name in names)) for m in scored]
        lines += [""] * bool(lines) + ["Mean Dice of each network on the cases that it did not train on:", ""]
        lines += _table(("network", *names), rows)
    return lines or ["The model was exported without scores."]


def _mean(scores: Any, measure: str) -> str:
    value = scores.get(measure, {}).get("mean") if isinstance(scores, Mapping) else None
    return _or_dash(value)


def _or_dash(value: Any) -> str:
    return "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)


def _table(headers: tuple[str, ...], rows: Any) -> list[str]:
    lines = [headers, ["---"] * len(headers), *rows]
    return ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines]
