"""Definition of the custom resource StagedDataset."""

from __future__ import annotations

from typing import Any

from voxlane.cluster.kubernetes.credentials import KEY, NAME, SERVER
from voxlane.cluster.kubernetes.names import GROUP
from voxlane.sizes import DURATION, QUANTITY

Schema = dict[str, Any]


def _text(description: str, **extra: Any) -> Schema:
    return {"type": "string", "description": description, **extra}


def _number(description: str, **extra: Any) -> Schema:
    return {"type": "integer", "format": "int64", "description": description, **extra}


def _fields(description: str, properties: dict[str, Schema], **extra: Any) -> Schema:
    return {"type": "object", "description": description, "properties": properties, **extra}


_CREDENTIALS = _fields(
    "Credentials for reading the source. Default: the identity of the nodes.",
    {
        # A value that is not a valid name may be the secret itself, which must not be stored here.
        "secret": _text(
            "Secret of this namespace with the variables that the store reads, or with `file`.", pattern=NAME
        ),
        "file": _text("Key of the Secret that contains the JSON file of a Google service account.", pattern=KEY),
        "serviceAccount": _text(
            "Service account of this namespace whose cloud identity may read the source.", pattern=NAME
        ),
        "endpoint": _text("URL of an S3-compatible store or an emulator, without credentials.", pattern=SERVER),
    },
)

_SPEC = _fields(
    "What to stage, and where.",
    {
        "source": _text(
            "Source to copy: gs://BUCKET/PREFIX, s3://BUCKET/PREFIX, az://CONTAINER/PREFIX or nfs://SERVER/PATH.",
            pattern=r"^(gs|gcs|s3|s3a|az|azure|nfs)://[^/]+",
        ),
        "replicas": {
            "type": "integer",
            "format": "int32",
            "minimum": 1,
            "description": "Number of nodes that hold a copy. Default: 1, or with a nodeSelector every matching node.",
        },
        "nodeSelector": {
            "type": "object",
            "additionalProperties": {"type": "string"},
            "description": "Labels of the nodes that may hold a copy.",
        },
        "tolerations": {
            "type": "array",
            "description": "Taints of nodes that may hold a copy all the same. Nodes with other taints are not used.",
            "items": _fields(
                "A taint: any with this key or, if given, with this value and this effect only.",
                {
                    "key": _text("Key of the taint.", minLength=1),
                    "operator": _text("Default: Equal if there is a value.", enum=["Exists", "Equal"]),
                    "value": _text("Value of the taint."),
                    "effect": _text("Effect of the taint.", enum=["NoSchedule", "PreferNoSchedule", "NoExecute"]),
                },
                required=["key"],
            ),
        },
        "capacity": {
            "x-kubernetes-int-or-string": True,
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "pattern": QUANTITY,
            "minimum": 1,
            "description": "Maximum size of the source, such as 100Gi; a larger source is not copied.",
        },
        "dataPath": _text(
            "Folder for copies on the nodes' disks, one of those that the operator allows. Default: the first of "
            "them. It cannot be changed once data is staged.",
            pattern=r"^/",
        ),
        "credentials": _CREDENTIALS,
        "timeout": _text("Maximum duration of the copy to a node, such as 2h or 30m. Default: 24h.", pattern=DURATION),
        "keep": {"type": "boolean", "description": "Never evict this dataset to make room for another."},
    },
    required=["source"],
)

_NODE = _fields(
    "Copy on one node.",
    {
        "phase": _text(
            "Phase of the copy.",
            enum=["Waiting", "Copying", "Ready", "NoRoom", "Failed", "Lost", "Evicted", "Removing"],
        ),
        "bytes": _number("Number of bytes copied."),
        "totalBytes": _number("Size of the source in bytes."),
        "objects": _number("Number of objects copied."),
        "totalObjects": _number("Number of objects of the source."),
        "lackingBytes": _number("Number of bytes that the disk lacks."),
        "message": _text("Problem, or what the copy waits for."),
        "version": _text("Digest of the names, sizes and versions of the source's objects."),
        "since": _text("When the copy entered this phase.", format="date-time"),
        "revision": _text("Identifies the source and the restage annotation that this copy was made for."),
        "attempts": _number("Number of failures since the last success."),
        "retryAt": _text("Time of the next attempt.", format="date-time"),
        "reason": _text("Kind of failure."),
    },
)

_CONDITION = _fields(
    "Condition of the dataset.",
    {
        "type": _text("Ready."),
        "status": _text("True, False or Unknown.", enum=["True", "False", "Unknown"]),
        "reason": _text("Phase of the dataset."),
        "message": _text("Message of the dataset."),
        "lastTransitionTime": _text("When the status changed.", format="date-time"),
    },
    required=["type", "status"],
)

_STATUS = _fields(
    "State of the dataset, written by the operator and its copiers.",
    {
        "phase": _text(
            "Phase of the dataset.",
            enum=["Pending", "Staging", "Ready", "Degraded", "Failed", "Evicted", "Deleting"],
        ),
        "message": _text("State of the dataset in one sentence."),
        "ready": _text("Number of nodes with a complete copy, out of the requested number: 2/3."),
        "progress": _text("Percentage copied, over all nodes: 40%."),
        "size": _text("Size of the source in readable form: 1.0 GiB."),
        "objects": _number("Number of objects of the source."),
        "bytes": _number("Size of the source in bytes."),
        "hostPath": _text("Folder of the copy on the nodes' disks."),
        "volume": {
            "type": "object",
            "description": "Volume for pods of this namespace, which has the copy at `subPath`.",
            "x-kubernetes-preserve-unknown-fields": True,
        },
        "subPath": _text("Path of the copy in the volume, for volumeMounts of pods."),
        "nodeAffinity": {
            "type": "object",
            "description": "`affinity.nodeAffinity` for pods, which places them on nodes with a complete copy.",
            "x-kubernetes-preserve-unknown-fields": True,
        },
        "lastUsed": _text("When a pod or a workload last used the dataset.", format="date-time"),
        "observedGeneration": _number("Generation of the spec that this status describes."),
        "nodes": {"type": "object", "description": "Copies by the name of the node.", "additionalProperties": _NODE},
        "conditions": {"type": "array", "description": "Condition Ready, for `kubectl wait`.", "items": _CONDITION},
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
                        "A dataset that is copied from a bucket to the disks of nodes.",
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
"""Uses apiextensions.k8s.io/v1 without CEL validation, so that every Kubernetes from 1.16 on accepts it."""
