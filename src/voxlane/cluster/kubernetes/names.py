"""Names that the operator, the apps and the nodes agree on."""

from __future__ import annotations

import hashlib

GROUP = "voxlane.dev"
API_VERSION = f"{GROUP}/v1alpha1"
STAGED = "staged.voxlane.dev"
"""Prefix of the labels about staged data: `staged.voxlane.dev/<key>: ready` on a node that holds a complete copy of a
dataset, `staged.voxlane.dev/<name>: "true"` on a workload and its pods that use it."""
DATA_PATH = "/var/lib/voxlane"
"""Default folder for staged data on the nodes' disks."""
DATA_CLAIM = "voxlane-data"
"""Name of the PersistentVolumeClaim through which a namespace's pods reach its folder below DATA_PATH."""
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


def node_folder(data_path: str, namespace: str) -> str:
    """Return the folder of a namespace below a data path of the nodes. Nothing else has data of that namespace."""
    return f"{data_path}/namespaces/{namespace}"


def copy_path(namespace: str, name: str) -> str:
    """Return the path of a StagedDataset's copy, relative to the folder of its namespace."""
    return f"datasets/{node_key(namespace, name)}"


def claim_name(data_path: str) -> str:
    """Return the name of the claim to a namespace's folder below a data path."""
    if data_path == DATA_PATH:
        return DATA_CLAIM
    return f"{DATA_CLAIM}-{hashlib.sha256(data_path.encode()).hexdigest()[:8]}"


def use_label(name: str) -> str:
    """Return the label of pods and workloads that use a StagedDataset of their namespace; its value is `true`."""
    return f"{STAGED}/{name}"
