"""A results folder of nnU-Net v2 as an exported model.

FOLDER/plans.json, FOLDER/dataset.json and FOLDER/fold_N/checkpoint_final.pth, as nnU-Net writes them to
`Dataset004_Hippocampus/nnUNetTrainer__nnUNetPlans__3d_fullres`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from torch import Tensor

from voxlane.errors import ConfigError, ImportedModelError
from voxlane.store import Store, StoreConfig
from voxlane.store.bucket import ignore_missing_object
from voxlane.train.imports.nnunet_plans import NnunetConfiguration, read_configuration, read_description
from voxlane.train.imports.nnunet_weights import convert_weights, load_checkpoint
from voxlane.train.model_facts import Member, ModelFacts, Provenance
from voxlane.volume.description import Description
from voxlane.volume.prepared_dataset import as_prefix

CheckpointName = Literal["final", "best"]
_VARIANTS = r"""\d+ep(?:ochs?)? NoMirroring onlyMirror01 DA5 (?:DA)?(?:Seg)?[Oo]rd0 NoDA noDummy2DDA CELoss DiceLoss
DiceCELoss noSmooth Topk10Loss Topk10LossLS01 DiceTopK10Loss CosAnneal warmup (?:Vanilla)?Ada[mn](?:\den\d)? \d+
probabilisticOversampling NoDeepSupervision Benchmark noDataLoading"""
_STANDARD_TRAINER = re.compile(rf"nnUNetTrainer(?:_?(?:{'|'.join(_VARIANTS.split())}))*")
"""Trainers that come with nnU-Net and change neither the network nor how it predicts."""


@dataclass(frozen=True)
class NnunetFolder:
    """A results folder of nnU-Net v2."""

    uri: str
    """URI of the folder, without a trailing slash."""
    store_config: StoreConfig | None = None
    folds: tuple[str, ...] = ()
    """Folds to import, such as 0 or all; empty: all that were trained."""
    checkpoint: CheckpointName = "final"
    trust_trainer: bool = False
    """Accept a trainer that does not come with nnU-Net: its networks predict as those of nnU-Net's own."""

    @property
    def checkpoint_file(self) -> str:
        """Name of the checkpoint's file in the folder of each fold."""
        return f"checkpoint_{self.checkpoint}.pth"

    @cached_property
    def _names(self) -> list[str]:
        """Files below the folder, with their paths."""
        store, key = Store.locate(self.uri, self.store_config)
        prefix = as_prefix(key)
        keys = [key for page in store.list_pages(prefix) for key in page.column("path").to_pylist()]
        return [key.removeprefix(prefix) for key in keys]

    def read_json(self, name: str) -> dict[str, Any]:
        """Return the content of a JSON file of the folder."""
        store, key = Store.locate(f"{self.uri}/{name}", self.store_config)
        body, fix = b"", "Copy it from the dataset's results folder"
        with ignore_missing_object():
            body = store.get_bytes(key)
        try:
            document = json.loads(body) if body else None
        except ValueError:
            document = None
        if not isinstance(document, dict):
            if not self._names:
                raise ImportedModelError("there are no files here", uri=self.uri, fix="Check its spelling")
            problem = f"{name} is not a JSON file of nnU-Net" if body else f"the folder has no {name}"
            raise ImportedModelError(problem, uri=self.uri, fix=self._suggest_folder() or fix)
        return document

    def _suggest_folder(self) -> str:
        """Suggest the results folders below this one."""
        inner = sorted(name.removesuffix("/plans.json") for name in self._names if name.endswith("/plans.json"))
        return f"Import one of the folders below it: {', '.join(inner[:4])}" if inner else ""

    def find_folds(self) -> list[str]:
        """Return the folds to import. Raises ImportedModelError if one of them lacks its checkpoint."""
        existing = {match[1] for name in self._names if (match := re.match(r"fold_(\d+|all)/", name))}
        trained = {fold for fold in existing if f"fold_{fold}/{self.checkpoint_file}" in self._names}
        numbered = existing - {"all"}
        folds = self.folds or tuple(sorted(numbered or existing, key=lambda fold: (len(fold), fold)))
        if not folds:
            fix = self._suggest_folder() or "Import the folder that holds plans.json and fold_0, fold_1, ..."
            raise ImportedModelError("the folder has no fold_0, fold_1, ...", uri=self.uri, fix=fix)
        for fold in folds:
            if fold in trained:
                continue
            problem = f"has no {self.checkpoint_file}" if fold in existing else "does not exist"
            others = ",".join(sorted(trained))
            fix = f"Import the others with --folds {others}" if others else "Train it to its end"
            if f"fold_{fold}/checkpoint_best.pth" in self._names and self.checkpoint == "final":
                fix += ", or give --checkpoint best"
            raise ImportedModelError(f"fold_{fold} {problem}", uri=self.uri, fix=fix)
        return list(folds)


@dataclass(frozen=True)
class NnunetModel:
    """What a results folder of nnU-Net becomes: the facts of an exported model, and its weights."""

    folder: NnunetFolder
    facts: ModelFacts
    configuration: NnunetConfiguration

    @classmethod
    def read(cls, folder: NnunetFolder) -> NnunetModel:
        """Read the plans and every checkpoint, and check that voxlane predicts with them as nnU-Net does."""
        plans, document = folder.read_json("plans.json"), folder.read_json("dataset.json")
        folds = folder.find_folds()
        dataset = str(plans.get("dataset_name") or "nnU-Net model")
        description = read_description(document, dataset, f"{folder.uri}/dataset.json")
        members: list[Member] = []
        configuration: NnunetConfiguration | None = None
        for fold in folds:
            fold_uri = f"{folder.uri}/fold_{fold}"
            content = load_checkpoint(fold_uri, folder.checkpoint_file, folder.store_config)
            name = _check_trainer(folder, content, fold_uri)
            if configuration is None:
                configuration = read_configuration(plans, name, f"{folder.uri}/plans.json")
                _check_channels(configuration, description, folder.uri)
            elif name != configuration.name:
                raise ImportedModelError(
                    f"fold_{fold} was trained with configuration {name}, the others with {configuration.name}",
                    uri=folder.uri,
                    fix="Import the folds of one configuration",
                )
            members.append(_make_member(configuration, fold, content, dataset, folder.checkpoint))
            _convert(content, configuration, description, f"{fold_uri}/{folder.checkpoint_file}")
        assert configuration is not None
        name = f"{description.name} {configuration.name}"
        return cls(folder, ModelFacts(name=name, description=description, members=tuple(members)), configuration)

    def load_weights(self, member: Member) -> Mapping[str, Tensor]:
        """Return the weights of a network under voxlane's names."""
        fold_uri = f"{self.folder.uri}/{member.name.removeprefix(f'{self.configuration.name}-')}"
        content = load_checkpoint(fold_uri, self.folder.checkpoint_file, self.folder.store_config)
        uri = f"{fold_uri}/{self.folder.checkpoint_file}"
        return _convert(content, self.configuration, self.facts.description, uri)


def parse_folds(text: str | None) -> tuple[str, ...]:
    """Return the folds that --folds names, such as 0,2 or all."""
    folds = tuple(part.strip() for part in text.split(",")) if text else ()
    if not all(fold.isdecimal() or fold == "all" for fold in folds) or len(set(folds)) < len(folds):
        raise ConfigError(f"--folds {text}", fix="Give numbers such as 0,2, or all for the network of all cases")
    return folds


def _check_trainer(folder: NnunetFolder, content: Mapping[str, Any], fold_uri: str) -> str:
    """Check the trainer of a checkpoint, and return the name of its configuration."""
    trainer, arguments = str(content.get("trainer_name")), content.get("init_args")
    configuration = arguments.get("configuration") if isinstance(arguments, Mapping) else None
    if not isinstance(configuration, str):
        raise ImportedModelError(
            "the checkpoint does not say which configuration it was trained with",
            uri=f"{fold_uri}/{folder.checkpoint_file}",
            fix="Train it with nnU-Net v2",
        )
    if not folder.trust_trainer and not _STANDARD_TRAINER.fullmatch(trainer):
        raise ImportedModelError(
            f"trained by {trainer}, which does not come with nnU-Net and may change the network or the prediction",
            uri=folder.uri,
            fix="If it changes only the training, give --trust-trainer",
        )
    return configuration


def _check_channels(configuration: NnunetConfiguration, description: Description, uri: str) -> None:
    planned, listed = len(configuration.plan.normalisation), len(description.channels)
    if planned != listed:
        raise ImportedModelError(
            f"plans.json has {planned} channels, dataset.json {listed}",
            uri=uri,
            fix="Copy both from one results folder",
        )


def _make_member(
    configuration: NnunetConfiguration, fold: str, content: Mapping[str, Any], dataset: str, checkpoint: str
) -> Member:
    epoch = content.get("current_epoch")
    plan = configuration.plan
    return Member(
        name=f"{configuration.name}-fold_{fold}",
        network=plan.network,
        plan=plan,
        patch=plan.patch,
        mirror_axes=configuration.mirror_axes(content.get("inference_allowed_mirroring_axes")),
        provenance=Provenance(
            source="nnU-Net v2",
            run=f"{content.get('trainer_name')}__{configuration.name}/fold_{fold}",
            data=dataset,
            fold=int(fold) if fold.isdecimal() else None,
            checkpoint=checkpoint,
            epoch=int(epoch) if isinstance(epoch, int) else None,
        ),
    )


def _convert(
    content: Mapping[str, Any], configuration: NnunetConfiguration, description: Description, uri: str
) -> dict[str, Tensor]:
    channels, outputs = len(description.channels), description.outputs
    return convert_weights(
        content["network_weights"], configuration.plan.network, channels, outputs, configuration.axis_order, uri
    )
