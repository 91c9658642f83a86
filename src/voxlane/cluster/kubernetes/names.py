"""Names that the operator, the apps and the nodes agree on."""

from __future__ import annotations

import hashlib

GROUP = "voxlane.dev"
API_VERSION = f"{GROUP}/v1alpha1"
STAGED = "staged.voxlane.dev"
"""Prefix of the labels about staged data: `staged.voxlane.dev/<key>: ready` on a node that holds a complete copy of a
dataset, `staged.voxlane.dev/<name>: "true"` on a workload and its pods that use it."""
_MAX_LABEL_LENGTH = 63


def node_key(namespace: str, name: str) -> str:
    """Return the name of a StagedDataset on nodes, for their labels and for its folder on their disks. It has at most
    63 characters and is unique to the dataset."""
    key = f"{namespace}.{name}"
    if len(key) <= _MAX_LABEL_LENGTH:
        return key
    return f"{key[:46]}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


def node_label(namespace: str, name: str) -> str:
    """Return the label of nodes that hold a complete copy of a StagedDataset; its value there is `ready`."""
    return f"{STAGED}/{node_key(namespace, name)}"


def use_label(name: str) -> str:
    """Return the label of pods and workloads that use a StagedDataset of their namespace; its value is `true`."""
    return f"{STAGED}/{name}"
