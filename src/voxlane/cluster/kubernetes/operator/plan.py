"""Plan the next actions for one StagedDataset. Planning is pure: it maps the state of the cluster to actions.

Every pass starts from the current state, so an operator that was killed between two actions continues where it stopped.
The order of actions makes that safe:

    prepare  a pod of the operator's namespace makes the folder of the dataset's namespace -> a copier may start
    copy     pod succeeds -> node is labelled -> copy is Ready -> pod is deleted
    restage  label is removed -> copy is Waiting -> settle time -> no pod on the node uses it -> copy as above
    remove   copy is Removing -> label is removed -> settle time -> no pod on the node uses it -> a pod removes it
             -> entry is deleted
    delete   no users are left -> every copy is removed -> finalizer is removed

So a Ready copy always has its label. A node that lost the label (it was recreated, perhaps with an empty disk) is
copied to again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from voxlane.cluster.kubernetes.operator.resource import (
    FINALIZER,
    OVER_QUOTA,
    STALE,
    AgentPod,
    ClusterNode,
    DatasetSpec,
    DatasetUser,
    NodeCopy,
    OperatorConfig,
    StagedDataset,
)
from voxlane.cluster.kubernetes.operator.status import (
    build_merge_patch,
    build_status,
    join_names,
    matches_selector,
    summarize,
)
from voxlane.sizes import format_bytes

_MAX_PAUSE_S = 600.0
_MAX_FAILURES = 3
"""Failures on a node before another node is tried."""
_CHECK_USERS_S = 3.0
"""How often to check who uses a dataset while something waits for its users, which are not watched."""
_NODE_INDEPENDENT_FAILURES = ("Source", "TooLarge", "Timeout", "Changed")
"""Failures that would happen on any other node as well."""
_QUIET_PHASES = ("Ready", "Evicted", "Staging", "Deleting")
"""Phases whose events are no warnings."""


# -- actions -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SetFinalizer:
    """Add the finalizer of the operator to the dataset, or remove it."""

    present: bool


@dataclass(frozen=True)
class SetNodeLabel:
    """Label a node as holding a complete copy, or remove the label."""

    node: str
    present: bool


@dataclass(frozen=True)
class StartPod:
    """Start the pod that makes the folder for a copy on a node, copies the dataset there, or removes the copy."""

    role: Literal["prepare", "copy", "remove"]
    node: str
    node_uid: str
    attempt: int


@dataclass(frozen=True)
class DeletePod:
    """Delete an agent pod."""

    namespace: str
    name: str


@dataclass(frozen=True)
class EvictCopy:
    """Remove the copy of another dataset from a node."""

    namespace: str
    name: str
    node: str
    message: str


@dataclass(frozen=True)
class PatchStatus:
    """Merge changes into the status of the dataset; null removes a field."""

    changes: Mapping[str, Any]


@dataclass(frozen=True)
class RecordEvent:
    """Create an Event about the dataset."""

    warning: bool
    reason: str
    message: str


Action = SetFinalizer | SetNodeLabel | StartPod | DeletePod | EvictCopy | PatchStatus | RecordEvent


@dataclass(frozen=True)
class DatasetPlan:
    """Actions in the order in which to execute them; if one fails, the following must not be executed."""

    actions: list[Action]
    retry_after_s: float | None
    """When to plan again even if nothing changes; None means only after a change."""


# -- one pass ----------------------------------------------------------------------------------------------------------


@dataclass
class DatasetPlanner:
    """Plans the next actions for one dataset; call `plan` once."""

    dataset: StagedDataset
    nodes: Mapping[str, ClusterNode]
    pods: Sequence[AgentPod]
    """Agent pods of the dataset."""
    users: Sequence[DatasetUser]
    """Users of the dataset, including pods of any namespace that mount its folder."""
    others: Sequence[StagedDataset]
    """Other datasets, whose copies may share disks with this one."""
    evictable: Sequence[StagedDataset]
    """Other datasets that nothing uses, whose copies may be removed to make room."""
    now: float
    """Current time in seconds since 1970."""
    config: OperatorConfig
    copies: dict[str, NodeCopy] = field(default_factory=dict)
    """Planned copies by node."""
    before: list[Action] = field(default_factory=list)
    """Actions before the status is written, so that the status is true once it is written."""
    after: list[Action] = field(default_factory=list)
    """Actions after the status is written, so that the status mentions them before they begin."""
    due: list[float] = field(default_factory=list)
    """Times at which to plan again."""

    def plan(self) -> DatasetPlan:
        """Return the next actions."""
        dataset = self.dataset
        if dataset.deleting and FINALIZER not in dataset.finalizers:
            return DatasetPlan([], None)
        # A pod reports about the machine it ran on, not about a new machine of the same name.
        for pod in self.pods:
            if pod.node in self.nodes and pod.node_uid != self.nodes[pod.node].uid:
                self._delete_pod(pod)
        if self.before:
            return DatasetPlan(self.before, 0.5)
        self.copies = dict(dataset.copies)
        if dataset.deleting and not self.users:
            return self._plan_deletion()
        if dataset.spec is None:
            return self._finish("Deleting" if dataset.deleting else "Failed", dataset.problem, 0)
        return self._plan_copies(dataset.spec)

    def _plan_copies(self, spec: DatasetSpec) -> DatasetPlan:
        dataset = self.dataset
        if FINALIZER not in dataset.finalizers:
            self.before.append(SetFinalizer(present=True))
        if dataset.status.get("observedGeneration") != dataset.generation:
            for name, copy in self.copies.items():
                if copy.phase in ("Failed", "NoRoom"):  # the spec has changed since the failure: retry at once
                    self._set(name, retry_at=0.0, reason="")
        self._apply_removal_pods()
        for pod in self.pods:
            if pod.role == "copy":
                self._apply_copy_pod(pod, spec)
        for pod in self.pods:
            if pod.role == "prepare":
                self._apply_preparation(pod, spec)
        for name, copy in list(self.copies.items()):
            self._check_node(name, copy)
        chosen, count = self._choose_nodes(spec)
        for node in chosen:
            self._advance_copy(node)
        for node in [node for node in self.copies if node not in chosen]:
            self._release_node(node, count)
        phase, message = summarize(dataset, spec, self.nodes, self.copies, chosen, count)
        if dataset.deleting:
            self.due.append(self.now + _CHECK_USERS_S)
            # Workloads before pods, which often belong to them.
            users = sorted((user.title for user in self.users), key=lambda title: (title.startswith("Pod "), title))
            return self._finish("Deleting", f"waiting for {join_names(users)} to finish", count)
        return self._finish(phase, message, count)

    # -- deletion ------------------------------------------------------------------------------------------------------

    def _plan_deletion(self) -> DatasetPlan:
        """Remove all copies of a dataset that nothing uses any more."""
        dataset = self.dataset
        if dataset.copies and not dataset.root:
            return self._finish("Deleting", f"cannot remove the copies: {dataset.problem}", 0)
        self._apply_removal_pods()
        for name, node in self.nodes.items():
            if dataset.label in node.labels and name not in self.copies:
                self.copies[name] = self._new_copy("Removing")
        for name, copy in list(self.copies.items()):
            if copy.phase == "Evicted" or name not in self.nodes:
                del self.copies[name]
                continue
            if copy.phase != "Removing":
                # The message of an earlier failure does not describe the removal.
                self._set(name, phase="Removing", reason="", message="", attempts=0, retry_at=0.0)
            elif copy.reason:
                self._set(name, reason="", attempts=0, retry_at=0.0)
            self._advance_removal(name)
        if not self.copies:
            for pod in self.pods:
                self._delete_pod(pod, late=True)
            self.after.append(SetFinalizer(present=False))
            return DatasetPlan(self._order_actions(), None)
        return self._finish("Deleting", self._describe_deletion(), len(self.copies))

    def _describe_deletion(self) -> str:
        unresponsive = sorted(name for name in self.copies if not self.nodes[name].ready)
        if unresponsive:
            return f"waiting for {join_names(unresponsive)} to respond, to remove the copy there"
        messages = sorted((name, copy.message) for name, copy in self.copies.items() if copy.message)
        if messages:
            return f"{messages[0][0]}: {messages[0][1]}"
        return f"removing copies from {join_names(sorted(self.copies))}"

    # -- results of pods -----------------------------------------------------------------------------------------------

    def _apply_copy_pod(self, pod: AgentPod, spec: DatasetSpec) -> None:
        """Record the result of a copier, or delete it if it is obsolete."""
        copy = self.copies.get(pod.node)
        is_stale = pod.revision != self.dataset.revision
        if is_stale and copy is not None and pod.phase == "Succeeded" and copy.phase != "Ready":
            # The copy is of no use, but it occupies the disk.
            self._set(pod.node, **pod.counts)
        if is_stale or copy is None or copy.phase in ("Removing", "Evicted", "Lost") or pod.attempt < copy.attempts - 1:
            self._delete_pod(pod)
        elif pod.attempt == copy.attempts - 1 or pod.terminating:
            pass  # its failure is recorded already; the pod is kept for its log until the next attempt
        elif pod.phase == "Succeeded":
            self._complete_copy(pod, copy)
        elif pod.phase == "Failed":
            self._fail_copy(pod, spec)
        elif self.now - pod.since > spec.timeout_s:
            self._fail_copy(replace(pod, reason="Timeout"), spec)
            self._delete_pod(pod)
        elif copy.phase != "Ready":
            self.due.append(pod.since + spec.timeout_s + 1)
            self._track_copy(pod, copy)

    def _apply_preparation(self, pod: AgentPod, spec: DatasetSpec) -> None:
        """Record why the folder for a copy cannot be made, or delete a pod whose attempt is over."""
        copy = self.copies.get(pod.node)
        if copy is None or copy.phase not in ("Waiting", "Copying", "Failed", "NoRoom"):
            self._delete_pod(pod, late=True)
        elif pod.attempt < copy.attempts or copy.phase in ("Failed", "NoRoom"):
            pass  # its failure is recorded already; the pod is kept for its log until the next attempt
        elif pod.phase == "Failed":
            self._fail_copy(pod, spec)
        elif pod.phase != "Succeeded" and self.now - pod.since > spec.timeout_s:
            self._fail_copy(replace(pod, reason="Timeout"), spec)
            self._delete_pod(pod)
        elif pod.phase != "Succeeded":
            self.due.append(pod.since + spec.timeout_s + 1)
            if pod.problem != copy.message:
                self._set(pod.node, message=pod.problem)

    def _track_copy(self, pod: AgentPod, copy: NodeCopy) -> None:
        """Record whether a copier is waiting or copying."""
        phase = "Copying" if pod.phase == "Running" else "Waiting"
        # A running copier writes its own messages.
        own_message = copy.message if copy.phase == phase else ""
        message = pod.problem if phase == "Waiting" else own_message
        if (copy.phase, copy.message) != (phase, message):
            self._set(pod.node, phase=phase, message=message, reason="")

    def _complete_copy(self, pod: AgentPod, copy: NodeCopy) -> None:
        node = self.nodes.get(pod.node)
        if node is None:
            return
        if node.labels.get(self.dataset.label) != "ready":
            self.before.append(SetNodeLabel(pod.node, present=True))
        if copy.phase != "Ready" or copy.revision != pod.revision:
            failure = {"attempts": 0, "retry_at": 0.0, "reason": "", "message": "", "lacking_bytes": 0}
            self._set(pod.node, **{**failure, **pod.counts}, phase="Ready", revision=pod.revision)
        self._delete_pod(pod, late=True)

    def _fail_copy(self, pod: AgentPod, spec: DatasetSpec) -> None:
        message = self._describe_failure(pod, spec)
        self.before.append(RecordEvent(True, "CopyFailed", f"{pod.node}: {message}"))
        self._set(
            pod.node,
            **{"lacking_bytes": 0, **pod.counts},
            phase="NoRoom" if pod.reason in ("NoRoom", OVER_QUOTA) else "Failed",
            reason=pod.reason,
            message=message,
            attempts=pod.attempt + 1,
            retry_at=self.now + compute_pause(self.config, pod.attempt),
        )

    def _describe_failure(self, pod: AgentPod, spec: DatasetSpec) -> str:
        if pod.reason == "Timeout":
            limit = _format_timeout(spec.timeout_s)
            if pod.phase != "Pending":
                return f"the copy took longer than the timeout of {limit}; raise the timeout to retry"
            problem = f" ({pod.problem})" if pod.problem else ""
            return f"the copy did not start within the timeout of {limit}{problem}; raise the timeout to retry"
        if pod.reason == "NoRoom" and pod.counts.get("lacking_bytes"):
            return f"the disk lacks {format_bytes(pod.counts['lacking_bytes'])} below {self.dataset.root}"
        return pod.problem or "the copier failed"

    def _apply_removal_pods(self) -> None:
        """Record the results of the pods that remove copies."""
        for pod in [pod for pod in self.pods if pod.role == "remove"]:
            copy = self.copies.get(pod.node)
            if copy is None or copy.phase != "Removing" or pod.attempt < copy.attempts:
                self._delete_pod(pod)
            elif pod.phase == "Succeeded":
                if copy.reason:
                    self._set(pod.node, phase=copy.reason, reason="", bytes=0, objects=0, attempts=0, version="")
                else:
                    del self.copies[pod.node]
                self._delete_pod(pod, late=True)
            elif pod.phase == "Failed":
                self._set(
                    pod.node,
                    message=f"cannot remove the copy: {pod.problem}",
                    attempts=pod.attempt + 1,
                    retry_at=self.now + compute_pause(self.config, pod.attempt),
                )
                self._delete_pod(pod, late=True)

    # -- state of nodes ------------------------------------------------------------------------------------------------

    def _check_node(self, name: str, copy: NodeCopy) -> None:
        """Update a copy whose node is gone, lost, back, or holds another revision."""
        node = self.nodes.get(name)
        if node is None:
            del self.copies[name]
        elif not node.ready:
            lost_at = node.ready_changed_at + self.config.lost_after_s
            if copy.phase not in ("Ready", "Copying", "Waiting"):
                return
            if self.now < lost_at:
                self.due.append(lost_at)
                return
            self._remove_label(node)
            self._set(name, phase="Lost", message="the node does not respond")
            for pod in self._pods_on(name):
                self._delete_pod(pod)
        elif copy.phase == "Lost":
            self._set(name, phase="Waiting", message="", attempts=0)
        elif copy.phase == "Ready":
            is_stale = copy.revision != self.dataset.revision
            has_label = node.labels.get(self.dataset.label) == "ready" or SetNodeLabel(name, True) in self.before
            if is_stale:
                self._remove_label(node)
            if is_stale or not has_label:
                self._set(name, phase="Waiting", attempts=0, reason=STALE if is_stale else "")

    # -- choice of nodes -----------------------------------------------------------------------------------------------

    def _choose_nodes(self, spec: DatasetSpec) -> tuple[list[str], int]:
        """Return the nodes that shall hold a copy, and how many there should be."""
        candidates = [node for node in self.nodes.values() if matches_selector(node, spec)]
        desired = len(candidates) if spec.replicas is None else spec.replicas
        evicted = {name for name, copy in self.copies.items() if "Evicted" in (copy.phase, copy.reason)}
        limit = desired
        if evicted and not self.users:
            # An evicted copy is not staged again before something uses it: it would only evict another one.
            self.due.append(self.now + _CHECK_USERS_S)
            candidates = [node for node in candidates if node.name not in evicted]
            limit = max(0, desired - len(evicted))
        used_nodes = {user.node for user in self.users}
        occupied: Counter[str] = Counter()  # bytes of other datasets by node
        for other in self.others:
            occupied.update({name: copy.total_bytes or 1 for name, copy in other.copies.items()})
        ranked = []
        for node in candidates:
            rank = self._rank_node(node)
            if rank is not None:
                copy = self.copies.get(node.name)
                retry_at = copy.retry_at if copy and rank >= 6 else 0.0
                present = copy.bytes if copy else 0
                is_unused = node.name not in used_nodes
                ranked.append((rank, retry_at, is_unused, -present, occupied[node.name], node.name))
        return [name for *_, name in sorted(ranked)[:limit]], desired

    def _rank_node(self, node: ClusterNode) -> int | None:
        """Return the rank of a node, lowest first; None if it cannot take a copy."""
        copy = self.copies.get(node.name)
        phase = copy.phase if copy is not None else None
        if phase == "Ready":
            return 0  # even if the node is cordoned, or briefly not ready
        if phase in ("Lost", "Removing"):
            return None
        if not node.ready:  # only briefly, or the copy would be lost
            return None if copy is None else 2 if phase in ("Copying", "Waiting") else 6
        if copy is not None and phase in ("Copying", "Waiting"):
            return 1 if copy.bytes else 2
        if not node.schedulable:
            return None
        if copy is None or phase == "Evicted":
            return 4 if node.labels.get(self.dataset.label) == "ready" else 5
        if phase == "NoRoom":
            is_making_room = copy.reason == "Evicting" or self._list_departing(node.name)
            return 3 if is_making_room or self._choose_evictions(node.name, copy.lacking_bytes) else 7
        return 3 if copy.reason in _NODE_INDEPENDENT_FAILURES or copy.attempts < _MAX_FAILURES else 6

    # -- disk space ----------------------------------------------------------------------------------------------------

    def _list_departing(self, node: str) -> list[str]:
        """Return the titles of datasets whose copies are being removed from a node."""
        copies = ((other.title, other.copies.get(node)) for other in self.others)
        return [title for title, copy in copies if copy is not None and copy.phase == "Removing"]

    def _choose_evictions(self, node: str, lacking_bytes: int) -> list[StagedDataset]:
        """Return the least recently used datasets that free enough space; none if all together are not enough."""
        chosen: list[StagedDataset] = []
        is_over_quota = node in self.copies and self.copies[node].reason == OVER_QUOTA
        for dataset in sorted(self.evictable, key=lambda d: (d.last_used, d.title)):
            copy = dataset.copies.get(node)
            is_allowed = not dataset.keep and not dataset.deleting and dataset.data_path == self.dataset.data_path
            # What other namespaces store does not count towards the quota of this one.
            is_allowed &= not is_over_quota or dataset.namespace == self.dataset.namespace
            if is_allowed and copy is not None and copy.phase == "Ready":
                chosen.append(dataset)
                lacking_bytes -= copy.bytes or copy.total_bytes
                if lacking_bytes <= 0:
                    return chosen
        return []

    # -- one node ------------------------------------------------------------------------------------------------------

    def _advance_copy(self, name: str) -> None:
        """Take the copy of a chosen node one step further."""
        if name not in self.copies or self.copies[name].phase == "Evicted":
            self.copies[name] = self._new_copy("Waiting")
        if self.copies[name].phase == "NoRoom":
            self._make_room(name)
        copy = self.copies[name]
        # After a timeout another attempt would fail the same way; a longer timeout is a change of the spec.
        has_timed_out = copy.phase == "Failed" and copy.reason == "Timeout"
        if copy.phase in ("Failed", "NoRoom") and copy.reason != "Evicting" and not has_timed_out:
            if copy.retry_at <= self.now:
                self._set(name, phase="Waiting", lacking_bytes=0, reason="")
            else:
                self.due.append(copy.retry_at)
        if self.copies[name].phase in ("Waiting", "Copying") and self.nodes[name].ready:
            self._start_copy(self.nodes[name], self.copies[name])

    def _start_copy(self, node: ClusterNode, copy: NodeCopy) -> None:
        """Start a copier on a node unless it has one."""
        if not self._prepare_folder(node, copy):
            return
        is_replacement = copy.reason == STALE or copy.revision != self.dataset.revision
        if is_replacement and self._must_wait_to_replace(node, copy):
            return
        self.after.append(StartPod("copy", node.name, node.uid, copy.attempts))
        if is_replacement:
            # The version records that the node holds data, even if the new data never arrives.
            version = copy.version or ("partial" if copy.bytes else "")
            self.copies[node.name] = replace(self._new_copy("Waiting"), attempts=copy.attempts, version=version)
        else:
            self.copies[node.name] = replace(copy, phase="Waiting")

    def _prepare_folder(self, node: ClusterNode, copy: NodeCopy) -> bool:
        """Return whether a copier can start: its folder is made, and no other pod of the dataset runs on the node."""
        pods = self._pods_on(node.name)
        revision = self.dataset.revision
        current = [pod for pod in pods if pod.revision == revision and pod.attempt >= copy.attempts]
        current = [pod for pod in current if pod.role != "remove" and not pod.terminating]
        if any(pod.role == "copy" for pod in current):
            return False
        prepared = next(iter(current), None)
        obsolete = [pod for pod in pods if pod is not prepared]
        for pod in obsolete:
            self._delete_pod(pod)
        if any(pod.attempt >= copy.attempts or pod.role == "remove" for pod in obsolete):
            return False  # the name of a pod is free once it is gone, and a copy must not run beside a removal
        if prepared is None:
            self.after.append(StartPod("prepare", node.name, node.uid, copy.attempts))
        return prepared is not None and prepared.phase == "Succeeded"

    def _must_wait_to_replace(self, node: ClusterNode, copy: NodeCopy) -> bool:
        """Return whether the replacement of a copy by another revision must wait, because files must not change under a
        pod.

        Only pods on this node count. Pods without a node wait for the label, and so for the new copy; waiting for them
        would be a deadlock.
        """
        has_label = self.dataset.label in node.labels
        self._remove_label(node)
        users = sorted({user.title for user in self.users if user.node == node.name})
        settled_at = copy.since + self.config.settle_s if copy.reason == STALE else self.now
        if users:
            self.due.append(self.now + _CHECK_USERS_S)
            message = f"waiting for {join_names(users)} to finish before copying again"
            self._set(node.name, reason=STALE, message=message)
            return True
        if has_label or self.now < settled_at:
            self.due.append(max(settled_at, self.now + 0.5))
            self._set(node.name, message="")
            return True
        return False

    def _make_room(self, name: str) -> None:
        """Evict other datasets for a copy that lacks disk space, or retry it once they are gone."""
        copy = self.copies[name]
        departing = self._list_departing(name)
        if copy.reason == "Evicting" and not departing:
            self._set(name, phase="Waiting", reason="", message="", lacking_bytes=0)
            return
        if not departing and copy.retry_at:
            evictions = self._choose_evictions(name, copy.lacking_bytes)
            message = f"evicted from {name} to make room for {self.dataset.title}"
            self.after += [EvictCopy(dataset.namespace, dataset.name, name, message) for dataset in evictions]
            departing = [dataset.title for dataset in evictions]
        if departing:
            message = f"waiting for disk space: {join_names(departing)} is being removed"
            self._set(name, reason="Evicting", message=message)

    def _release_node(self, name: str, count: int) -> None:
        """Remove the copy of a node that shall not hold one of the `count` copies, or no longer."""
        copy = self.copies[name]
        if copy.phase in ("Evicted", "Lost"):
            # An evicted dataset that is used again is staged anywhere, so that the old entry has no meaning.
            if copy.phase == "Evicted" and self.users:
                del self.copies[name]
            return
        if copy.phase in ("Failed", "NoRoom") and not copy.bytes and not copy.version:
            # Keep the entry until enough other copies are ready, so that the same node is not tried again at once.
            if sum(other.phase == "Ready" for other in self.copies.values()) >= count:
                del self.copies[name]
            for pod in self._pods_on(name):
                self._delete_pod(pod)
            return
        if copy.phase != "Removing":
            next_phase = copy.phase if copy.phase in ("Failed", "NoRoom") else ""
            message = copy.message if next_phase else ""
            self._set(name, phase="Removing", reason=next_phase, message=message, attempts=0)
        self._advance_removal(name)

    def _advance_removal(self, name: str) -> None:
        """Take the removal of a node's copy one step further."""
        node, copy = self.nodes[name], self.copies[name]
        pods = self._pods_on(name)
        has_label = self.dataset.label in node.labels
        self._remove_label(node)
        for pod in pods:
            if pod.role != "remove":
                self._delete_pod(pod)
        users = [user.title for user in self.users if user.node == name]
        remove_at = max(copy.since + self.config.settle_s, copy.retry_at)
        if users:
            self.due.append(self.now + _CHECK_USERS_S)
            self._set(name, message=f"waiting for {join_names(users)} to finish")
        elif not node.ready or pods:
            pass  # the next step follows a change of the node or its pods
        elif has_label or self.now < remove_at:
            self.due.append(max(remove_at, self.now + 0.5))
        else:
            self.after.append(StartPod("remove", name, node.uid, copy.attempts))
            self._set(name, message="")

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _new_copy(self, phase: str) -> NodeCopy:
        return NodeCopy(phase=phase, since=self.now, revision=self.dataset.revision)

    def _set(self, node: str, **changes: Any) -> None:
        """Change fields of a node's copy; a new phase begins now."""
        copy = self.copies[node]
        if changes.get("phase", copy.phase) != copy.phase:
            changes["since"] = self.now
        self.copies[node] = replace(copy, **changes)

    def _pods_on(self, node: str) -> list[AgentPod]:
        return [pod for pod in self.pods if pod.node == node]

    def _delete_pod(self, pod: AgentPod, *, late: bool = False) -> None:
        if not pod.terminating:
            (self.after if late else self.before).append(DeletePod(pod.namespace, pod.name))

    def _remove_label(self, node: ClusterNode) -> None:
        if self.dataset.label in node.labels:
            self.before.append(SetNodeLabel(node.name, present=False))

    def _finish(self, phase: str, message: str, count: int) -> DatasetPlan:
        """Return the plan, with the status between the actions before and after it."""
        old = self.dataset.status
        new = build_status(
            self.dataset, self.copies, phase, message, count=count, in_use=bool(self.users), now=self.now
        )
        actions: list[Action] = []
        if changes := build_merge_patch(old, new):
            actions.append(PatchStatus(changes))
        is_warning = phase not in _QUIET_PHASES
        if old.get("phase") != phase or (is_warning and old.get("message") != message):
            actions.append(RecordEvent(is_warning, phase, message))
        retry_after_s = max(0.1, min(self.due) - self.now) if self.due else None
        return DatasetPlan(self._order_actions(*actions), retry_after_s)

    def _order_actions(self, *status: Action) -> list[Action]:
        """Return all actions once, with those about the status between the others."""
        late = [action for action in dict.fromkeys(self.after) if action not in self.before]
        return [*dict.fromkeys(self.before), *status, *late]


def compute_pause(config: OperatorConfig, failures: int) -> float:
    """Return how many seconds to wait before the next attempt if `failures` attempts failed before the last."""
    return float(min(config.retry_s * 2**failures, _MAX_PAUSE_S))


def _format_timeout(seconds: int) -> str:
    for unit, length in (("h", 3600), ("m", 60)):
        if seconds % length == 0:
            return f"{seconds // length}{unit}"
    return f"{seconds}s"
