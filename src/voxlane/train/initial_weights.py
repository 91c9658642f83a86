"""The weights that a run starts from (`init_from`): read once from a run or model, stored in the new run.

RUN/initial.ckpt holds the tensors that were taken, by their names in the run's own network. Ranks read them from there,
also in a resume before the first checkpoint, so that nothing depends on the source once the run exists.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from voxlane import redaction
from voxlane.checkpoint import Checkpoint
from voxlane.errors import ConfigError, RunError
from voxlane.model.networks import build
from voxlane.model.stages import locate_tensor
from voxlane.store import StoreConfig
from voxlane.train.config import PRESETS, FinetuneConfig, TrainConfig, resolve_network
from voxlane.train.exported_model import ExportedModel, is_model, load_model
from voxlane.train.predictor import compute_digest, load_weights
from voxlane.train.run import Run, TrainedRun, find_runs
from voxlane.train.weight_transfer import Shapes, WeightTransfer, fits, plan_transfer
from voxlane.volume.description import Description
from voxlane.volume.plan import Network, Plan
from voxlane.volume.prepared_dataset import Prepared

INITIAL = "initial.ckpt"


@dataclass(frozen=True)
class WeightSource:
    """A network whose weights a run may start from. Weights are read when they are needed."""

    uri: str
    origin: str
    """Which of the weights there, such as last checkpoint."""
    network: Network
    description: Description
    plan: Plan
    read: Callable[[], Mapping[str, Tensor]]

    @property
    def shapes(self) -> Shapes:
        """Shapes of all tensors that the source may have: heads of coarser resolutions may be missing."""
        return network_shapes(self.network, self.description, deep_supervision=True)

    def load(self) -> Mapping[str, Tensor]:
        """Return the weights, after comparing them with the description of their network."""
        weights = {name: value for name, value in self.read().items() if isinstance(value, Tensor)}
        shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
        possible = self.shapes
        required = {name for name in possible if not _is_optional(name, self.network)}
        if not shapes.items() <= possible.items() or not required <= shapes.keys():
            raise RunError(
                "init_from: the weights do not match the network that is described beside them",
                uri=self.uri,
                fix="Restore the files of the source, or start from another one",
            )
        if not all(bool(tensor.isfinite().all()) for tensor in weights.values()):
            raise RunError(
                f"init_from: the weights of the {self.origin} are not all finite numbers",
                uri=self.uri,
                fix="Start from another checkpoint (finetune.checkpoint) or another run",
            )
        return weights


def open_source(uri: str, finetune: FinetuneConfig, store: StoreConfig | None) -> WeightSource:
    """Return the network at a URI, without reading its weights."""
    run = Run(uri, store)
    if run.exists:
        return _open_run(run, finetune)
    if is_model(uri, store):
        return _open_model(load_model(uri, store), finetune)
    try:
        names = [fold_run.uri.rpartition("/")[2] for fold_run in find_runs(uri, store)]
    except RunError:
        raise RunError(
            "init_from: there is neither a run nor an exported model here",
            uri=run.folder_uri,
            fix="Give the --run of a voxlane train, or what voxlane export or import wrote",
        ) from None
    fix = f"Start from one of them: init_from={uri}/{names[0]}"
    raise ConfigError(f"init_from: this is a folder of runs ({', '.join(names)})", uri=run.folder_uri, fix=fix)


def _open_run(run: Run, finetune: FinetuneConfig) -> WeightSource:
    trained = TrainedRun.load(run)
    if finetune.member is not None:
        raise ConfigError("finetune.member: a run has a single network", uri=run.folder_uri, fix="Leave it out")
    names = dict.fromkeys((finetune.checkpoint, "last"))
    name = next((name for name in names if run.store.exists(run.key(f"checkpoints/{name}.ckpt"))), None)
    if name is None:
        fix = "Continue that run first: voxlane train DATA --run RUN --resume"
        raise RunError("init_from: the run has no checkpoint yet", uri=run.folder_uri, fix=fix)
    network = resolve_network(trained.config, trained.plan)
    return WeightSource(
        run.folder_uri,
        f"{name} checkpoint",
        network,
        trained.description,
        trained.plan,
        partial(load_weights, run, name),
    )


def _open_model(model: ExportedModel, finetune: FinetuneConfig) -> WeightSource:
    members = {member.name: member for member in model.facts.members}
    if finetune.checkpoint != "last":
        raise ConfigError("finetune.checkpoint: an exported model has one", uri=model.uri, fix="Leave it out")
    if finetune.member is None and len(members) > 1:
        names, fix = ", ".join(members), f"Choose one: finetune.member={next(iter(members))}"
        raise ConfigError(f"init_from: the model has {len(members)} networks ({names})", uri=model.uri, fix=fix)
    member = members.get(finetune.member or next(iter(members)))
    if member is None:
        fix = f"Choose from: {', '.join(members)}"
        raise ConfigError(f"finetune.member: the model has no network {finetune.member}", uri=model.uri, fix=fix)
    description, read = model.facts.description, partial(model.load_weights, member)
    return WeightSource(model.uri, f"network {member.name}", member.network, description, member.plan, read)


def _is_optional(name: str, network: Network) -> bool:
    place = locate_tensor(name, network)
    return place.part == "head" and place.level > 0


def network_shapes(network: Network, description: Description, *, deep_supervision: bool) -> Shapes:
    """Return the shapes of a network's tensors."""
    with torch.device("meta"):
        module = build(network, len(description.channels), description.outputs, deep_supervision=deep_supervision)
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


@dataclass(frozen=True)
class PlannedStart:
    """The source of a run's first weights, and the network that takes them."""

    source: WeightSource
    network: Network
    shapes: Shapes
    """Shapes of the tensors of the run's network."""
    config: TrainConfig
    prepared: Prepared

    def match(self, source_shapes: Shapes) -> WeightTransfer:
        """Return what the network takes from a source with these tensors."""
        new_heads = self.config.finetune.new_heads
        return plan_transfer(source_shapes, self.source.network, self.shapes, self.network, new_heads=new_heads)

    def check(self) -> None:
        """Raise ConfigError if the network can take nothing."""
        transfer = self.match(self.source.shapes)
        if self.source.network.kind != self.network.kind or not fits(transfer, self.shapes, self.network):
            raise ConfigError(
                f"init_from: no layer of this network ({_describe(self.network)}) fits that of the source "
                f"({_describe(self.source.network)})",
                uri=self.source.uri,
                fix="Train the source's network: finetune.network=source",
            )

    def load(self) -> InitialWeights:
        """Read the weights."""
        weights = self.source.load()
        transfer = self.match({name: tuple(tensor.shape) for name, tensor in weights.items()})
        counts = {name: torch.Size(shape).numel() for name, shape in self.shapes.items()}
        facts = {
            "uri": redaction.redact_urls(self.source.uri),
            "origin": self.source.origin,
            "digest": compute_digest(weights),
            "parameters": sum(counts.values()),
            "parameters_taken": sum(counts[name] for name in transfer.taken),
            "notes": _describe_differences(self.source, self.prepared, self.config, transfer),
            **transfer.to_plain(),
        }
        return InitialWeights({name: weights[old] for name, old in transfer.taken.items()}, facts)


@dataclass(frozen=True)
class InitialWeights:
    """Weights for a new run."""

    tensors: dict[str, Tensor]
    """The tensors that were taken, by their names in the run's network."""
    facts: dict[str, Any]
    """`init` of run.json: source, digest and the fate of every tensor."""

    def save(self, run: Run) -> None:
        """Write RUN/initial.ckpt."""
        Checkpoint(run.folder_uri, run.config).save(self.tensors, INITIAL)


def load_initial_weights(run: Run, network: nn.Module, start: Mapping[str, Any]) -> None:
    """Give a network the tensors in RUN/initial.ckpt, which `init` of run.json describes. All ranks must call it: each
    byte is read once and sent to the others."""
    tensors = Checkpoint(run.folder_uri, run.config).load(INITIAL, map_location="cpu", read_once=True)
    shapes = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items() if name in start["taken"]}
    stored = {name: tuple(tensor.shape) for name, tensor in tensors.items()} if isinstance(tensors, dict) else None
    if stored != shapes or len(shapes) != len(start["taken"]):
        raise RunError(
            "the weights do not match the network in run.json",
            uri=run.file_uri(INITIAL),
            fix="Restore the run's own files, or start a new run",
        )
    network.load_state_dict(tensors, strict=False)


def names_starting_anew(facts: Mapping[str, Any]) -> set[str]:
    """Return the tensors that a run's source did not give, from its run.json; none if the run has no source."""
    start = facts.get("init") or {}
    return {entry["name"] for kind in ("replaced", "missing") for entry in start.get(kind, ())}


def plan_start(
    config: TrainConfig, values: Mapping[str, Any], prepared: Prepared, store: StoreConfig | None
) -> tuple[TrainConfig, PlannedStart | None]:
    """Return the config, with the source's network if it asks for that, and what the run takes from its source; None
    without `init_from`. `values`: what the user set, without a preset's defaults."""
    if config.init_from is None:
        return config, None
    finetune = config.finetune
    source = open_source(config.init_from, finetune, store)
    if finetune.network == "source":
        config = _adopt_network(config, values, source.network)
    network = resolve_network(config, prepared.plan)
    shapes = network_shapes(network, prepared.description, deep_supervision=config.deep_supervision)
    start = PlannedStart(source, network, shapes, config, prepared)
    start.check()
    return config, start


def _adopt_network(config: TrainConfig, values: Mapping[str, Any], network: Network) -> TrainConfig:
    """Return the config with the source's network, which replaces what a preset says about it."""
    preset = PRESETS[config.preset]
    for name in ("network", "base_features", "depth", "norm"):
        if values.get(name) not in (None, preset.get(name)):
            raise ConfigError(
                f"{name}: finetune.network=source takes the source's network", fix="Leave one of them out"
            )
    return dataclasses.replace(config, network=network, base_features=None, depth=None, norm=None)


def _describe(network: Network) -> str:
    if network.kind == "mlperf":
        return "mlperf"
    return f"{network.kind}, features {', '.join(map(str, network.features))}"


def _describe_differences(
    source: WeightSource, prepared: Prepared, config: TrainConfig, transfer: WeightTransfer
) -> list[str]:
    """Return remarks about what the shapes of tensors do not show."""
    notes = []
    old, new = source.description, prepared.description
    if any(name.startswith("head") for name in transfer.taken) and old.targets != new.targets:
        names = f"{', '.join(old.targets)} became {', '.join(new.targets)}"
        notes.append(f"note: the labels differ ({names}); finetune.new_heads=true starts their layers anew")
    if old.channels != new.channels and len(old.channels) == len(new.channels):
        notes.append(f"note: the channels differ ({', '.join(old.channels)} became {', '.join(new.channels)})")
    if source.plan.spacing != prepared.plan.spacing:
        sizes = [" x ".join(f"{mm:.3g}" for mm in plan.spacing) for plan in (source.plan, prepared.plan)]
        notes.append(f"note: the source was trained at {sizes[0]} mm, this dataset was prepared at {sizes[1]} mm")
    if source.plan.normalisation != prepared.plan.normalisation:
        notes.append("note: the source's intensities were normalised in another way than this dataset's")
    if config.finetune.freeze_encoder:
        steps = config.finetune.freeze_steps
        until = "for the whole run" if steps is None else f"for the first {steps} steps"
        notes.append(f"the encoder is frozen {until}, except for layers that start anew")
    return notes
