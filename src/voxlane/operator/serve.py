"""The running operator: kopf watches, and whatever changes has the datasets looked at again.

Watches only wake it. What a plan is made from is fetched anew, so an event that is missed or late costs time, never a
wrong step; nothing is kept in memory that a restart would lose.
"""

from __future__ import annotations

import secrets
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from voxlane.errors import ClusterError, ForbiddenError, MissingExtraError, MissingObjectError
from voxlane.kube.client import Cluster, path_of
from voxlane.kube.names import API_VERSION, GROUP, STAGED, use_label
from voxlane.operator import plan as plans
from voxlane.operator.manifests import NEEDED
from voxlane.operator.pods import copier, event, remover, rights, status_path
from voxlane.operator.resource import (
    FINALIZER,
    OF,
    ROLE,
    STALE,
    WORKLOADS,
    Dataset,
    Node,
    Pod,
    Rules,
    User,
    read_dataset,
    read_node,
    read_pod,
    read_users,
    rfc3339,
)

_RESYNC_S = 30.0
_PAUSE_S = 0.25
"""Between passes: changes that come together are one."""
_USERS_S = 10.0
"""How old the list of users may be, where nothing is removed by it."""
_AFTER_ERROR_S = 5.0
_STUCK_S = 10.0
"""A pod that has not started for so long without a reason is asked about among the cluster's events."""
Say = Callable[[str], None]


def check(cluster: Cluster, namespace: str | None) -> None:
    """Whether an operator can run here: the cluster answers, knows the resource, and lets us."""
    if not cluster.serves(API_VERSION, "StagedDataset"):
        raise MissingObjectError(
            f"the cluster has no kind StagedDataset ({API_VERSION})",
            uri=cluster.name,
            fix="Run: voxlane operator install",
        )
    for verb, version, kind, subresource in NEEDED:
        # An empty namespace asks about all of them.
        if not cluster.may(verb, version, kind, namespace or "", subresource):
            what = f"{kind}/{subresource}" if subresource else kind
            where = f"in {namespace}" if namespace else "in all namespaces"
            raise ForbiddenError(
                f"the operator may not {verb} {what} {where}",
                uri=cluster.name,
                fix="Give it the ClusterRole that `voxlane operator install --render` prints",
            )


class Worker(threading.Thread):
    """Takes every dataset as far as it can go, whenever something changed and every half minute."""

    def __init__(self, cluster: Cluster, rules: Rules, namespace: str | None, say: Say) -> None:
        super().__init__(name="worker", daemon=True)
        self._cluster = cluster
        self._rules = rules
        self._namespace = namespace
        """None: all."""
        self._say = say
        self._news = threading.Event()
        self._over = False
        self._used: dict[str, tuple[float, list[User]]] = {}
        self._nodes: dict[str, Node] = {}
        self._nodes_until = 0.0
        self.last_pass = time.monotonic()

    def wake(self, *, nodes: bool = False) -> None:
        """Something changed; `nodes`: one of them."""
        if nodes:
            self._nodes_until = 0.0
        self._news.set()

    def stop(self) -> None:
        """After the step that it is at."""
        self._over = True
        self._news.set()

    def run(self) -> None:
        wait_s = 0.0
        while not self._over:
            self._news.wait(wait_s)
            if self._over:
                return
            self._news.clear()
            try:
                wait_s = self.one_pass()
            except ClusterError as error:
                self._say(f"{error}; looks again in {_AFTER_ERROR_S:.0f} s")
                wait_s = _AFTER_ERROR_S
            except Exception:  # noqa: BLE001  a thread's border: a fault met by one dataset must not end the service
                self._say(traceback.format_exc())
                wait_s = _AFTER_ERROR_S
            self.last_pass = time.monotonic()
            time.sleep(_PAUSE_S)

    # -- a pass --------------------------------------------------------------------------------------------------------

    def one_pass(self) -> float:
        """Look at everything once; seconds until something is due."""
        # Pods before datasets: what a finished pod told the dataset is then there.
        pods: dict[str, list[Pod]] = {}
        for found in self._pods():
            pods.setdefault(found.key, []).append(found)
        datasets = [
            read_dataset(one, self._rules)
            for one in self._cluster.list(path_of(API_VERSION, "StagedDataset", self._namespace))
        ]
        nodes = self._all_nodes()
        due = _RESYNC_S
        for dataset in datasets:
            if self._over:
                return 0.0
            try:
                again = self._serve(dataset, nodes, pods.get(dataset.key, []), datasets)
            except ClusterError as error:  # one dataset's trouble is not the others'
                self._say(f"{dataset.title}: {error}")
                again = _AFTER_ERROR_S
            due = min(due, again if again is not None else due)
        self._tidy(datasets, nodes, pods)
        return due

    def _serve(
        self, dataset: Dataset, nodes: Mapping[str, Node], pods: Sequence[Pod], datasets: Sequence[Dataset]
    ) -> float | None:
        now = time.time()
        exact = dataset.deleting or any(
            c.phase in ("Removing", "Evicted") or c.reason == STALE or c.revision != dataset.revision
            for c in dataset.copies.values()
        )
        users = self._users(dataset, exact=exact)
        tight = {n for n, c in dataset.copies.items() if c.phase == "NoRoom"}
        tight |= {p.node for p in pods if p.outcome.get("reason") == "NoRoom"}
        others = []
        for other in datasets:
            if other.uid != dataset.uid and other.copies:
                beside = any(node in tight for node in other.copies)
                used = bool(self._users(other, exact=True)) if beside else True
                others.append(plans.Other(other, used))
        planned = plans.plan(dataset, nodes, pods, users, others, now, self._rules)
        for action in planned.actions:
            self._do(dataset, action)
        return planned.again_s

    # -- what is there -------------------------------------------------------------------------------------------------

    def _pods(self) -> list[Pod]:
        """The operator's own, wherever they are."""
        spaces = [None] if self._namespace is None else sorted({self._namespace, self._rules.namespace})
        found = [one for space in spaces for one in self._cluster.list(path_of("v1", "Pod", space), labels=ROLE)]
        return [self._explained(read_pod(one)) for one in found]

    def _explained(self, pod: Pod) -> Pod:
        """With why it does not start, where its status does not say so: a volume's Secret that is missing, say."""
        if pod.phase != "Pending" or pod.why or pod.leaving or time.time() - pod.created < _STUCK_S:
            return pod
        about = f"involvedObject.name={pod.name},type=Warning"
        told = self._cluster.list(path_of("v1", "Event", pod.namespace), fields=about)
        last = max(told, key=lambda one: one.get("lastTimestamp") or "", default=None)
        return pod if last is None else replace(pod, why=" ".join(str(last.get("message")).split()))

    def _all_nodes(self) -> dict[str, Node]:
        """By name. A cluster may have thousands, and most passes are about progress: listed when one changed."""
        if time.monotonic() >= self._nodes_until:
            self._nodes_until = time.monotonic() + _RESYNC_S
            self._nodes = {one.name: one for one in map(read_node, self._cluster.list(path_of("v1", "Node")))}
        return self._nodes

    def _users(self, dataset: Dataset, *, exact: bool) -> list[User]:
        """What uses a dataset; `exact`: right now, and by folder too."""
        kept = self._used.get(dataset.uid)
        if not exact and kept is not None and time.monotonic() - kept[0] < _USERS_S:
            return kept[1]
        label = use_label(dataset.name)
        users: list[User] = []
        if len(dataset.name) <= 63:
            for version, kind in (("v1", "Pod"), *WORKLOADS):
                found = self._cluster.list(path_of(version, kind, dataset.namespace), labels=label)
                users += read_users(found, dataset.host_path, label)
        if exact:
            for node in dataset.copies:
                there = self._cluster.list(path_of("v1", "Pod", self._namespace), fields=f"spec.nodeName={node}")
                users += [u for u in read_users(there, dataset.host_path, "") if u not in users]
        self._used[dataset.uid] = (time.monotonic(), users)
        return users

    def _tidy(self, datasets: Sequence[Dataset], nodes: Mapping[str, Node], pods: Mapping[str, Sequence[Pod]]) -> None:
        """What datasets left that went without us: somebody took the finalizer away."""
        known = {one.key for one in datasets}
        for key, left in pods.items():
            for pod in left:
                if key not in known and not pod.leaving:
                    self._cluster.delete(path_of("v1", "Pod", pod.namespace, pod.name))
        uids = {one.uid for one in datasets}
        self._used = {uid: users for uid, users in self._used.items() if uid in uids}
        if self._namespace is not None:
            return
        for node in nodes.values():
            for label in node.labels:
                prefix, _, key = label.partition("/")
                if prefix == STAGED and key not in known:
                    self._cluster.patch(path_of("v1", "Node", None, node.name), {"metadata": {"labels": {label: None}}})
                    self._nodes_until = 0.0
                    self._say(f"{node.name}: no longer labelled {label}: there is no such dataset")

    # -- actions -------------------------------------------------------------------------------------------------------

    def _do(self, dataset: Dataset, action: plans.Action) -> None:
        cluster, own = self._cluster, path_of(API_VERSION, "StagedDataset", dataset.namespace, dataset.name)
        match action:
            case plans.SetFinalizer(on):
                left = [*dataset.finalizers, FINALIZER] if on else [f for f in dataset.finalizers if f != FINALIZER]
                cluster.patch(own, {"metadata": {"finalizers": left, "uid": dataset.uid}})
                if not on:
                    self._say(f"{dataset.title}: deleted, its copies are removed")
            case plans.Label(node, on):
                changes = {dataset.label: "ready" if on else None}
                said = cluster.patch(path_of("v1", "Node", None, node), {"metadata": {"labels": changes}})
                self._nodes[node] = read_node(said)
            case plans.StartCopy(node):
                self._start(dataset, node, [*rights(dataset), copier(dataset, action)], action.attempt)
            case plans.StartRemoval(node):
                self._start(dataset, node, [remover(dataset, action, self._rules)], action.attempt)
            case plans.StopPod(namespace, name):
                cluster.delete(path_of("v1", "Pod", namespace, name))
            case plans.Evict(namespace, name, node, message):
                entry = {"phase": "Removing", "reason": "Evicted", "message": message, "since": rfc3339(time.time())}
                cluster.patch(status_path(namespace, name), {"status": {"nodes": {node: entry}}})
                self._say(f"{namespace}/{name}: {message}")
            case plans.Patch(changes):
                cluster.patch(status_path(dataset.namespace, dataset.name), {"status": changes})
            case plans.Tell(warning, reason, message):
                self._say(f"{dataset.title}: {reason}: {message}")
                unique = f"{time.time_ns():x}{secrets.token_hex(2)}"
                told = event(dataset, warning, reason, message, rfc3339(time.time()), unique)
                try:
                    cluster.create(told)
                except ClusterError as error:  # of a namespace that is being deleted, say; the status says the same
                    self._say(f"{dataset.title}: no Event: {error}")

    def _start(self, dataset: Dataset, node: str, made: Sequence[Mapping[str, Any]], attempt: int) -> None:
        """Create a pod; that the cluster refuses it becomes the copy's failure."""
        *before, pod = made
        try:
            for one in before:
                self._cluster.apply(one)
            self._cluster.create(pod)
        except ClusterError as error:
            if "already exists" in str(error):
                return
            pause = min(self._rules.retry_s * 2**attempt, 600.0)
            entry: dict[str, Any] = {"attempts": attempt + 1, "retryAt": rfc3339(time.time() + pause + 1)}
            entry["message"] = f"the cluster refuses the pod: {error}"
            if pod["metadata"]["labels"][ROLE] == "copy":
                entry |= {"phase": "Failed", "reason": "Refused"}
            self._cluster.patch(status_path(dataset.namespace, dataset.name), {"status": {"nodes": {node: entry}}})
            self._say(f"{dataset.title}: {entry['message']}")


# -- kopf --------------------------------------------------------------------------------------------------------------


def serve(
    cluster: Cluster,
    connect: Callable[[], Cluster],
    rules: Rules,
    *,
    namespace: str | None,
    health_port: int | None,
    say: Say,
) -> None:
    """Run until SIGTERM or SIGINT. `connect` gives a fresh connection whenever credentials have run out; `namespace`
    None serves all."""
    try:
        import kopf
    except ImportError:
        raise MissingExtraError.of("kubernetes", "the operator") from None
    worker = Worker(cluster, rules, namespace, say)
    registry = kopf.OperatorRegistry()
    settings = kopf.OperatorSettings()
    settings.scanning.disabled = True  # what is watched is known, and looking for more takes more rights
    settings.posting.enabled = False
    settings.watching.server_timeout = 300
    nodes: dict[str, Node] = {}

    @kopf.on.login(registry=registry)  # type: ignore[untyped-decorator]
    def login(**_: Any) -> Any:
        return _connection(kopf, connect())

    @kopf.on.startup(registry=registry)  # type: ignore[untyped-decorator]
    async def start(**_: Any) -> None:
        worker.start()

    @kopf.on.cleanup(registry=registry)  # type: ignore[untyped-decorator]
    async def end(**_: Any) -> None:
        worker.stop()

    @kopf.on.probe(registry=registry, id="pass")  # type: ignore[untyped-decorator]
    def alive(**_: Any) -> float:
        age = time.monotonic() - worker.last_pass
        if not worker.is_alive() or age > 10 * _RESYNC_S:
            raise kopf.PermanentError(f"no pass for {age:.0f} s")
        return age

    @kopf.on.event(GROUP, "v1alpha1", "stageddatasets", registry=registry)  # type: ignore[untyped-decorator]
    async def dataset_changed(**_: Any) -> None:
        worker.wake()

    @kopf.on.event("pods", labels={OF: kopf.PRESENT}, registry=registry)  # type: ignore[untyped-decorator]
    async def pod_changed(**_: Any) -> None:
        worker.wake()

    @kopf.on.event("nodes", registry=registry)  # type: ignore[untyped-decorator]
    async def node_changed(event: Any, body: Any, name: str, **_: Any) -> None:
        gone = event["type"] == "DELETED"
        now = None if gone else read_node(body)
        if nodes.get(name) != now:  # heartbeats change nothing that matters
            nodes.pop(name, None)
            if now is not None:
                nodes[name] = now
            worker.wake(nodes=True)

    where: dict[str, Any] = {"clusterwide": True} if namespace is None else {"namespaces": [namespace, rules.namespace]}
    health = f"http://0.0.0.0:{health_port}/healthz" if health_port else None
    kopf.run(registry=registry, settings=settings, standalone=True, liveness_endpoint=health, **where)
    worker.stop()
    if worker.is_alive():
        worker.join(20)


def _connection(kopf: Any, cluster: Cluster) -> Any:
    """The same way into the cluster, as kopf has it."""
    how = cluster._api.configuration
    headers: dict[str, str] = {}
    cluster._api.update_params_for_auth(headers, [], ["BearerToken"], "/", "GET", None)
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return kopf.ConnectionInfo(
        server=how.host,
        ca_path=how.ssl_ca_cert if how.verify_ssl else None,
        insecure=not how.verify_ssl,
        scheme=scheme or None,
        token=token or None,
        certificate_path=how.cert_file,
        private_key_path=how.key_file,
    )
