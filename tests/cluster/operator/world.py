"""Simulate a cluster in which plans are executed step by step, with failures between any two steps."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from voxlane.cluster.kubernetes.names import node_key, use_label
from voxlane.cluster.kubernetes.operator import plan as plans
from voxlane.cluster.kubernetes.operator.manifests import build_pod
from voxlane.cluster.kubernetes.operator.resource import (
    DATASET_LABEL,
    FINALIZER,
    REVISION_ANNOTATION,
    ROLE_LABEL,
    ClusterNode,
    DatasetUser,
    OperatorConfig,
    StagedDataset,
    format_time,
    read_dataset,
    read_pod,
    read_users,
)

CONFIG = OperatorConfig(image="img", own_namespace="sys")
START = 1_800_000_000.0


@dataclass
class World:
    """Nodes, API objects of datasets and pods, and the contents of the nodes' disks."""

    config: OperatorConfig = CONFIG
    now: float = START
    nodes: dict[str, ClusterNode] = field(default_factory=dict)
    datasets: dict[str, dict[str, Any]] = field(default_factory=dict)
    pods: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    disks: dict[str, dict[str, int]] = field(default_factory=dict)
    """Bytes of each copy by node and key; fewer than the size of the dataset if it is incomplete."""
    revisions: dict[tuple[str, str], str] = field(default_factory=dict)
    """Revision of each copy on a disk, by node and key."""
    capacity: dict[str, int] = field(default_factory=dict)
    """Capacity of each node's disk in bytes."""
    sizes: dict[str, int] = field(default_factory=dict)
    events: list[tuple[str, str, str]] = field(default_factory=list)
    copied: int = 0
    """Number of bytes read from the bucket."""

    # -- actions of people ---------------------------------------------------------------------------------------------

    def node(self, *names: str, **fields: Any) -> None:
        for name in names:
            self.nodes[name] = ClusterNode(
                name=name,
                uid=f"{name}-{self.now}-{len(self.events)}-{self.copied}",
                ready_changed_at=self.now,
                **fields,
            )
            self.disks[name] = {}
            self.revisions = {(node, key): rev for (node, key), rev in self.revisions.items() if node != name}

    def change(self, name: str, **fields: Any) -> None:
        self.nodes[name] = replace(self.nodes[name], **fields)

    def ready(self, name: str, ready: bool) -> None:
        self.change(name, ready=ready, ready_changed_at=self.now)

    def create(self, name: str, size: int = 100, **spec: Any) -> None:
        self.sizes[node_key("ns", name)] = size
        meta = {"namespace": "ns", "name": name, "uid": f"u-{name}", "generation": 1, "finalizers": []}
        meta["creationTimestamp"] = format_time(self.now)
        self.datasets[name] = {"metadata": meta, "spec": {"source": f"gs://b/{name}", **spec}, "status": {}}

    def edit(self, name: str, **spec: Any) -> None:
        self.datasets[name]["spec"].update(spec)
        self.datasets[name]["metadata"]["generation"] += 1

    def restage(self, name: str, value: str) -> None:
        self.datasets[name]["metadata"]["annotations"] = {"voxlane.dev/restage": value}

    def delete(self, name: str) -> None:
        meta = self.datasets[name]["metadata"]
        if meta["finalizers"]:
            meta["deletionTimestamp"] = format_time(self.now)
        else:
            del self.datasets[name]

    def use(self, dataset: str, pod: str, node: str = "", kind: str = "Pod") -> None:
        meta = {"namespace": "ns", "name": pod, "labels": {use_label(dataset): "true"}}
        self.pods["ns", pod] = {
            "kind": kind,
            "metadata": meta,
            "spec": {"nodeName": node},
            "status": {"phase": "Running"},
        }

    def end(self, pod: str) -> None:
        del self.pods["ns", pod]

    # -- actions of the operator ---------------------------------------------------------------------------------------

    def read(self, name: str) -> StagedDataset:
        return read_dataset(self.datasets[name], self.config)

    def users(self, dataset: StagedDataset) -> list[DatasetUser]:
        return read_users(list(self.pods.values()), dataset, use_label(dataset.name))

    def plan(self, name: str) -> plans.DatasetPlan:
        dataset = self.read(name)
        pods = [read_pod(p) for p in self.pods.values() if (p["metadata"]["labels"]).get(DATASET_LABEL) == dataset.key]
        others = [self.read(other) for other in self.datasets if other != name]
        evictable = [other for other in others if not self.users(other)]
        planner = plans.DatasetPlanner(
            dataset, self.nodes, pods, self.users(dataset), others, evictable, self.now, self.config
        )
        return planner.plan()

    def step(self, name: str, *, only: int | None = None) -> plans.DatasetPlan:
        """Plan a dataset and execute its actions, or only the first `only` of them, as if the operator was killed."""
        planned = self.plan(name)
        for action in planned.actions[:only]:
            self._execute(name, action)
        return planned

    def _execute(self, name: str, action: plans.Action) -> None:
        resource = self.datasets[name]
        dataset = self.read(name)
        match action:
            case plans.SetFinalizer(present):
                resource["metadata"]["finalizers"] = [FINALIZER] if present else []
                if not present and "deletionTimestamp" in resource["metadata"]:
                    del self.datasets[name]
            case plans.SetNodeLabel(node, present):
                labels = {k: v for k, v in self.nodes[node].labels.items() if k != dataset.label}
                self.change(node, labels={**labels, **({dataset.label: "ready"} if present else {})})
                assert not present or self.disks[node].get(dataset.key) == self.sizes[dataset.key], (
                    "a node without a complete copy is labelled"
                )
                assert not present or self.revisions.get((node, dataset.key)) in (None, dataset.revision)
            case plans.StartPod("prepare"):
                self._create(build_pod(dataset, action, self.config))
            case plans.StartPod("copy", node):
                prepared = [p for p in self.pods.values() if p["metadata"]["labels"].get(ROLE_LABEL) == "prepare"]
                assert any(p["status"]["phase"] == "Succeeded" for p in prepared), "no folder was made for the copy"
                revision = self.revisions.get((node, dataset.key), dataset.revision)
                busy = [u for u in self.users(dataset) if u.node == node]
                assert revision == dataset.revision or not busy, "data is replaced under a pod"
                assert revision == dataset.revision or dataset.label not in self.nodes[node].labels
                self._create(build_pod(dataset, action, self.config))
            case plans.StartPod("remove", node):
                busy = [u for u in self.users(dataset) if u.node == node]
                assert not busy, "data is removed under a pod"
                assert dataset.label not in self.nodes[node].labels
                self._create(build_pod(dataset, action, self.config))
            case plans.DeletePod(namespace, pod):
                self.pods.pop((namespace, pod), None)
            case plans.EvictCopy(_, other, node, message):
                entry = {"phase": "Removing", "reason": "Evicted", "message": message, "since": format_time(self.now)}
                self.datasets[other]["status"]["nodes"][node].update(entry)
            case plans.PatchStatus(changes):
                merge(resource["status"], json.loads(json.dumps(changes)))
            case plans.RecordEvent(_, reason, message):
                self.events.append((name, reason, message))

    def _create(self, pod: dict[str, Any]) -> None:
        meta = pod["metadata"]
        assert (meta["namespace"], meta["name"]) not in self.pods
        meta["creationTimestamp"] = format_time(self.now)
        self.pods[meta["namespace"], meta["name"]] = {"kind": "Pod", **pod, "status": {"phase": "Pending"}}

    # -- actions of the cluster ----------------------------------------------------------------------------------------

    def agent_pods(self) -> list[dict[str, Any]]:
        """Return the agent pods that have not ended."""
        return [
            p
            for p in self.pods.values()
            if ROLE_LABEL in p["metadata"]["labels"] and p["status"]["phase"] in ("Pending", "Running")
        ]

    def run_pods(self, fault: Callable[[dict[str, Any]], dict[str, Any] | None] = lambda _: None) -> None:
        """Run the agent pods on ready nodes to their end; `fault` may return the result of a pod that fails."""
        for pod in self.agent_pods():
            node = pod["metadata"]["annotations"]["voxlane.dev/node"]
            if node not in self.nodes or not self.nodes[node].ready:
                continue
            key, disk = pod["metadata"]["labels"][DATASET_LABEL], self.disks[node]
            result = fault(pod)
            if result is None and pod["metadata"]["labels"][ROLE_LABEL] == "remove":
                disk.pop(key, None)
                self.revisions.pop((node, key), None)
                result = {"bytes": 0}
            elif result is None and pod["metadata"]["labels"][ROLE_LABEL] == "prepare":
                result = {}
            elif result is None:
                total = self.sizes[key]
                lacking = total - disk.get(key, 0) - self.capacity.get(node, 1 << 60) + sum(disk.values())
                if lacking > 0:
                    result = {"reason": "NoRoom", "message": "no", "lackingBytes": lacking}
                else:
                    self.copied += total - disk.get(key, 0)
                    disk[key] = total
                    self.revisions[node, key] = pod["metadata"]["annotations"][REVISION_ANNOTATION]
                    result = {"bytes": total, "totalBytes": total, "objects": 1, "totalObjects": 1, "version": "v"}
            ended = {"exitCode": 1 if "reason" in result else 0, "message": json.dumps(result)}
            phase = "Failed" if "reason" in result else "Succeeded"
            pod["status"] = {"phase": phase, "containerStatuses": [{"state": {"terminated": ended}}]}

    def start_copiers(self, name: str) -> None:
        """Run the operator and the pods until the copiers of a dataset have started."""
        self.step(name)
        self.run_pods()
        self.step(name)

    def settle(self, *, patience_s: float = 60.0, rounds: int = 120) -> None:
        """Run the operator and the pods until nothing has happened for `patience_s`."""
        quiet_s = 0.0
        while rounds and quiet_s < patience_s:
            planned = [self.step(name) for name in list(self.datasets) if name in self.datasets]
            running = bool(self.agent_pods())
            self.run_pods()
            pause = min([p.retry_after_s for p in planned if p.retry_after_s is not None], default=patience_s) + 0.01
            if any(a for p in planned for a in p.actions if not _only_records_use(a)) or running:
                rounds, quiet_s, pause = rounds - 1, 0.0, 1.0
            quiet_s += pause
            self.now += pause
        assert rounds, "the cluster does not settle"

    # -- observations --------------------------------------------------------------------------------------------------

    def status(self, name: str) -> dict[str, Any]:
        status: dict[str, Any] = self.datasets[name]["status"]
        return status

    def phase(self, name: str) -> str:
        return str(self.status(name).get("phase"))

    def labelled(self, name: str) -> list[str]:
        """Return the nodes that are labelled as holding a dataset."""
        label = f"staged.voxlane.dev/{node_key('ns', name)}"
        return sorted(n for n, node in self.nodes.items() if node.labels.get(label) == "ready")


def _only_records_use(action: plans.Action) -> bool:
    """Return whether an action only updates the time of the last use, which repeats while a dataset is in use."""
    return isinstance(action, plans.PatchStatus) and set(action.changes) == {"lastUsed"}


def merge(target: dict[str, Any], changes: dict[str, Any]) -> None:
    """Apply a merge patch (RFC 7386) like the API server."""
    for key, value in changes.items():
        if value is None:
            target.pop(key, None)
        elif isinstance(value, dict):
            nested = target.setdefault(key, {})
            merge(nested, value)
        else:
            target[key] = value
