"""What to do next about one StagedDataset. Pure: from what the cluster says now to a list of actions and a status.

Every pass starts from what is there, so an operator that was killed between any two actions goes on where it was. The
order of actions is what makes that safe:

    copied    pod succeeded -> node labelled -> copy Ready -> pod deleted
    restaged  label gone -> copy Waiting -> a while -> no pod uses it there -> copied as above
    removed   copy Removing -> label gone -> a while -> no pod uses it there -> a pod removes it -> entry gone
    deleted   no user left -> every copy removed -> finalizer gone

So a Ready copy has its label, and a node that lost it (it was made anew, perhaps with an empty disk) is looked at
again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from voxlane.operator.resource import (
    FIELDS,
    FINALIZER,
    STALE,
    Copy,
    Dataset,
    Node,
    Pod,
    Rules,
    Spec,
    User,
    epoch,
    rfc3339,
)
from voxlane.sizes import written

_LONGEST_PAUSE_S = 600.0
_TRIES = 3
"""Failures on a node before another one is taken."""
_USED_EVERY_S = 60.0
"""How exactly `lastUsed` is kept."""
_ASK_USERS_S = 3.0
"""How soon is looked again at who uses a dataset, where something waits for that: users are not watched."""
_NOT_THE_NODE = ("Source", "TooLarge", "Timeout", "Changed")
"""Failures that another node would meet as well."""


# -- actions -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SetFinalizer:
    """Have the dataset's deletion wait for us, or (`on` false) no longer."""

    on: bool


@dataclass(frozen=True)
class Label:
    """Say on a node that it holds the dataset whole, or (`on` false) no longer."""

    node: str
    on: bool


@dataclass(frozen=True)
class StartCopy:
    """Start the pod that copies onto a node."""

    node: str
    node_uid: str
    attempt: int
    tolerate: tuple[tuple[str, str], ...] = ()
    """Taints of the node, key and effect."""


@dataclass(frozen=True)
class StartRemoval:
    """Start the pod that removes the copy of a node."""

    node: str
    node_uid: str
    attempt: int


@dataclass(frozen=True)
class StopPod:
    """Delete a pod of ours."""

    namespace: str
    name: str


@dataclass(frozen=True)
class Evict:
    """Have another dataset leave a node."""

    namespace: str
    name: str
    node: str
    message: str


@dataclass(frozen=True)
class Patch:
    """Merge into the dataset's status (null removes)."""

    changes: Mapping[str, Any]


@dataclass(frozen=True)
class Tell:
    """An Event about the dataset."""

    warning: bool
    reason: str
    message: str


Action = SetFinalizer | Label | StartCopy | StartRemoval | StopPod | Evict | Patch | Tell


@dataclass(frozen=True)
class Other:
    """Another dataset, for what its copies take of nodes' disks."""

    dataset: Dataset
    used: bool


@dataclass(frozen=True)
class Plan:
    """Actions in the order in which they are to be done; where one fails, those after it must not be."""

    actions: list[Action]
    again_s: float | None
    """Something is due by itself then; None: when something changes."""


def plan(
    dataset: Dataset,
    nodes: Mapping[str, Node],
    pods: Sequence[Pod],
    users: Sequence[User],
    others: Sequence[Other],
    now: float,
    rules: Rules,
) -> Plan:
    """The next steps for `dataset`. `pods` are the operator's for it; `users` include pods of any namespace that mount
    its folder; `others` share nodes with it. `now` is in seconds since 1970."""
    if dataset.deleting and FINALIZER not in dataset.finalizers:
        return Plan([], None)
    # What a pod says is about the machine that it ran on, whatever has that name now.
    strange = [p for p in pods if p.node in nodes and p.node_uid != nodes[p.node].uid and not p.leaving]
    if strange:
        return Plan([StopPod(pod.namespace, pod.name) for pod in strange], 0.5)
    return _Pass(dataset, nodes, pods, users, others, now, rules).run()


# -- a pass ------------------------------------------------------------------------------------------------------------


@dataclass
class _Pass:
    dataset: Dataset
    nodes: Mapping[str, Node]
    pods: Sequence[Pod]
    users: Sequence[User]
    others: Sequence[Other]
    now: float
    rules: Rules
    copies: dict[str, Copy] = field(default_factory=dict)
    before: list[Action] = field(default_factory=list)
    """Done before the status is written: what the status then says is true."""
    after: list[Action] = field(default_factory=list)
    """Done after it: what the status says is known before it begins."""
    due: list[float] = field(default_factory=list)

    def run(self) -> Plan:
        dataset = self.dataset
        self.copies = dict(dataset.copies)
        if dataset.deleting and not self.users:
            return self._delete()
        spec = dataset.spec
        if spec is None:
            return self._finish("Deleting" if dataset.deleting else "Failed", dataset.problem, 0)
        if FINALIZER not in dataset.finalizers:
            self.before.append(SetFinalizer(on=True))
        if dataset.status.get("observedGeneration") != dataset.generation:
            self._forgive()
        self._absorb(spec)
        self._look_at_nodes()
        chosen, count = self._choose(spec)
        for node in chosen:
            self._serve(node)
        for node in [n for n in self.copies if n not in chosen]:
            self._let_go(node, count)
        phase, message = self._verdict(spec, chosen, count)
        if dataset.deleting:
            self.due.append(self.now + _ASK_USERS_S)
            return self._finish("Deleting", f"waits for {_named([u.title for u in _heads(self.users)])} to end", count)
        return self._finish(phase, message, count)

    def _delete(self) -> Plan:
        """Nobody uses it any more."""
        dataset = self.dataset
        if dataset.copies and not dataset.root:
            return self._finish("Deleting", f"cannot be removed: {dataset.problem}", 0)
        self._absorb_removals()
        for node, found in self.nodes.items():
            if dataset.label in found.labels and node not in self.copies:
                self.copies[node] = self._new("Removing")
        for node, copy in list(self.copies.items()):
            if copy.phase == "Evicted" or node not in self.nodes:
                del self.copies[node]
            elif copy.phase != "Removing" or copy.reason:
                since = copy.since if copy.phase == "Removing" else self.now
                made = replace(copy, phase="Removing", reason="", since=since, attempts=0, retry_at=0)
                # What it failed with before is not what its removal waits for.
                self.copies[node] = made if copy.phase == "Removing" else replace(made, message="")
        for node in list(self.copies):
            self._remove(node)
        if not self.copies:
            self.after += [StopPod(pod.namespace, pod.name) for pod in self.pods if not pod.leaving]
            self.after.append(SetFinalizer(on=False))
            return Plan(_once([*self.before, *self.after]), None)
        away = sorted(n for n in self.copies if not self.nodes[n].ready)
        told = sorted((n, c.message) for n, c in self.copies.items() if c.message)
        if away:
            message = f"waits for {_named(away)}, which does not answer, to remove the copy there"
        elif told:
            message = f"{told[0][0]}: {told[0][1]}"
        else:
            message = f"removes its copies from {_named(sorted(self.copies))}"
        return self._finish("Deleting", message, len(self.copies))

    # -- what pods say -------------------------------------------------------------------------------------------------

    def _absorb(self, spec: Spec) -> None:
        """Take over what copiers have done, and end those that nobody waits for."""
        self._absorb_removals()
        for pod in [p for p in self.pods if p.role == "copy"]:
            copy = self.copies.get(pod.node)
            stale = pod.revision != self.dataset.revision
            if stale and copy is not None and pod.phase == "Succeeded" and copy.phase != "Ready":
                self.copies[pod.node] = replace(copy, **_numbers(pod.outcome))  # nobody wants it, but it lies there
            if (
                stale
                or copy is None
                or copy.phase in ("Removing", "Evicted", "Lost")
                or pod.attempt < copy.attempts - 1
            ):
                self._stop(pod)
            elif pod.attempt == copy.attempts - 1:
                pass  # its failure is known; it stays for its log until the next attempt
            elif pod.leaving:
                pass
            elif pod.phase == "Succeeded":
                self._arrived(pod, copy)
            elif pod.phase == "Failed":
                self._failed(pod, copy, spec)
            elif self.now - (pod.started or pod.created) > spec.timeout_s:
                self._failed(replace(pod, reason="DeadlineExceeded"), copy, spec)
                self._stop(pod)
            elif copy.phase != "Ready":
                self.due.append((pod.started or pod.created) + spec.timeout_s + 1)
                phase = "Copying" if pod.phase == "Running" else "Waiting"
                # A copier that runs says itself what it waits for.
                message = pod.why if phase == "Waiting" else copy.message if copy.phase == phase else ""
                if (copy.phase, copy.message) != (phase, message):
                    since = copy.since if copy.phase == phase else self.now
                    self.copies[pod.node] = replace(copy, phase=phase, message=message, since=since, reason="")

    def _arrived(self, pod: Pod, copy: Copy) -> None:
        node = self.nodes.get(pod.node)
        if node is None:
            return
        if node.labels.get(self.dataset.label) != "ready":
            self.before.append(Label(pod.node, on=True))
        if copy.phase != "Ready" or copy.revision != pod.revision:
            self.copies[pod.node] = replace(
                copy,
                **_numbers(pod.outcome),
                phase="Ready",
                since=self.now,
                revision=pod.revision,
                attempts=0,
                retry_at=0.0,
                reason="",
                message="",
                lacking_bytes=0,
            )
        self._stop(pod, late=True)

    def _failed(self, pod: Pod, copy: Copy, spec: Spec) -> None:
        reason = pod.outcome.get("reason") or ("Timeout" if pod.reason == "DeadlineExceeded" else pod.reason)
        message = pod.outcome.get("message") or pod.why or "the copier failed"
        if reason == "NoRoom" and pod.outcome.get("lackingBytes"):
            message = f"the disk lacks {written(pod.outcome['lackingBytes'])} of room below {self.dataset.root}"
        if reason == "Timeout":
            took = "did not start within" if pod.phase == "Pending" else "took longer than"
            why = f" ({pod.why})" if pod.phase == "Pending" and pod.why else ""
            message = f"the copy {took} timeout, {_duration(spec.timeout_s)}{why}; raise it to go on"
        self.before.append(Tell(True, "CopyFailed", f"{pod.node}: {message}"))
        attempts = pod.attempt + 1
        pause = min(self.rules.retry_s * 2 ** (attempts - 1), _LONGEST_PAUSE_S)
        self.copies[pod.node] = replace(
            copy,
            **{"lacking_bytes": 0, **_numbers(pod.outcome)},
            phase="NoRoom" if reason == "NoRoom" else "Failed",
            reason=reason,
            message=message,
            attempts=attempts,
            retry_at=self.now + pause,
            since=self.now,
        )

    def _absorb_removals(self) -> None:
        for pod in [p for p in self.pods if p.role == "remove"]:
            copy = self.copies.get(pod.node)
            if copy is None or copy.phase != "Removing" or pod.attempt < copy.attempts:
                self._stop(pod)
            elif pod.phase == "Succeeded":
                if copy.reason:
                    self.copies[pod.node] = replace(
                        copy, phase=copy.reason, reason="", bytes=0, objects=0, since=self.now, attempts=0, version=""
                    )
                else:
                    del self.copies[pod.node]
                self._stop(pod, late=True)
            elif pod.phase == "Failed":
                why = pod.outcome.get("message") or pod.why
                pause = min(self.rules.retry_s * 2**pod.attempt, _LONGEST_PAUSE_S)
                self.copies[pod.node] = replace(
                    copy,
                    message=f"the copy cannot be removed: {why}",
                    attempts=pod.attempt + 1,
                    retry_at=self.now + pause,
                )
                self._stop(pod, late=True)

    def _forgive(self) -> None:
        """The spec is another than the one that failed."""
        for node, copy in self.copies.items():
            if copy.phase in ("Failed", "NoRoom"):
                self.copies[node] = replace(copy, retry_at=0.0, reason="")

    # -- what nodes say ------------------------------------------------------------------------------------------------

    def _look_at_nodes(self) -> None:
        """Copies on nodes that are gone, lost, back, or that hold something else."""
        for name, copy in list(self.copies.items()):
            node = self.nodes.get(name)
            if node is None:
                del self.copies[name]
                continue
            if not node.ready:
                lost_at = node.since + self.rules.lost_after_s
                if copy.phase in ("Ready", "Copying", "Waiting"):
                    if self.now >= lost_at:
                        self._unlabel(node)
                        self.copies[name] = replace(
                            copy, phase="Lost", message="the node does not answer", since=self.now
                        )
                        for pod in self._pods(name):
                            self._stop(pod)
                    else:
                        self.due.append(lost_at)
            elif copy.phase == "Lost":
                self.copies[name] = replace(copy, phase="Waiting", message="", since=self.now, attempts=0)
            elif copy.phase == "Ready":
                stale = copy.revision != self.dataset.revision
                unlabelled = node.labels.get(self.dataset.label) != "ready" and Label(name, on=True) not in self.before
                if stale:
                    self._unlabel(node)
                if stale or unlabelled:
                    reason = STALE if stale else ""
                    self.copies[name] = replace(copy, phase="Waiting", since=self.now, attempts=0, reason=reason)

    # -- which nodes ---------------------------------------------------------------------------------------------------

    def _choose(self, spec: Spec) -> tuple[list[str], int]:
        """Nodes that are to hold a copy, and how many should."""
        fit = [n for n in self.nodes.values() if _matches(n, spec)]
        wanted = len(fit) if spec.replicas is None else spec.replicas
        evicted = {n for n, c in self.copies.items() if "Evicted" in (c.phase, c.reason)}
        count = wanted
        if evicted and not self.users:
            # What was evicted stays so until somebody asks for it: it would only push out the next.
            self.due.append(self.now + _ASK_USERS_S)
            fit = [n for n in fit if n.name not in evicted]
            count = max(0, wanted - len(evicted))
        held: dict[str, int] = {}
        for other in self.others:
            for name, copy in other.dataset.copies.items():
                held[name] = held.get(name, 0) + (copy.total_bytes or 1)
        used = {u.node for u in self.users}
        ranked = []
        for node in fit:
            rank = self._rank(node)
            if rank is not None:
                mine = self.copies.get(node.name)
                due = mine.retry_at if mine and rank >= 6 else 0.0
                there = mine.bytes if mine else 0
                ranked.append((rank, due, node.name not in used, -there, held.get(node.name, 0), node.name))
        return [name for *_, name in sorted(ranked)[:count]], wanted

    def _rank(self, node: Node) -> int | None:
        """Which nodes come first; None: it cannot take a copy."""
        copy = self.copies.get(node.name)
        if copy is not None and copy.phase == "Ready":
            return 0  # also while it is cordoned, or not ready for a moment
        if copy is not None and copy.phase in ("Lost", "Removing"):
            return None
        if not node.ready:  # for a moment, else its copy were lost
            return None if copy is None else 2 if copy.phase in ("Copying", "Waiting") else 6
        if copy is not None and copy.phase in ("Copying", "Waiting"):
            return 1 if copy.bytes else 2
        if not node.schedulable:
            return None
        if copy is None or copy.phase == "Evicted":
            return 4 if node.labels.get(self.dataset.label) == "ready" else 5
        if copy.phase == "NoRoom":
            return 3 if self._makes_room(node.name, copy) else 7
        return 3 if copy.reason in _NOT_THE_NODE or copy.attempts < _TRIES else 6

    # -- room ----------------------------------------------------------------------------------------------------------

    def _makes_room(self, node: str, copy: Copy) -> bool:
        """Whether others are leaving the node, or could."""
        return bool(self._leaving(node) or copy.reason == "Evicting" or self._victims(node, copy.lacking_bytes))

    def _leaving(self, node: str) -> list[str]:
        there = ((o.dataset.title, o.dataset.copies.get(node)) for o in self.others)
        return [title for title, copy in there if copy is not None and copy.phase == "Removing"]

    def _victims(self, node: str, lacking_bytes: int) -> list[Dataset]:
        """Least recently used first, as many as the room takes; none if all of them are not enough."""
        free: list[Dataset] = []
        able = [o.dataset for o in self.others if not o.used and not o.dataset.keep and not o.dataset.deleting]
        able = [d for d in able if d.root == self.dataset.root]
        for one in sorted(able, key=lambda d: (d.last_used, d.title)):
            copy = one.copies.get(node)
            if copy is not None and copy.phase == "Ready":
                free.append(one)
                lacking_bytes -= copy.bytes or copy.total_bytes
                if lacking_bytes <= 0:
                    return free
        return []

    # -- one node ------------------------------------------------------------------------------------------------------

    def _serve(self, name: str) -> None:
        """Take a chosen node's copy one step on."""
        node, copy = self.nodes[name], self.copies.get(name)
        if copy is None or copy.phase == "Evicted":
            copy = self._new("Waiting")
        if copy.phase == "NoRoom":
            copy = self._room(name, copy)
        if copy.phase == "Failed" and copy.reason == "Timeout":
            pass  # it would be the same again; a longer timeout is another spec
        elif copy.phase in ("Failed", "NoRoom") and copy.reason != "Evicting":
            if copy.retry_at <= self.now:
                copy = replace(copy, phase="Waiting", since=self.now, lacking_bytes=0, reason="")
            else:
                self.due.append(copy.retry_at)
        if copy.phase in ("Waiting", "Copying") and node.ready:
            copy = self._start(node, copy)
        self.copies[name] = copy

    def _start(self, node: Node, copy: Copy) -> Copy:
        """Have a copier there, unless it is."""
        mine = self._pods(node.name)
        going = [p for p in mine if p.role == "copy" and p.revision == self.dataset.revision and not p.leaving]
        if any(p.attempt >= copy.attempts for p in going):
            return copy
        for pod in mine:
            self._stop(pod)
        if any(p.attempt >= copy.attempts or p.role == "remove" for p in mine):
            return copy  # a name is free when its pod is gone, and nobody copies into what is being removed
        anew = copy.reason == STALE or copy.revision != self.dataset.revision
        if anew and (held := self._held(node, copy)) is not None:
            return held
        self.after.append(StartCopy(node.name, node.uid, copy.attempts, node.taints))
        if anew:
            # A version says that something lies there, also if the new one never comes.
            version = copy.version or ("partial" if copy.bytes else "")
            return replace(self._new("Waiting"), attempts=copy.attempts, version=version)
        return replace(copy, phase="Waiting")

    def _held(self, node: Node, copy: Copy) -> Copy | None:
        """A copy that is to be replaced by another revision, while that must wait: files do not change under a pod.
        Only pods on the node count. What has no node yet goes where the label is, and so waits for the new copy: would
        that wait for it, neither could go on."""
        labelled = self.dataset.label in node.labels
        self._unlabel(node)
        users = sorted({u.title for u in self.users if u.node == node.name})
        settled = copy.since + self.rules.settle_s if copy.reason == STALE else self.now
        if users:
            self.due.append(self.now + _ASK_USERS_S)
            return replace(copy, reason=STALE, message=f"waits for {_named(users)} before it is copied anew")
        if labelled or self.now < settled:
            self.due.append(max(settled, self.now + 0.5))
            return replace(copy, message="")
        return None

    def _room(self, name: str, copy: Copy) -> Copy:
        """Evict for a copy that found too little room; or try again, when those have left."""
        if leaving := self._leaving(name):
            return replace(copy, reason="Evicting", message=f"waits for room: {_named(leaving)} is leaving")
        if copy.reason == "Evicting":
            return replace(copy, phase="Waiting", reason="", message="", lacking_bytes=0, since=self.now)
        victims = self._victims(name, copy.lacking_bytes)
        if not victims or copy.retry_at == 0:
            return copy
        why = f"evicted from {name} to make room for {self.dataset.title}"
        self.after += [Evict(v.namespace, v.name, name, why) for v in victims]
        told = _named([v.title for v in victims])
        return replace(copy, reason="Evicting", message=f"waits for room: {told} is leaving")

    def _let_go(self, name: str, count: int) -> None:
        """A node that is not (or no longer) to hold one of `count` copies."""
        copy = self.copies[name]
        if copy.phase in ("Evicted", "Lost"):
            # An evicted dataset that is used again is staged again, wherever; the old entry says nothing then.
            if copy.phase == "Evicted" and self.users:
                del self.copies[name]
            return
        if copy.phase in ("Failed", "NoRoom") and not copy.bytes and not copy.version:
            # Kept until enough others are whole, so that the same node is not tried again at once.
            if sum(c.phase == "Ready" for c in self.copies.values()) >= count:
                del self.copies[name]
            for pod in self._pods(name):
                self._stop(pod)
            return
        if copy.phase != "Removing":
            follows = copy.phase if copy.phase in ("Failed", "NoRoom") else ""
            message = copy.message if follows else ""
            copy = replace(copy, phase="Removing", reason=follows, message=message, since=self.now, attempts=0)
            self.copies[name] = copy
        self._remove(name)

    def _remove(self, name: str) -> None:
        """Take the removal of a node's copy one step on."""
        node, copy = self.nodes[name], self.copies[name]
        mine = self._pods(name)
        labelled = self.dataset.label in node.labels
        self._unlabel(node)
        for pod in mine:
            if pod.role == "copy":
                self._stop(pod)
        users = [u for u in self.users if u.node == name]
        settled = copy.since + self.rules.settle_s
        if users:
            self.due.append(self.now + _ASK_USERS_S)
            copy = replace(copy, message=f"waits for {_named([u.title for u in users])} to end")
        elif not node.ready or mine:
            pass  # it is a change that we wait for
        elif labelled or self.now < max(settled, copy.retry_at):
            self.due.append(max(settled, copy.retry_at, self.now + 0.5))
        else:
            self.after.append(StartRemoval(name, node.uid, copy.attempts))
            copy = replace(copy, message="")
        self.copies[name] = copy

    # -- small things --------------------------------------------------------------------------------------------------

    def _new(self, phase: str) -> Copy:
        return Copy(phase=phase, since=self.now, revision=self.dataset.revision)

    def _pods(self, node: str) -> list[Pod]:
        return [p for p in self.pods if p.node == node]

    def _stop(self, pod: Pod, *, late: bool = False) -> None:
        if not pod.leaving:
            (self.after if late else self.before).append(StopPod(pod.namespace, pod.name))

    def _unlabel(self, node: Node) -> None:
        if self.dataset.label in node.labels:
            self.before.append(Label(node.name, on=False))

    # -- the status ----------------------------------------------------------------------------------------------------

    def _verdict(self, spec: Spec, chosen: list[str], count: int) -> tuple[str, str]:
        """Phase and message."""
        told = {n: self.copies[n] for n in chosen}
        whole = sorted(n for n, c in told.items() if c.phase == "Ready")
        going = sorted(n for n, c in told.items() if c.phase in ("Waiting", "Copying"))
        going += sorted(n for n, c in told.items() if c.reason == "Evicting")
        wrong = sorted((n, c) for n, c in self.copies.items() if c.phase in ("Failed", "NoRoom"))
        wrong = [(n, c) for n, c in wrong if c.reason != "Evicting"]
        evicted = sorted(n for n, c in self.copies.items() if c.phase == "Evicted")
        lost = sorted(n for n, c in self.copies.items() if c.phase == "Lost")
        if whole and len(whole) >= count:
            return "Ready", f"ready on {_named(whole)}"
        if evicted and not going and not wrong and len(whole) + len(evicted) >= count:
            kept = f"; ready on {_named(whole)}" if whole else ""
            text = f"evicted from {_named(evicted)} to make room{kept}; it is staged again when something uses it"
            return ("Evicted" if not whole else "Degraded"), text
        said: list[str] = []
        if wrong:
            said.append(f"{wrong[0][0]}: {wrong[0][1].message}")
        if lost:
            said.append(f"{_named(lost)} does not answer")
        if len(chosen) < max(count, 1):
            said.append(self._too_few(spec, len(chosen), count))
        stuck = [(n, told[n].message) for n in going if told[n].message]
        if stuck:
            said.append(f"{stuck[0][0]}: {stuck[0][1]}")
        if whole:
            fine = going and not wrong and not lost and len(chosen) >= count
            said = said or [f"ready on {_named(whole)}, staging onto {_named(going)}"]
            return ("Staging" if fine else "Degraded"), "; ".join(said)
        was = self.dataset.status
        same = was.get("phase") == "Failed" and was.get("observedGeneration") == self.dataset.generation
        if going and same and all(told[n].attempts and not told[n].bytes for n in going):
            return "Failed", str(was.get("message"))  # another try is no news until something arrives
        if going:
            return "Staging", "; ".join(said) or f"staging onto {_named(going)}"
        if wrong:
            return "Failed", "; ".join(said)
        return "Pending", "; ".join(said)

    def _too_few(self, spec: Spec, chosen: int, count: int) -> str:
        """Why there are fewer nodes than were asked for."""
        selector = ",".join(f"{k}={v}" for k, v in sorted(spec.node_selector.items()))
        fit = [n for n in self.nodes.values() if _matches(n, spec)]
        if not fit:
            tainted = any(n.taints for n in self.nodes.values())
            hint = "; nodes with taints are taken when a nodeSelector names them" if tainted and not selector else ""
            return f"no node matches nodeSelector {selector}" if selector else f"no node can take a copy{hint}"
        which = f" that match{'es' if len(fit) == 1 else ''} nodeSelector {selector}" if selector else ""
        nodes = f"{len(fit)} node{'s' if len(fit) > 1 else ''}{which}"
        able = [n for n in fit if n.ready and n.schedulable]
        if len(fit) < count:
            return f"{count} nodes are asked for, and there {'is' if len(fit) == 1 else 'are'} {nodes}"
        if len(able) < count:
            return f"{count} of {nodes} {'is' if count == 1 else 'are'} needed, and {len(able)} can take a copy now"
        return f"{count - chosen} more of {nodes} needed"

    def _finish(self, phase: str, message: str, count: int) -> Plan:
        """The actions, with the status between those before and those after it."""
        dataset = self.dataset
        changes = difference(dataset.status, self._status(phase, message, count))
        actions: list[Action] = list(self.before)
        if changes:
            actions.append(Patch(changes))
        was = (dataset.status.get("phase"), dataset.status.get("message"))
        calm = phase in ("Ready", "Evicted", "Staging", "Deleting")
        if was[0] != phase or (not calm and was[1] != message):
            actions.append(Tell(not calm, phase, message))
        actions += self.after
        again = max(0.1, min(self.due) - self.now) if self.due else None
        return Plan(_once(actions), again)

    def _status(self, phase: str, message: str, count: int) -> dict[str, Any]:
        dataset, copies = self.dataset, self.copies
        served = [c for c in copies.values() if c.phase in ("Ready", "Copying", "Waiting", "NoRoom", "Failed")]
        served = sorted(served, key=lambda c: c.phase != "Ready")[: max(count, 1)]
        whole = [c for c in copies.values() if c.phase == "Ready"]
        known: Iterable[Copy] = [*whole, *served]
        total = max((c.total_bytes for c in known), default=0)
        objects = max((c.total_objects for c in known), default=0)
        there = sum(total if c.phase == "Ready" else min(c.bytes, total) for c in served if c.reason != STALE)
        share = there / (total * max(count, len(served))) if total else float(bool(whole) and len(whole) >= count)
        status: dict[str, Any] = dict(dataset.status)
        status.pop("nodes", None)
        status |= {"phase": phase, "message": message, "ready": f"{len(whole)}/{count}"}
        status |= {"observedGeneration": dataset.generation, "progress": f"{int(min(share, 1) * 100)}%"}
        if total or objects:
            status |= {"bytes": total, "objects": objects, "size": written(total)}
        if dataset.root and dataset.spec:
            status |= {"hostPath": dataset.host_path, "nodeAffinity": affinity(dataset.label)}
        if self.users and self.now - epoch(dataset.status.get("lastUsed")) >= _USED_EVERY_S:
            status["lastUsed"] = rfc3339(self.now)
        status["nodes"] = {node: copy.plain() for node, copy in copies.items()}
        is_ready = "True" if phase == "Ready" else "False"
        old: Mapping[str, Any] = next((c for c in dataset.status.get("conditions") or () if c["type"] == "Ready"), {})
        since = old.get("lastTransitionTime") if old.get("status") == is_ready else rfc3339(self.now)
        ready = {"type": "Ready", "status": is_ready, "reason": phase, "message": message, "lastTransitionTime": since}
        status["conditions"] = [ready]
        return status


# -- pieces ------------------------------------------------------------------------------------------------------------


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """A merge patch (RFC 7386) from `old` to `new`."""
    changes: dict[str, Any] = {key: None for key in old if key not in new}
    for key, value in new.items():
        was = old.get(key)
        if isinstance(value, Mapping) and isinstance(was, Mapping):
            if inner := difference(was, value):
                changes[key] = inner
        elif key not in old or was != value:
            changes[key] = value
    return changes


def affinity(label: str) -> dict[str, Any]:
    """`affinity.nodeAffinity` of a pod that must run where `label` says ready."""
    term = {"matchExpressions": [{"key": label, "operator": "In", "values": ["ready"]}]}
    return {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}


def _numbers(outcome: Mapping[str, Any]) -> dict[str, Any]:
    """What a copier counted, by the fields of Copy."""
    return {name: outcome[key] for name, key in FIELDS.items() if key in outcome and name not in ("message", "reason")}


def _matches(node: Node, spec: Spec) -> bool:
    """Whether a node may hold a copy at all. One with taints may if the selector asks for it: nodes with GPUs often
    have them."""
    if node.taints and not spec.node_selector:
        return False
    return all(node.labels.get(key) == value for key, value in spec.node_selector.items())


def _heads(users: Sequence[User]) -> list[User]:
    """Workloads before pods, which are often theirs."""
    return sorted(users, key=lambda u: (u.kind == "Pod", u.title))


def _named(names: Sequence[str], most: int = 3) -> str:
    """Names for a sentence."""
    if len(names) > most:
        return f"{', '.join(names[:most])} and {len(names) - most} more"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _duration(seconds: int) -> str:
    for unit, length in (("h", 3600), ("m", 60)):
        if seconds % length == 0:
            return f"{seconds // length}{unit}"
    return f"{seconds}s"


def _once(actions: Sequence[Action]) -> list[Action]:
    """Without repetitions."""
    kept: list[Action] = []
    for action in actions:
        if action not in kept:
            kept.append(action)
    return kept
