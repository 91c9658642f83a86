"""The format of exported models: everything that segmenting scans needs, independent of the run and the dataset.

MODEL/model.json       format version, and what `ModelFacts` holds: labels, networks with their plans, scores, licence,
                       and the size and SHA-256 of every other file. It is written last.
MODEL/README.md        model card
MODEL/weights/*        weights of each network, as safetensors

MODEL is a folder, a bucket prefix, or one .zip file with the same files, stored uncompressed. Weights are compared with
their checksums before they are used, and no file can run code.

    model = load_model("gs://bucket/kidney")
    networks = [model.build_network(member) for member in model.facts.members]

Weights from anywhere become a model if their names are those of a network that `voxlane.model.networks` builds:

    facts = ModelFacts(name="kidney", description=description, members=(Member(name="fold_0", ...),))
    save_model(facts, lambda member: weights[member.name], "gs://bucket/kidney")
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from voxlane import __version__, settings
from voxlane.checkpoint.safetensors import decode_safetensors, encode_safetensors
from voxlane.errors import IncompleteError, MismatchError, RunError
from voxlane.model.networks import build
from voxlane.store import StoreConfig
from voxlane.train.model_card import format_card
from voxlane.train.model_facts import FileEntry, Member, ModelFacts
from voxlane.train.model_files import MODEL_JSON, ModelReader, ModelWriter, damaged_error
from voxlane.volume.description import Description

FORMAT = "voxlane-model"
VERSION = 1
"""Version of the format. Raise it with any change that an older voxlane would read wrongly or not at all."""
CARD = "README.md"
"""Name of the model card."""


@dataclass(frozen=True)
class ExportedModel:
    """A model that was exported. Weights are read when they are needed."""

    facts: ModelFacts
    digest: str
    """SHA-256 of model.json, and thereby of the whole model."""
    reader: ModelReader

    @property
    def uri(self) -> str:
        """The model's folder or .zip file, as the caller named it."""
        return self.reader.uri

    def load_weights(self, member: Member) -> dict[str, Tensor]:
        """Read the weights of a network; raise CorruptError if they are not those that were exported, and
        IncompleteError if their file is missing."""
        return decode_safetensors(self.read_file(member.weights_file), self.reader.file_uri(member.weights_file))

    def build_network(self, member: Member) -> nn.Module:
        """Return a network with its weights, on the CPU, in evaluation mode."""
        uri = self.reader.file_uri(member.weights_file)
        return build_with_weights(member, self.facts.description, self.load_weights(member), uri)

    def read_file(self, name: str) -> bytes:
        """Return the content of a file of the model, after comparing it with its checksum."""
        entry = self.facts.files.get(name)
        body = None if entry is None else self.reader.read(name, entry.size_bytes)
        if entry is None or body is None:
            raise IncompleteError(
                "the model lacks this file", uri=self.reader.file_uri(name), fix="Copy the whole model from its source"
            )
        if hashlib.sha256(body).hexdigest() != entry.sha256:
            raise damaged_error(self.reader.file_uri(name), f"its SHA-256 differs from the one in {MODEL_JSON}")
        return body


def build_with_weights(
    member: Member, description: Description, weights: Mapping[str, Tensor], uri: str = "", *, fused: bool = True
) -> nn.Module:
    """Return a member's network with these weights, on the CPU, in evaluation mode; errors name `uri`.

    fused: use our kernels where supported.
    """
    channels, outputs = len(description.channels), description.outputs
    network = build(member.network, channels, outputs, deep_supervision=False, fused=fused)
    try:
        network.load_state_dict(dict(weights))
    except RuntimeError:
        raise MismatchError(
            f"the weights do not match the network {member.name} in {MODEL_JSON}",
            uri=uri,
            fix="Copy the model again from its source, or export it again",
        ) from None
    return network.eval()


def save_model(
    facts: ModelFacts,
    load_weights: Callable[[Member], Mapping[str, Tensor]],
    uri: str,
    config: StoreConfig | None = None,
) -> ExportedModel:
    """Write a model to the folder or .zip file `uri`; `load_weights` is called once for each network, in order.

    Raises RunError if a model exists there. Nothing that `load_model` accepts is there before everything is written.
    """
    files: dict[str, FileEntry] = {}
    facts = dataclasses.replace(
        facts,
        created=facts.created or datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        software=facts.software or {"voxlane": __version__, "torch": torch.__version__},
    )
    with ModelWriter(uri, config) as writer:
        for member in facts.members:
            size, chunks = encode_safetensors(load_weights(member))
            files[member.weights_file] = writer.write(member.weights_file, chunks, size)
        files[CARD] = writer.write(CARD, [format_card(facts).encode()])
        facts = dataclasses.replace(facts, files=files)
        values = {"format": FORMAT, "version": VERSION, **settings.to_plain(facts)}
        body = json.dumps(values, indent=1).encode()
        writer.finish(body)
    return ExportedModel(facts, hashlib.sha256(body).hexdigest(), ModelReader(uri, config))


def is_model(uri: str, config: StoreConfig | None = None) -> bool:
    """Return whether `uri` names an exported model, complete or not, and not a run."""
    reader = ModelReader(uri, config)
    return reader.is_zip or reader.read(MODEL_JSON) is not None


def load_model(uri: str, config: StoreConfig | None = None) -> ExportedModel:
    """Read the description of the model at `uri`, a folder or a .zip file."""
    reader = ModelReader(uri, config)
    body = reader.read(MODEL_JSON)
    origin = reader.file_uri(MODEL_JSON)
    if body is None:
        raise RunError("no exported model is here", uri=uri, fix="Export one: voxlane export RUN MODEL")
    try:
        values = json.loads(body)
    except ValueError:
        values = None
    if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
        raise RunError("not the description of an exported model", uri=origin, fix="Copy the model from its source")
    version = values.pop("version", None)
    if not isinstance(version, int) or version > VERSION:
        raise RunError(
            f"the model was exported by a newer version of voxlane (format {version}; this version reads formats up "
            f"to {VERSION})",
            uri=origin,
            fix="Install a newer one: pip install --upgrade voxlane",
        )
    facts = settings.build(ModelFacts, values, origin=origin)
    return ExportedModel(facts, hashlib.sha256(body).hexdigest(), reader)
