"""Names that the operator, the apps and the nodes agree on."""

from __future__ import annotations

import hashlib

GROUP = "voxlane.dev"
API_VERSION = f"{GROUP}/v1alpha1"
STAGED = "staged.voxlane.dev"
"""Prefix of the labels that say what is staged: `staged.voxlane.dev/<key>: ready` on a node that holds a dataset whole,
`staged.voxlane.dev/<name>: "true"` on a workload and its pods that use it."""
_LONGEST = 63
"""Characters in a label's name or value."""


def node_key(namespace: str, name: str) -> str:
    """A StagedDataset's name on nodes: in their labels, and of its folder on their disks. Never above 63 characters,
    and no two datasets have the same."""
    whole = f"{namespace}.{name}"
    if len(whole) <= _LONGEST:
        return whole
    return f"{whole[:46]}-{hashlib.sha256(whole.encode()).hexdigest()[:16]}"


def node_label(namespace: str, name: str) -> str:
    """The label of nodes that hold a StagedDataset whole; its value there is `ready`."""
    return f"{STAGED}/{node_key(namespace, name)}"


def use_label(name: str) -> str:
    """The label of pods and workloads that use a StagedDataset of their namespace; its value there is `true`."""
    return f"{STAGED}/{name}"
