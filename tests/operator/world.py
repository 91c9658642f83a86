"""A cluster in memory that plans are carried out in, step by step, with all that can go wrong between two of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from voxlane.kube.names import node_key, use_label
from voxlane.operator import plan as plans
from voxlane.operator.pods import copier, remover
from voxlane.operator.resource import (
    FINALIZER,
    OF,
    REVISION,
    ROLE,
    Dataset,
    Node,
    Rules,
    User,
    read_dataset,
    read_pod,
    read_users,
    rfc3339,
)

RULES = Rules(image="img", namespace="sys")
START = 1_800_000_000.0


@dataclass
class World:
    """Nodes, datasets (as the API has them), pods, and what lies on nodes' disks."""

    rules: Rules = RULES
    now: float = START
    nodes: dict[str, Node] = field(default_factory=dict)
    datasets: dict[str, dict[str, Any]] = field(default_factory=dict)
    pods: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    disks: dict[str, dict[str, int]] = field(default_factory=dict)
    """Bytes of each copy, by node and key; below the whole: a part."""
    revisions: dict[tuple[str, str], str] = field(default_factory=dict)
    """Of what lies on a disk, by node and key."""
    room: dict[str, int] = field(default_factory=dict)
    """Bytes that a node's disk takes."""
    sizes: dict[str, int] = field(default_factory=dict)
    events: list[tuple[str, str, str]] = field(default_factory=list)
    copied: int = 0
    """Bytes that left the bucket."""

    # -- what people do ------------------------------------------------------------------------------------------------

    def node(self, *names: str, **said: Any) -> None:
        for name in names:
            self.nodes[name] = Node(
                name=name, uid=f"{name}-{self.now}-{len(self.events)}-{self.copied}", since=self.now, **said
            )
            self.disks[name] = {}
            self.revisions = {(node, key): rev for (node, key), rev in self.revisions.items() if node != name}

    def change(self, name: str, **said: Any) -> None:
        self.nodes[name] = replace(self.nodes[name], **said)

    def ready(self, name: str, ready: bool) -> None:
        self.change(name, ready=ready, since=self.now)

    def create(self, name: str, size: int = 100, **spec: Any) -> None:
        self.sizes[node_key("ns", name)] = size
        meta = {"namespace": "ns", "name": name, "uid": f"u-{name}", "generation": 1, "finalizers": []}
        meta["creationTimestamp"] = rfc3339(self.now)
        self.datasets[name] = {"metadata": meta, "spec": {"source": f"gs://b/{name}", **spec}, "status": {}}

    def edit(self, name: str, **spec: Any) -> None:
        self.datasets[name]["spec"].update(spec)
        self.datasets[name]["metadata"]["generation"] += 1

    def restage(self, name: str, value: str) -> None:
        self.datasets[name]["metadata"]["annotations"] = {"voxlane.dev/restage": value}

    def delete(self, name: str) -> None:
        meta = self.datasets[name]["metadata"]
        if meta["finalizers"]:
            meta["deletionTimestamp"] = rfc3339(self.now)
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

    # -- what the operator does ----------------------------------------------------------------------------------------

    def read(self, name: str) -> Dataset:
        return read_dataset(self.datasets[name], self.rules)

    def users(self, dataset: Dataset) -> list[User]:
        return read_users(list(self.pods.values()), dataset.host_path, use_label(dataset.name))

    def plan(self, name: str) -> plans.Plan:
        dataset = self.read(name)
        mine = [read_pod(p) for p in self.pods.values() if (p["metadata"]["labels"]).get(OF) == dataset.key]
        others = [plans.Other(d, bool(self.users(d))) for n in self.datasets if n != name for d in [self.read(n)]]
        return plans.plan(dataset, self.nodes, mine, self.users(dataset), others, self.now, self.rules)

    def step(self, name: str, *, only: int | None = None) -> plans.Plan:
        """One pass over a dataset; `only` so many of its actions, then the operator is killed."""
        planned = self.plan(name)
        for action in planned.actions[:only]:
            self._do(name, action)
        return planned

    def _do(self, name: str, action: plans.Action) -> None:
        said = self.datasets[name]
        dataset = self.read(name)
        match action:
            case plans.SetFinalizer(on):
                said["metadata"]["finalizers"] = [FINALIZER] if on else []
                if not on and "deletionTimestamp" in said["metadata"]:
                    del self.datasets[name]
            case plans.Label(node, on):
                labels = {k: v for k, v in self.nodes[node].labels.items() if k != dataset.label}
                self.change(node, labels={**labels, **({dataset.label: "ready"} if on else {})})
                assert not on or self.disks[node].get(dataset.key) == self.sizes[dataset.key], (
                    "a label that is not true"
                )
                assert not on or self.revisions.get((node, dataset.key)) in (None, dataset.revision)
            case plans.StartCopy(node):
                there = self.revisions.get((node, dataset.key), dataset.revision)
                busy = [u for u in self.users(dataset) if u.node == node]
                assert there == dataset.revision or not busy, "data is replaced under a pod"
                assert there == dataset.revision or dataset.label not in self.nodes[node].labels
                self._create(copier(dataset, action))
            case plans.StartRemoval(node):
                busy = [u for u in self.users(dataset) if u.node == node]
                assert not busy, "data is removed under a pod"
                assert dataset.label not in self.nodes[node].labels
                self._create(remover(dataset, action, self.rules))
            case plans.StopPod(namespace, pod):
                self.pods.pop((namespace, pod), None)
            case plans.Evict(_, other, node, message):
                entry = {"phase": "Removing", "reason": "Evicted", "message": message, "since": rfc3339(self.now)}
                self.datasets[other]["status"]["nodes"][node].update(entry)
            case plans.Patch(changes):
                merge(said["status"], json.loads(json.dumps(changes)))
            case plans.Tell(_, reason, message):
                self.events.append((name, reason, message))

    def _create(self, pod: dict[str, Any]) -> None:
        meta = pod["metadata"]
        assert (meta["namespace"], meta["name"]) not in self.pods
        meta["creationTimestamp"] = rfc3339(self.now)
        self.pods[meta["namespace"], meta["name"]] = {"kind": "Pod", **pod, "status": {"phase": "Pending"}}

    # -- what the cluster does -----------------------------------------------------------------------------------------

    def ours(self) -> list[dict[str, Any]]:
        """Pods of the operator's that have not ended."""
        return [
            p
            for p in self.pods.values()
            if ROLE in p["metadata"]["labels"] and p["status"]["phase"] in ("Pending", "Running")
        ]

    def run_pods(self, fault: Callable[[dict[str, Any]], dict[str, Any] | None] = lambda _: None) -> None:
        """Those on ready nodes run to their end; `fault` may give the last words of one that fails."""
        for pod in self.ours():
            node = pod["metadata"]["annotations"]["voxlane.dev/node"]
            if node not in self.nodes or not self.nodes[node].ready:
                continue
            key, disk = pod["metadata"]["labels"][OF], self.disks[node]
            words = fault(pod)
            if words is None and pod["metadata"]["labels"][ROLE] == "remove":
                disk.pop(key, None)
                self.revisions.pop((node, key), None)
                words = {"bytes": 0}
            elif words is None:
                total = self.sizes[key]
                lacking = total - disk.get(key, 0) - self.room.get(node, 1 << 60) + sum(disk.values())
                if lacking > 0:
                    words = {"reason": "NoRoom", "message": "no", "lackingBytes": lacking}
                else:
                    self.copied += total - disk.get(key, 0)
                    disk[key] = total
                    self.revisions[node, key] = pod["metadata"]["annotations"][REVISION]
                    words = {"bytes": total, "totalBytes": total, "objects": 1, "totalObjects": 1, "version": "v"}
            ended = {"exitCode": 1 if "reason" in words else 0, "message": json.dumps(words)}
            phase = "Failed" if "reason" in words else "Succeeded"
            pod["status"] = {"phase": phase, "containerStatuses": [{"state": {"terminated": ended}}]}

    def settle(self, *, patience_s: float = 60.0, rounds: int = 120) -> None:
        """Everything goes on until nothing has happened for `patience_s`."""
        quiet_s = 0.0
        while rounds and quiet_s < patience_s:
            planned = [self.step(name) for name in list(self.datasets) if name in self.datasets]
            running = bool(self.ours())
            self.run_pods()
            pause = min([p.again_s for p in planned if p.again_s is not None], default=patience_s) + 0.01
            if any(a for p in planned for a in p.actions if not _just_used(a)) or running:
                rounds, quiet_s, pause = rounds - 1, 0.0, 1.0
            quiet_s += pause
            self.now += pause
        assert rounds, "it does not settle"

    # -- what one sees -------------------------------------------------------------------------------------------------

    def status(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.datasets[name]["status"]
        return found

    def phase(self, name: str) -> str:
        return str(self.status(name).get("phase"))

    def on(self, name: str) -> list[str]:
        """Nodes whose label says that they hold it."""
        label = f"staged.voxlane.dev/{node_key('ns', name)}"
        return sorted(n for n, node in self.nodes.items() if node.labels.get(label) == "ready")


def _just_used(action: plans.Action) -> bool:
    """What goes on for as long as somebody uses a dataset."""
    return isinstance(action, plans.Patch) and set(action.changes) == {"lastUsed"}


def merge(into: dict[str, Any], changes: dict[str, Any]) -> None:
    """RFC 7386, as the API server does it."""
    for key, value in changes.items():
        if value is None:
            into.pop(key, None)
        elif isinstance(value, dict):
            inner = into.setdefault(key, {})
            merge(inner, value)
        else:
            into[key] = value
