"""`voxlane report`: write one HTML page about a run, beside the run's files."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from markupsafe import Markup, escape

from voxlane.pages import charts
from voxlane.pages.formatting import (
    NO_VALUE,
    as_float,
    as_number,
    format_bytes,
    format_dollars,
    format_duration,
    format_number,
    format_size,
)
from voxlane.pages.render import Tile, explain_wrong_content, render
from voxlane.redaction import redact, redact_words
from voxlane.sizes import format_plural
from voxlane.store import StoreConfig
from voxlane.train import pictures
from voxlane.train.dataset_location import load_dataset
from voxlane.train.findings import Evaluation, Findings, read_findings, score
from voxlane.train.run import Run, TrainedRun, find_runs
from voxlane.train.run_setup import replace_data

Facts = Sequence[tuple[str, str]]
"""Names and values of a list of facts."""
_TIME_PARTS = {
    "bucket": ("#3778bf", "waiting for bytes from the bucket"),
    "decode": ("#7a5fc0", "unpacking chunks into patches"),
    "augment": ("#b0559b", "augmentation"),
    "step": ("#1a7a63", "forward, backward and optimizer"),
    "validate": ("#96660c", "sliding-window validation"),
    "other": ("#66727e", "everything else: start, logging, checkpoints"),
}
"""Colour and meaning of each part of a run's time."""


def report(run_uri: str, config: StoreConfig | None = None, *, data: str | None = None) -> str:
    """Write RUN/report.html and return its URI.

    The page contains everything it shows, loads nothing, and states what the run has not written yet. If RUN holds one
    run per fold, each of them gets a page, and RUN gets one about their cross-validation. `data`: place of the dataset,
    if it was moved. Raises RunError if there is no run at `run_uri`, or if another dataset is at `data`.
    """
    run = Run(run_uri, config)
    if not run.exists:
        for fold_run in find_runs(run_uri, config):
            report(fold_run.uri, config, data=data)
    findings = read_findings(run_uri, config)
    if data is not None:
        first = find_runs(run_uri, config)[0]
        new_uri = load_dataset(first, TrainedRun.load(first), data).uri
        findings = replace(findings, run=move_data(findings.run, new_uri))
    with explain_wrong_content(run.folder_uri):
        page = render_run_page(findings)
    run.write_bytes("report.html", page.encode())
    return run.file_uri("report.html")


def render_run_page(findings: Findings) -> str:
    """Return the page of a run. Pure: the same findings give the same page."""
    run = redact(findings.run)  # a run of an earlier version may hold secrets
    data, description, cases = (run.get(k) or {} for k in ("data", "description", "cases"))
    command = run.get("command") or []
    words = redact_words(list(map(str, command))) if isinstance(command, list) else [str(command)]
    colours = _TargetColours(findings)
    time_parts = _time_parts(findings)
    return render(
        "report.html.j2",
        title=str(data.get("name") or description.get("name") or "run"),
        tiles=_tiles(findings, colours, time_parts),
        footer=findings.uri,
        findings=findings,
        run=run,
        colours=colours,
        train_cases=cases.get("train") or [],
        held_out_cases=cases.get("validation") or [],
        score=score,
        notes=partial(_describe_scoring, findings),
        dot_chart=partial(_dot_chart, colours),
        evaluate_command=partial(_evaluate_command, findings),
        curves=_curves(findings, colours),
        scored_weights=partial(_describe_scored_weights, findings),
        stale_notes=partial(_describe_stale_scores, findings),
        resumes=_describe_resumes(run),
        time_parts=time_parts,
        time_facts=_time_facts(findings),
        setup_facts=_setup_facts(run),
        start_facts=_start_facts(run.get("init") or {}),
        start_tensors=_start_tensors(run.get("init") or {}),
        levels=_network_levels(run),
        command_line=shlex.join(words) if isinstance(command, list) else words[0],
        environment=[(str(k).replace("_", " "), v) for k, v in (run.get("environment") or {}).items()],
    )


class Curve(NamedTuple):
    """One chart over epochs with its legend; the chart is empty if nothing was recorded."""

    title: str
    series: Sequence[charts.Series]
    chart: Markup
    mark_label: str


class TimePart(NamedTuple):
    """One part of the run's time; `share` is between 0 and 1."""

    name: str
    seconds: float
    share: float
    colour: str
    meaning: str


class _TargetColours:
    """Colours of the targets: as painted in the pictures, and as CSS variables that are deeper in light mode."""

    def __init__(self, findings: Findings) -> None:
        names: Iterable[str] = (t for evaluation in findings.evaluations for t in evaluation.targets)
        self.painted = {name: pictures.colour(i + 1) for i, name in enumerate(dict.fromkeys(names))}
        if findings.description is not None:
            self.painted = dict(pictures.legend(findings.description))

    def variable(self, target: str) -> str:
        """Return the CSS variable of a target."""
        names = list(self.painted)
        return f"var(--t{names.index(target)})" if target in names else "var(--accent)"

    @property
    def css(self) -> Markup:
        """Return the declaration of the variables."""
        painted = list(self.painted.values())
        darker = [[int(int(colour[i : i + 2], 16) * 0.8) for i in (1, 3, 5)] for colour in painted]
        deep = "".join(f"--t{i}:#{red:02x}{green:02x}{blue:02x};" for i, (red, green, blue) in enumerate(darker))
        plain = "".join(f"--t{i}:{colour};" for i, colour in enumerate(painted))
        return Markup(f":root{{{deep}}}@media (prefers-color-scheme:dark){{:root{{{plain}}}}}")


def _tiles(findings: Findings, colours: _TargetColours, time_parts: Sequence[TimePart]) -> list[Tile]:
    """Return the figures to see first."""
    tiles: list[Tile] = []
    if findings.evaluations:
        first = findings.evaluations[0]
        cases = f"{format_plural(len(first.cases), 'case')}, {first.name}"
        if any(checkpoint.is_stale for checkpoint in findings.scored_checkpoints(first)):
            cases += ", of earlier weights"
        tiles.append(Tile("Mean Dice", format_number(first.summary.get("mean_dice"), 3), cases))
        for target in first.targets:
            dice = first.statistics(target, "dice").get("mean")
            tiles.append(Tile(target, format_number(dice, 3), "Dice", colours.variable(target)))
    elif best := findings.best:
        tiles.append(Tile("Best mean Dice", format_number(best[1], 3), f"during training, epoch {best[0]}"))
    if findings.history:
        steps = format_number(findings.history[-1].get("step"), 0)
        epochs = sum(not row.get("cut") for row in findings.history)
        planned = f" of {format_number(findings.done.get('planned_steps'), 0)} planned" if findings.cut else ""
        tiles.append(Tile("Epochs", f"{epochs}", f"{steps}{planned} steps"))
    stall = findings.stall
    seconds, patches = as_float(stall.get("seconds")), as_float(stall.get("patches"))
    if math.isfinite(seconds):
        rate = f"{patches / seconds:.3g}" if seconds > 0 and math.isfinite(patches) else "–"
        tiles.append(Tile("Time", format_duration(seconds), f"{rate} patches/s"))
        waited = sum(part.share for part in time_parts if part.name in ("bucket", "decode"))
        tiles.append(Tile("Waiting for data", f"{waited:.1%}", "of the run's time"))
    if "bytes_read" in stall:
        requests = format_number(stall.get("requests"), 0)
        tiles.append(Tile("Bytes read", format_bytes(stall["bytes_read"]), f"{requests} requests"))
    return tiles


# -- accuracy ----------------------------------------------------------------------------------------------------------


def _dot_chart(colours: _TargetColours, evaluation: Evaluation) -> Markup:
    return charts.dot_chart(
        [
            (target, colours.variable(target), [(str(c["case"]), score(c, target, "dice")) for c in evaluation.cases])
            for target in evaluation.targets
        ],
        label=f"Dice of every case by target, {evaluation.name}",
        x_name="Dice; one dot per case, the line is the mean",
    )


def _describe_scoring(findings: Findings, evaluation: Evaluation) -> str:
    """Say by which rule and with which weights the cases were scored, and whether the scores are optimistic."""
    rule = str(evaluation.summary.get("rule") or "")
    checkpoint = ((evaluation.summary.get("config") or {}).get("predict") or {}).get("checkpoint")
    weights = ""
    if checkpoint == "best" and findings.best is not None:
        weights = (
            "The weights are the best of the run, chosen by Dice on held-out cases, which makes the scores slightly "
            "optimistic; predict.checkpoint=last scores the run's last weights."
        )
    return f"{rule} {weights}".strip()


def _describe_scored_weights(findings: Findings, evaluation: Evaluation) -> str:
    """Say which weights were scored, by their steps and digests."""
    checkpoints = findings.scored_checkpoints(evaluation)
    if not checkpoints:
        return (
            "This evaluation does not name the weights that it scored; evaluate again to compare them with the run's."
        )
    parts = [
        f"{c.fold + ': ' if c.fold else ''}{'best' if c.is_best else 'last'} weights, of step "
        f"{format_number(c.step, 0)} (digest {c.digest[:12]})"
        for c in checkpoints
    ]
    return f"Scored: {'; '.join(parts)}."


def _describe_stale_scores(findings: Findings, evaluation: Evaluation) -> list[str]:
    """Say which of the scored weights are not the run's weights any more."""
    notes = []
    for checkpoint in findings.scored_checkpoints(evaluation):
        if checkpoint.is_stale:
            run = f"{checkpoint.fold} has" if checkpoint.fold else "the run has"
            now = "best weights are now of" if checkpoint.is_best else "since trained to"
            run = run.replace(" has", "'s") if checkpoint.is_best else run
            step, newest = format_number(checkpoint.step, 0), format_number(checkpoint.newest_step, 0)
            notes.append(f"These scores are of step {step}; {run} {now} step {newest}.")
    return notes


def _evaluate_command(findings: Findings, evaluation: Evaluation | None = None) -> str:
    """Return the command that makes an evaluation of the run again; None: that of its held-out cases."""
    words = ["voxlane", "evaluate", findings.uri]
    summary = evaluation.summary if evaluation else {}
    if evaluation and summary.get("images"):
        words += ["--images", str(summary["images"])]
        words += ["--labels", str(summary["labels"])] if summary.get("labels") else []
        words += ["--name", evaluation.name]
    if ((summary.get("config") or {}).get("predict") or {}).get("checkpoint") == "best":
        words += ["predict.checkpoint=best"]
    return shlex.join(words)


def _describe_resumes(run: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return time and command of each start after the first."""
    resumes = [resume for resume in run.get("resumes") or () if isinstance(resume, dict)]
    return [(str(r.get("created")), shlex.join(redact_words(list(map(str, r.get("command") or []))))) for r in resumes]


def move_data(run: Mapping[str, Any], new_uri: str) -> dict[str, Any]:
    """Return the content of run.json with a new place of the dataset, also in its command."""
    data = {**(run.get("data") or {}), "uri": new_uri}
    command = run.get("command")
    if isinstance(command, list):
        command = replace_data(command, str((run.get("data") or {}).get("uri")), new_uri)
    return {**run, "data": data, "command": command}


# -- curves and time ---------------------------------------------------------------------------------------------------


def _curves(findings: Findings, colours: _TargetColours) -> list[Curve]:
    history, best = findings.history, findings.best
    if not history:
        return []

    def series(name: str, key: str, colour: str = "var(--accent)") -> charts.Series:
        points = tuple((as_float(row.get("epoch")), as_float(row.get(key))) for row in history)
        return charts.Series(name, colour, points)

    def curve(title: str, lines: Sequence[charts.Series], mark_label: str = "", **options: Any) -> Curve:
        return Curve(title, lines, charts.line_chart(lines, label=f"{title} by epoch", **options), mark_label)

    targets = list(dict.fromkeys(t for row in history for t in (row.get("dice") or {})))
    dice = [
        charts.Series(
            target,
            colours.variable(target),
            tuple((as_float(row.get("epoch")), as_float((row.get("dice") or {}).get(target))) for row in history),
            faint=len(targets) > 1,
        )
        for target in targets
    ]
    if len(targets) != 1:
        dice.append(series("mean", "mean_dice", "var(--ink)"))
    mark_label = f"best mean, {best[1]:.3f} at epoch {best[0]}" if best else ""
    return [
        curve("Training loss", [series("loss", "loss")]),
        curve("Validation Dice during training", dice, mark_label, y_range=(0, 1), mark=best[0] if best else None),
        curve("Learning rate", [series("learning rate", "lr")], from_zero=True),
        curve("Speed", [series("patches per second", "patches_per_s")], from_zero=True),
    ]


def _time_parts(findings: Findings) -> list[TimePart]:
    shares = {k: as_float(v) for k, v in (findings.stall.get("shares") or {}).items()}
    shares = {k: v for k, v in shares.items() if math.isfinite(v) and v > 0}
    total = sum(shares.values())
    order = [*(k for k in _TIME_PARTS if k in shares), *(k for k in shares if k not in _TIME_PARTS)]
    unknown = (_TIME_PARTS["other"][0], "")
    return [TimePart(name, shares[name], shares[name] / total, *_TIME_PARTS.get(name, unknown)) for name in order]


def _time_facts(findings: Findings) -> Facts:
    stall = findings.stall
    memory = [m for row in findings.history if (m := as_number(row.get("memory_bytes"))) is not None]
    patches, bytes_read = as_float(stall.get("patches")), as_float(stall.get("bytes_read"))
    each = f", {format_bytes(bytes_read / patches)} each" if patches > 0 else ""
    return _keep_known(
        ("Read", Markup("{} in {} requests").format(format_bytes(bytes_read), format_number(stall.get("requests"), 0))),
        ("Requests repeated", format_number(stall.get("retries") or None, 0)),
        ("Patches", Markup("{}{}").format(format_number(patches, 0), each)),
        ("Steps", format_number(stall.get("steps"), 0)),
        ("Cost of requests", format_dollars(as_float(stall.get("cost_usd")))),
        ("Peak memory", format_bytes(max(memory, default=None))),
    )


def _keep_known(*facts: tuple[str, str]) -> Facts:
    """Return the facts that have a value."""
    return [(name, value) for name, value in facts if value and value != NO_VALUE]


# -- data and network --------------------------------------------------------------------------------------------------


def _setup_facts(run: Mapping[str, Any]) -> Facts:
    data, plan, description, config = (run.get(k) or {} for k in ("data", "plan", "description", "config"))
    patch, batch = config.get("patch") or plan.get("patch"), config.get("batch") or plan.get("batch")
    labels = (f"{name} = {value}" for name, value in (description.get("labels") or {}).items())
    regions = (f"{name} = {'+'.join(map(str, v))}" for name, v in (description.get("regions") or {}).items())
    spacing = format_size(plan.get("spacing"), 3)
    intensities = [escape(_describe_normalisation(channel)) for channel in plan.get("normalisation") or ()]
    return _keep_known(
        ("Prepared data", _code(data.get("uri"))),
        ("Digest", _code(data.get("fingerprint"))),
        ("Channels", ", ".join(map(str, description.get("channels") or ()))),
        ("Labels", ", ".join(labels)),
        ("Regions", "; ".join(regions)),
        ("Split", _describe_split(run)),
        ("Plan", str(plan.get("recipe", ""))),
        ("Spacing", f"{spacing} mm (z, y, x)" if spacing else ""),
        ("Patch", f"{format_size(patch)} voxels (z, y, x), {batch} per step" if patch else ""),
        ("Intensities", Markup("<br>").join(intensities)),
        ("Network", str(_network(run).get("kind", ""))),
        ("Parameters", format_number(run.get("parameters"), 0)),
    )


def _start_facts(start: Mapping[str, Any]) -> Facts:
    """Return facts about the weights that the run started from."""
    taken, new = (start.get(name) or () for name in ("taken", "replaced")), start.get("missing") or ()
    counts = [len(names) for names in taken]
    share = as_float(start.get("parameters_taken")) / max(1.0, as_float(start.get("parameters")))
    return _keep_known(
        ("Initial weights", _code(start.get("uri"))),
        ("Weights", str(start.get("origin") or "")),
        ("Digest", _code(start.get("digest"))),
        ("Taken", f"{counts[0]} of {sum(counts) + len(new)} tensors, {share:.1%} of the parameters" if start else ""),
        ("Notes", Markup("<br>").join(note.removeprefix("note: ") for note in start.get("notes") or ())),
    )


def _start_tensors(start: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """Return the tensors of the run's first weights by what became of them."""

    def describe(entry: Mapping[str, Any]) -> str:
        source = f" (source: {format_size(entry['source_shape'])})" if "source_shape" in entry else ""
        return f"{entry['name']} {format_size(entry['shape'])}{source}"

    kinds = {
        "taken": [str(name) for name in start.get("taken") or ()],
        "replaced, started anew": [describe(entry) for entry in start.get("replaced") or ()],
        "not in the source, started anew": [describe(entry) for entry in start.get("missing") or ()],
        "of the source, not used": [describe(entry) for entry in start.get("unused") or ()],
    }
    return [(kind, names) for kind, names in kinds.items() if names]


def _describe_split(run: Mapping[str, Any]) -> str:
    """Say how the run's cases were split; an empty string for runs of earlier versions, which do not store it."""
    split = run.get("split") or {}
    if not split or run.get("fold") is None:
        return ""
    method = str(split.get("source") or "").rpartition("/")[2] or str(split.get("method"))
    return f"{method}, fold {run['fold']} of {split.get('folds')}"


def _code(value: Any) -> Markup:
    return Markup("<code>{}</code>").format(value) if value else Markup()


def _network(run: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the network that was trained, which may differ from the plan's."""
    network: Mapping[str, Any] = run.get("network") or (run.get("plan") or {}).get("network") or {}
    return network


def _network_levels(run: Mapping[str, Any]) -> list[tuple[Any, str, str]]:
    network = _network(run)
    if network.get("kind") == "mlperf":
        return []
    levels = zip(*(network.get(name) or () for name in ("features", "strides", "kernels")), strict=False)
    return [(features, format_size(stride), format_size(kernel)) for features, stride, kernel in levels]


def _describe_normalisation(channel: Mapping[str, Any]) -> str:
    scheme = str(channel.get("scheme", ""))
    if scheme != "ct":
        return "each case by its own mean and deviation" if scheme == "zscore" else scheme
    values = (format_number(channel.get(name), 1) for name in ("lower", "upper", "mean", "std"))
    return Markup("CT: clipped to {} … {} HU, minus {}, over {}").format(*values)
