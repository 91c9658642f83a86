"""Turn trained runs, and models that were exported before, into one exported model."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import Tensor

from voxlane import __version__
from voxlane import uri as uris
from voxlane.errors import ConfigError
from voxlane.store import StoreConfig
from voxlane.train.config import resolve_network
from voxlane.train.exported_model import is_model, load_model
from voxlane.train.model_facts import Member, ModelFacts, Postprocessing, Provenance
from voxlane.train.predictor import compute_digest, load_checkpoint, select_weights
from voxlane.train.run import Run, TrainedRun, find_runs
from voxlane.volume.description import Description

_SUMMARIES = ("evaluation/cross-validation/summary.json", "evaluation/validation/summary.json")
_SCORES = ("targets", "mean_dice", "cases", "space", "folds", "rule")
"""Parts of a summary of an evaluation that the model keeps; the others hold paths."""
_CONFIG_WITH_PATHS = ("loader", "init_from", "split")
"""Fields of a run's config that the model leaves out."""


CheckpointName = Literal["last", "best"]


@dataclass
class CollectedModel:
    """A model that is ready to be written."""

    facts: ModelFacts
    load_weights: Callable[[Member], Mapping[str, Tensor]]
    notes: list[str] = field(default_factory=list)
    """What the user should know about the sources."""


@dataclass(frozen=True)
class _Part:
    """A network of one of the sources."""

    source: str
    member: Member
    description: Description
    load: Callable[[], Mapping[str, Tensor]]
    digest: str = ""
    """SHA-256 of the weights, which evaluations name; empty for networks of exported models."""


def collect_model(
    sources: Sequence[str],
    store_config: StoreConfig | None = None,
    *,
    checkpoint: CheckpointName = "last",
    name: str = "",
    intended_use: str = "",
    licence: str = "",
) -> CollectedModel:
    """Return all networks of `sources` as one model: runs, folders of the runs of all folds, and exported models.

    Weights, those of `checkpoint` of each run, are read when the model is written. Without a name, the model has that
    of its dataset. `intended_use` and `licence` are for the model card; by default they are those of the models among
    the sources. Raises ConfigError if the sources have other channels or labels, and RunError if one has no checkpoint.
    """
    parts: list[_Part] = []
    models: list[ModelFacts] = []
    scores: list[Mapping[str, Any]] = []
    notes: list[str] = []
    for source in sources:
        if is_model(source, store_config):
            model = load_model(source, store_config)
            models.append(model.facts)
            scores.append(model.facts.scores)
            for member in model.facts.members:
                load = functools.partial(model.load_weights, member)
                parts.append(_Part(source, member, model.facts.description, load))
        else:
            collected = list(_collect_runs(source, checkpoint, store_config, notes))
            scores.append(_read_summary(Run(source, store_config), [part.digest for part in collected], notes))
            parts += collected
    _check_same_labels(parts)
    members: list[Member] = []
    loaders: dict[str, Callable[[], Mapping[str, Tensor]]] = {}
    for part, unique in zip(parts, _unique_names(parts), strict=True):
        members.append(replace(part.member, name=unique))
        loaders[unique] = part.load
    facts = ModelFacts(
        name=name or (models[0].name if models else parts[0].description.name),
        description=parts[0].description,
        members=tuple(members),
        postprocessing=_common(models, "postprocessing", sources) or Postprocessing(),
        scores=scores[0] if len(sources) == 1 else {},
        intended_use=intended_use or _common(models, "intended_use", sources) or "",
        licence=licence or _common(models, "licence", sources) or "",
    )
    return CollectedModel(facts, lambda member: loaders[member.name](), notes)


def check_target(target: str, sources: Sequence[str]) -> None:
    """Raise ConfigError if a model would be written into one of its sources."""
    for source in sources:
        if str(uris.parse(source)).rstrip("/") == str(uris.parse(target)).rstrip("/"):
            raise ConfigError("a model cannot be written into its source", uri=target, fix="Choose another folder")


def _collect_runs(
    source: str, checkpoint: CheckpointName, store_config: StoreConfig | None, notes: list[str]
) -> Iterator[_Part]:
    """Yield the network of each run at `source`."""
    for run in find_runs(source, store_config):
        trained = TrainedRun.load(run)
        loaded = _read_checkpoint(run, checkpoint)
        if loaded.name != checkpoint:
            notes.append(f"{run.folder_uri}: the run has no best checkpoint, so its last one is exported")
        if not run.is_done:
            planned = trained.config.epochs * trained.config.steps_per_epoch
            notes.append(f"{run.folder_uri}: the run is not finished: {loaded.step:,} of {planned:,} steps")
        digest = loaded.digest
        member = Member(
            name=_clean_name(run.folder_uri),
            network=resolve_network(trained.config, trained.plan),
            plan=trained.plan,
            patch=trained.patch,
            provenance=_describe_origin(run, trained, loaded, digest),
        )
        load = functools.partial(_load_weights, run, checkpoint)
        yield _Part(run.folder_uri, member, trained.description, load, digest)


@dataclass(frozen=True)
class _LoadedCheckpoint:
    """What a checkpoint of a run holds."""

    name: str
    """Name of the checkpoint: that asked for, or last if there is no best."""
    weights: dict[str, Tensor]
    step: int
    """Number of steps that the network was trained for."""

    @property
    def digest(self) -> str:
        """SHA-256 (hexadecimal) of the weights."""
        return compute_digest(self.weights)


def _read_checkpoint(run: Run, checkpoint: CheckpointName) -> _LoadedCheckpoint:
    name, saved = load_checkpoint(run, checkpoint)
    return _LoadedCheckpoint(name, select_weights(saved), int(saved["global_step"]))


def _load_weights(run: Run, checkpoint: CheckpointName) -> Mapping[str, Tensor]:
    return _read_checkpoint(run, checkpoint).weights


def _describe_origin(run: Run, trained: TrainedRun, loaded: _LoadedCheckpoint, digest: str) -> Provenance:
    """Return where a network comes from, without any path or URI."""
    facts = trained.facts
    summary = _read_summary(run, [digest], [])
    targets = summary.get("targets", {})
    config = {name: value for name, value in facts["config"].items() if name not in _CONFIG_WITH_PATHS}
    return Provenance(
        source=f"voxlane {facts.get('environment', {}).get('voxlane', __version__)}",
        run=uris.parse(run.uri).key.rstrip("/").rpartition("/")[2],
        data=trained.description.name,
        data_digest=trained.data_digest,
        fold=trained.fold,
        checkpoint=loaded.name,
        epoch=loaded.step // trained.config.steps_per_epoch,
        step=loaded.step,
        digest=digest,
        scores={name: target["dice"]["mean"] for name, target in targets.items()},
        details={
            "created": facts.get("created"),
            "training_cases": len(trained.training_cases),
            "held_out_cases": len(trained.held_out_cases),
            "parameters": facts.get("parameters"),
            "initial_weights": (facts.get("init") or {}).get("digest"),
            "config": config,
            "environment": facts.get("environment"),
        },
    )


# -- scores ------------------------------------------------------------------------------------------------------------


def _read_summary(source: Run, digests: Collection[str], notes: list[str]) -> dict[str, Any]:
    """Return the scores of an evaluation that is stored at `source`, if it scored the weights with these digests;
    otherwise say in `notes` why not."""
    for name in _SUMMARIES:
        summary = source.read_json(name)
        if summary is None:
            continue
        scored = {checkpoint["digest"] for checkpoint in summary.get("checkpoints") or ()}
        if scored == set(digests):
            return {part: summary[part] for part in _SCORES if part in summary}
        reason = "the evaluation scored other weights" if scored else "the evaluation does not say what it scored"
        notes.append(f"{source.folder_uri}: exported without scores: {reason}; run voxlane evaluate first")
        return {}
    notes.append(f"{source.folder_uri}: exported without scores; run voxlane evaluate first to have them")
    return {}


# -- names and common facts --------------------------------------------------------------------------------------------


def _clean_name(uri: str) -> str:
    """Return the last part of a URI as a name that a member may have."""
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", uri.rstrip("/").rpartition("/")[2]).lstrip("-._")
    return name or "network"


def _unique_names(parts: Sequence[_Part]) -> list[str]:
    """Return a different name for each network; those that are not unique get a number."""
    names: list[str] = []
    for part in parts:
        name, number = part.member.name, 2
        while name in names:
            name, number = f"{part.member.name}-{number}", number + 1
        names.append(name)
    return names


def _check_same_labels(parts: Sequence[_Part]) -> None:
    first = parts[0]
    for part in parts:
        if replace(part.description, name=first.description.name) != first.description:
            raise ConfigError(
                f"its channels or labels differ from those of {first.source}",
                uri=part.source,
                fix="Combine only networks for the same channels and labels",
            )


def _common(models: Sequence[ModelFacts], field_name: str, sources: Sequence[str]) -> Any:
    """Return the value of a field that all models share, or None without models."""
    values = [getattr(model, field_name) for model in models]
    if any(value != values[0] for value in values):
        raise ConfigError(
            f"{field_name}: the models {', '.join(sources)} differ in it", fix="Export them one by one, or state it"
        )
    return values[0] if values else None
