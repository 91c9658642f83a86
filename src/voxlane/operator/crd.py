"""The custom resource StagedDataset, as the cluster is told of it."""

from __future__ import annotations

from typing import Any

from voxlane.kube.credentials import KEY, NAME, SERVER
from voxlane.kube.names import GROUP
from voxlane.sizes import DURATION, QUANTITY

Schema = dict[str, Any]


def _text(description: str, **more: Any) -> Schema:
    return {"type": "string", "description": description, **more}


def _number(description: str, **more: Any) -> Schema:
    return {"type": "integer", "format": "int64", "description": description, **more}


def _fields(description: str, properties: dict[str, Schema], **more: Any) -> Schema:
    return {"type": "object", "description": description, "properties": properties, **more}


_CREDENTIALS = _fields(
    "How the copiers may read the source. Nothing here: the nodes' own identity.",
    {
        # What is no name may be the secret itself, which must not be kept here.
        "secret": _text(
            "A Secret of this namespace whose keys are environment variables, or that holds `file`.", pattern=NAME
        ),
        "file": _text("A key of the Secret that is a Google service account's JSON file.", pattern=KEY),
        "serviceAccount": _text(
            "A service account of this namespace with a cloud identity that may read the source.", pattern=NAME
        ),
        "endpoint": _text("Server of an S3-compatible store or an emulator, without credentials.", pattern=SERVER),
    },
)

_SPEC = _fields(
    "What to stage, and where.",
    {
        "source": _text(
            "What is copied: gs://BUCKET/PREFIX, s3://BUCKET/PREFIX, az://CONTAINER/PREFIX or nfs://SERVER/PATH.",
            pattern=r"^(gs|gcs|s3|s3a|az|azure|nfs)://[^/]+",
        ),
        "replicas": {
            "type": "integer",
            "format": "int32",
            "minimum": 1,
            "description": "Nodes that hold a copy. Default: 1, or with a nodeSelector every node that it matches.",
        },
        "nodeSelector": {
            "type": "object",
            "additionalProperties": {"type": "string"},
            "description": "Labels of the nodes that may hold a copy.",
        },
        "capacity": {
            "x-kubernetes-int-or-string": True,
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "pattern": QUANTITY,
            "minimum": 1,
            "description": "The most that the source may hold, such as 100Gi; a larger one is not copied.",
        },
        "dataPath": _text(
            "Folder on the nodes' disks that copies lie in, below one that the operator allows. Default: the first "
            "of those. It cannot be changed once data is staged.",
            pattern=r"^/",
        ),
        "credentials": _CREDENTIALS,
        "timeout": _text(
            "The longest that a copy onto a node may take, such as 2h or 30m. Default 24h.", pattern=DURATION
        ),
        "keep": {"type": "boolean", "description": "Never evicted to make room for another dataset."},
    },
    required=["source"],
)

_NODE = _fields(
    "The copy on one node.",
    {
        "phase": _text(
            "How far it is.",
            enum=["Waiting", "Copying", "Ready", "NoRoom", "Failed", "Lost", "Evicted", "Removing"],
        ),
        "bytes": _number("Bytes that are there."),
        "totalBytes": _number("Bytes of the source."),
        "objects": _number("Objects that are there."),
        "totalObjects": _number("Objects of the source."),
        "lackingBytes": _number("Room that the disk lacks."),
        "message": _text("What is the matter."),
        "version": _text("Digest of the names, sizes and versions of the source's objects."),
        "since": _text("When it came to this phase.", format="date-time"),
        "revision": _text("Which source, and which order to stage it again, this copy answers to."),
        "attempts": _number("Copies that failed since the last that did not."),
        "retryAt": _text("No copy is tried before this.", format="date-time"),
        "reason": _text("The kind of failure."),
    },
)

_CONDITION = _fields(
    "A fact about the dataset.",
    {
        "type": _text("Ready."),
        "status": _text("True, False or Unknown.", enum=["True", "False", "Unknown"]),
        "reason": _text("The phase."),
        "message": _text("The message."),
        "lastTransitionTime": _text("When the status changed.", format="date-time"),
    },
    required=["type", "status"],
)

_STATUS = _fields(
    "What became of it; written by the operator and its copiers.",
    {
        "phase": _text(
            "Where it stands.",
            enum=["Pending", "Staging", "Ready", "Degraded", "Failed", "Evicted", "Deleting"],
        ),
        "message": _text("Where it stands, in a sentence."),
        "ready": _text("Nodes that hold it whole, of those that should: 2/3."),
        "progress": _text("How much is copied: 40%."),
        "size": _text("What the source holds, for people: 1.0 GiB."),
        "objects": _number("Objects of the source."),
        "bytes": _number("Bytes of the source."),
        "hostPath": _text("The folder that a pod mounts, the same on every node."),
        "nodeAffinity": {
            "type": "object",
            "description": "What places a pod on a node that holds it: `affinity.nodeAffinity` of a pod.",
            "x-kubernetes-preserve-unknown-fields": True,
        },
        "lastUsed": _text("When a pod or a workload last used it.", format="date-time"),
        "observedGeneration": _number("The spec that this status is about."),
        "nodes": {"type": "object", "description": "Copies by node.", "additionalProperties": _NODE},
        "conditions": {"type": "array", "description": "Ready, for `kubectl wait`.", "items": _CONDITION},
    },
)


def _column(name: str, path: str, kind: str = "string", priority: int = 0) -> Schema:
    return {"name": name, "type": kind, "jsonPath": path, "priority": priority}


CRD: dict[str, Any] = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": f"stageddatasets.{GROUP}", "labels": {"app.kubernetes.io/managed-by": "voxlane"}},
    "spec": {
        "group": GROUP,
        "scope": "Namespaced",
        "names": {
            "kind": "StagedDataset",
            "listKind": "StagedDatasetList",
            "plural": "stageddatasets",
            "singular": "stageddataset",
            "shortNames": ["sds"],
            "categories": ["voxlane"],
        },
        "versions": [
            {
                "name": "v1alpha1",
                "served": True,
                "storage": True,
                "subresources": {"status": {}},
                "additionalPrinterColumns": [
                    _column("Source", ".spec.source"),
                    _column("Phase", ".status.phase"),
                    _column("Nodes", ".status.ready"),
                    _column("Progress", ".status.progress"),
                    _column("Size", ".status.size"),
                    _column("Age", ".metadata.creationTimestamp", "date"),
                    _column("Message", ".status.message", priority=1),
                ],
                "schema": {
                    "openAPIV3Schema": _fields(
                        "A dataset on nodes' disks: copied there from a bucket, and kept there.",
                        {
                            "apiVersion": {"type": "string"},
                            "kind": {"type": "string"},
                            "metadata": {"type": "object"},
                            "spec": _SPEC,
                            "status": _STATUS,
                        },
                        required=["spec"],
                    )
                },
            }
        ],
    },
}
"""apiextensions.k8s.io/v1; needs no validation in CEL, so that every Kubernetes from 1.16 on takes it."""
