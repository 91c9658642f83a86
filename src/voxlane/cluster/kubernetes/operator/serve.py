"""Run the operator: kopf watches the cluster, and every change makes a worker plan all datasets again.

Watches only wake the worker. It fetches the state for each plan anew, so a missed or late event costs time but never
causes a wrong action, and a restart loses nothing that is kept in memory.
"""

from __future__ import annotations

import itertools
import secrets
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from voxlane.cluster.kubernetes.client import Cluster, path_of, path_of_object
from voxlane.cluster.kubernetes.names import API_VERSION, GROUP, STAGED, use_label
from voxlane.cluster.kubernetes.operator import plan as plans
from voxlane.cluster.kubernetes.operator.manifests import (
    NAMESPACE_LABEL,
    REQUIRED_ACCESS,
    build_copier_permissions,
    build_event,
    build_pod,
    build_volume,
    volume_name,
)
from voxlane.cluster.kubernetes.operator.resource import (
    DATASET_LABEL,
    FINALIZER,
    OVER_QUOTA,
    ROLE_LABEL,
    STALE,
    WORKLOADS,
    AgentPod,
    ClusterNode,
    DatasetUser,
    OperatorConfig,
    StagedDataset,
    format_time,
    read_dataset,
    read_node,
    read_pod,
    read_users,
)
from voxlane.errors import ClusterError, ForbiddenError, MissingExtraError, MissingObjectError

_RESYNC_S = 30.0
_PAUSE_S = 0.25
"""Pause between passes, so that simultaneous changes are handled together."""
_USERS_MAX_AGE_S = 10.0
"""Maximum age of a list of users on which no removal depends."""
_AFTER_ERROR_S = 5.0
_STUCK_S = 10.0
"""How long a pod may be pending without a reason before the events of the cluster are searched for one."""
_CONFLICT = 409
"""HTTP status of a request to create an object that exists."""
Log = Callable[[str], None]


def check_permissions(cluster: Cluster, namespace: str | None) -> None:
    """Raise an error unless the cluster is reachable, has the resource, and permits what the operator does."""
    if not cluster.serves(API_VERSION, "StagedDataset"):
        raise MissingObjectError(
            f"the cluster has no kind StagedDataset ({API_VERSION})",
            uri=cluster.name,
            fix="Run: voxlane operator install",
        )
    for verb, version, kind, subresource in REQUIRED_ACCESS:
        # An empty namespace stands for all of them.
        if not cluster.may(verb, version, kind, namespace or "", subresource):
            resource = f"{kind}/{subresource}" if subresource else kind
            scope = f"in {namespace}" if namespace else "in all namespaces"
            raise ForbiddenError(
                f"the operator may not {verb} {resource} {scope}",
                uri=cluster.name,
                fix="Give it the ClusterRole that `voxlane operator install --render` prints",
            )


class Worker(threading.Thread):
    """Plan all datasets and execute the actions, after every change and every half minute."""

    def __init__(self, cluster: Cluster, config: OperatorConfig, namespace: str | None, log: Log) -> None:
        super().__init__(name="worker", daemon=True)
        self._cluster = cluster
        self._config = config
        self._namespace = namespace
        """Namespace to serve; None means all."""
        self._log = log
        self._changed = threading.Event()
        self._stopped = False
        self._users: dict[str, tuple[float, list[DatasetUser]]] = {}
        """Users of each dataset by its uid, and when they were listed."""
        self._nodes: dict[str, ClusterNode] = {}
        self._nodes_valid_until = 0.0
        self._used_volumes: set[str] | None = None
        """Names of the volumes in use when the others were last removed."""
        self.last_pass = time.monotonic()

    def wake(self, *, nodes: bool = False) -> None:
        """Start a pass because something changed; `nodes` means that a node did."""
        if nodes:
            self._nodes_valid_until = 0.0
        self._changed.set()

    def stop(self) -> None:
        """Stop after the current dataset."""
        self._stopped = True
        self._changed.set()

    def run(self) -> None:
        """Run passes until stopped."""
        while not self._stopped:
            self._changed.clear()
            wait_s = _AFTER_ERROR_S
            try:
                wait_s = self.run_pass()
            except ClusterError as error:
                self._log(f"{error}; retrying in {_AFTER_ERROR_S:.0f} s")
            except Exception:  # noqa: BLE001  thread boundary: a fault in one dataset must not end the service
                self._log(traceback.format_exc())
            self.last_pass = time.monotonic()
            time.sleep(_PAUSE_S)
            self._changed.wait(wait_s)

    # -- a pass --------------------------------------------------------------------------------------------------------

    def run_pass(self) -> float:
        """Plan every dataset once; return the seconds until the next pass is due."""
        # Pods before datasets, so that the status already has what a finished pod reported.
        pods: dict[str, list[AgentPod]] = {}
        for pod in self._list_pods():
            pods.setdefault(pod.dataset_key, []).append(pod)
        resources = self._cluster.list(path_of(API_VERSION, "StagedDataset", self._namespace))
        datasets = [read_dataset(resource, self._config) for resource in resources]
        self._remove_unused_volumes(datasets)
        nodes = self._list_nodes()
        due = _RESYNC_S
        for dataset in datasets:
            if self._stopped:
                return 0.0
            try:
                own_pods = [pod for pod in pods.get(dataset.key, []) if self._is_own(pod, dataset)]
                due = min(due, self._reconcile(dataset, nodes, own_pods, datasets))
            except ClusterError as error:  # the other datasets are not affected
                self._log(f"{dataset.title}: {error}")
                due = min(due, _AFTER_ERROR_S)
        self._clean_up(datasets, nodes, pods)
        return due

    def _reconcile(
        self,
        dataset: StagedDataset,
        nodes: Mapping[str, ClusterNode],
        pods: Sequence[AgentPod],
        datasets: Sequence[StagedDataset],
    ) -> float:
        """Plan one dataset and execute the actions; return the seconds until it must be planned again."""
        now = time.time()
        exact = dataset.deleting or any(
            copy.phase in ("Removing", "Evicted") or copy.reason == STALE or copy.revision != dataset.revision
            for copy in dataset.copies.values()
        )
        users = self._list_users(dataset, exact=exact)
        full_nodes = {node for node, copy in dataset.copies.items() if copy.phase == "NoRoom"}
        full_nodes |= {pod.node for pod in pods if pod.reason in ("NoRoom", OVER_QUOTA)}
        others = [other for other in datasets if other.uid != dataset.uid and other.copies]
        rivals = [other for other in others if not full_nodes.isdisjoint(other.copies)]
        evictable = [other for other in rivals if not self._list_users(other, exact=True)]
        plan = plans.DatasetPlanner(dataset, nodes, pods, users, others, evictable, now, self._config).plan()
        for action in plan.actions:
            self._execute(dataset, action)
        return _RESYNC_S if plan.retry_after_s is None else plan.retry_after_s

    def _is_own(self, pod: AgentPod, dataset: StagedDataset) -> bool:
        """Return whether a pod with the labels of an agent runs where agents of this dataset do: anyone who may create
        pods in another namespace can give them these labels, and a result."""
        return pod.namespace == (dataset.namespace if pod.role == "copy" else self._config.own_namespace)

    # -- state of the cluster ------------------------------------------------------------------------------------------

    def _list_pods(self) -> list[AgentPod]:
        """Return the agent pods of all namespaces that this operator serves."""
        namespaces = [None] if self._namespace is None else sorted({self._namespace, self._config.own_namespace})
        return [
            self._add_problem_from_events(read_pod(resource))
            for namespace in namespaces
            for resource in self._cluster.list(path_of("v1", "Pod", namespace), labels=ROLE_LABEL)
        ]

    def _add_problem_from_events(self, pod: AgentPod) -> AgentPod:
        """Return a stuck pod with the problem that events report, such as a missing Secret of a volume."""
        if pod.phase != "Pending" or pod.problem or pod.terminating or time.time() - pod.since < _STUCK_S:
            return pod
        selector = f"involvedObject.name={pod.name},type=Warning"
        events = self._cluster.list(path_of("v1", "Event", pod.namespace), fields=selector)
        last = max(events, key=lambda event: event.get("lastTimestamp") or "", default=None)
        return pod if last is None else replace(pod, problem=" ".join(str(last.get("message")).split()))

    def _list_nodes(self) -> dict[str, ClusterNode]:
        """Return all nodes by name. They are listed again only after a change: a cluster may have thousands, and most
        passes are about progress."""
        if time.monotonic() >= self._nodes_valid_until:
            self._nodes_valid_until = time.monotonic() + _RESYNC_S
            self._nodes = {node.name: node for node in map(read_node, self._cluster.list(path_of("v1", "Node")))}
        return self._nodes

    def _list_users(self, dataset: StagedDataset, *, exact: bool) -> list[DatasetUser]:
        """Return the users of a dataset; with `exact`, the current ones, including pods that mount its folder."""
        cached = self._users.get(dataset.uid)
        if not exact and cached is not None and time.monotonic() - cached[0] < _USERS_MAX_AGE_S:
            return cached[1]
        label = use_label(dataset.name)
        users: list[DatasetUser] = []
        if len(dataset.name) <= 63:
            for version, kind in (("v1", "Pod"), *WORKLOADS):
                resources = self._cluster.list(path_of(version, kind, dataset.namespace), labels=label)
                users += read_users(resources, dataset, label)
        if exact:
            for node in dataset.copies:
                pods = self._cluster.list(path_of("v1", "Pod", self._namespace), fields=f"spec.nodeName={node}")
                users += [user for user in read_users(pods, dataset, "") if user not in users]
        self._users[dataset.uid] = (time.monotonic(), users)
        return users

    def _clean_up(
        self,
        datasets: Sequence[StagedDataset],
        nodes: Mapping[str, ClusterNode],
        pods: Mapping[str, Sequence[AgentPod]],
    ) -> None:
        """Remove pods and labels of datasets that were deleted without the operator, by removing the finalizer."""
        keys = {dataset.key for dataset in datasets}
        for pod in itertools.chain.from_iterable(pods[key] for key in pods if key not in keys):
            if not pod.terminating:
                self._cluster.delete(path_of("v1", "Pod", pod.namespace, pod.name))
        uids = {dataset.uid for dataset in datasets}
        self._users = {uid: users for uid, users in self._users.items() if uid in uids}
        if self._namespace is not None:
            return
        for node in nodes.values():
            for label in node.labels:
                prefix, _, key = label.partition("/")
                if prefix == STAGED and key not in keys:
                    self._cluster.patch(path_of("v1", "Node", None, node.name), {"metadata": {"labels": {label: None}}})
                    self._nodes_valid_until = 0.0
                    self._log(f"{node.name}: removed the label {label}, whose dataset does not exist")

    # -- actions -------------------------------------------------------------------------------------------------------

    def _execute(self, dataset: StagedDataset, action: plans.Action) -> None:
        cluster, path = self._cluster, path_of(API_VERSION, "StagedDataset", dataset.namespace, dataset.name)
        match action:
            case plans.SetFinalizer(present):
                finalizers = [name for name in dataset.finalizers if name != FINALIZER]
                finalizers += [FINALIZER] if present else []
                cluster.patch(path, {"metadata": {"finalizers": finalizers, "uid": dataset.uid}})
                if not present:
                    self._log(f"{dataset.title}: deleted, its copies are removed")
            case plans.SetNodeLabel(node, present):
                labels = {dataset.label: "ready" if present else None}
                resource = cluster.patch(path_of("v1", "Node", None, node), {"metadata": {"labels": labels}})
                self._nodes[node] = read_node(resource)
            case plans.StartPod():
                self._start_pod(dataset, action)
            case plans.DeletePod(namespace, name):
                cluster.delete(path_of("v1", "Pod", namespace, name))
            case plans.EvictCopy(namespace, name, node, message):
                since = format_time(time.time())
                entry = {"phase": "Removing", "reason": "Evicted", "message": message, "since": since}
                self._patch_status(namespace, name, {"nodes": {node: entry}})
                self._log(f"{namespace}/{name}: {message}")
            case plans.PatchStatus(changes):
                self._patch_status(dataset.namespace, dataset.name, changes)
            case plans.RecordEvent(warning, reason, message):
                self._log(f"{dataset.title}: {reason}: {message}")
                suffix = f"{time.time_ns():x}{secrets.token_hex(2)}"
                try:
                    cluster.create(build_event(dataset, warning, reason, message, format_time(time.time()), suffix))
                except ClusterError as error:  # for example in a terminating namespace; the status has the same message
                    self._log(f"{dataset.title}: cannot create an Event: {error}")

    def _patch_status(self, namespace: str, name: str, changes: Mapping[str, Any]) -> None:
        path = path_of(API_VERSION, "StagedDataset", namespace, name)
        self._cluster.patch(path, {"status": changes}, subresource="status")

    def _start_pod(self, dataset: StagedDataset, start: plans.StartPod) -> None:
        """Create a pod, after the permissions of a copier; if the cluster rejects it, the attempt has failed."""
        try:
            if start.role == "copy":
                self._free_volume(dataset)
                for manifest in (*build_copier_permissions(dataset), *build_volume(dataset)):
                    self._cluster.apply(manifest)
            self._cluster.create(build_pod(dataset, start, self._config))
        except ClusterError as error:
            if error.status == _CONFLICT:  # the pod exists already
                return
            retry_at = time.time() + plans.compute_pause(self._config, start.attempt) + 1
            entry: dict[str, Any] = {"attempts": start.attempt + 1, "retryAt": format_time(retry_at)}
            entry["message"] = f"the cluster rejected the pod: {error}"
            if start.role != "remove":
                entry |= {"phase": "Failed", "reason": "Refused"}
            self._patch_status(dataset.namespace, dataset.name, {"nodes": {start.node: entry}})
            self._log(f"{dataset.title}: {entry['message']}")

    # -- volumes -------------------------------------------------------------------------------------------------------

    def _free_volume(self, dataset: StagedDataset) -> None:
        """Remove the volume of a namespace if its claim was deleted: no other claim can be bound to it. Raise
        ClusterError while the volume or the claim is being removed."""
        for manifest in build_volume(dataset):
            path = path_of_object(manifest)
            existing = self._cluster.find(path)
            if existing is not None and (existing.get("status") or {}).get("phase") in ("Released", "Failed"):
                self._cluster.delete(path)
                existing = self._cluster.find(path)
            if existing is not None and "deletionTimestamp" in existing["metadata"]:
                raise ClusterError(
                    "it is still being removed", uri=f"{manifest['kind']} {manifest['metadata']['name']}"
                )

    def _remove_unused_volumes(self, datasets: Sequence[StagedDataset]) -> None:
        """Remove the volumes of namespaces that have no datasets any more, and their claims. The folders stay."""
        used = {volume_name(dataset) for dataset in datasets if dataset.data_path}
        unknown = {dataset.namespace for dataset in datasets if not dataset.data_path}
        if self._used_volumes == used:
            return
        selector = f"{NAMESPACE_LABEL}={self._namespace}" if self._namespace else NAMESPACE_LABEL
        for volume in self._cluster.list(path_of("v1", "PersistentVolume"), labels=selector):
            name, reference = volume["metadata"]["name"], volume["spec"]["claimRef"]
            if name not in used and reference["namespace"] not in unknown:
                path = path_of("v1", "PersistentVolumeClaim", reference["namespace"], reference["name"])
                self._cluster.delete(path)
                self._cluster.delete(path_of("v1", "PersistentVolume", None, name))
                self._log(f"{reference['namespace']}: removed its volume, because it has no datasets")
        self._used_volumes = used


# -- kopf --------------------------------------------------------------------------------------------------------------


def serve(
    cluster: Cluster,
    connect: Callable[[], Cluster],
    config: OperatorConfig,
    *,
    namespace: str | None,
    health_port: int | None,
    log: Log,
) -> None:
    """Run until SIGTERM or SIGINT.

    `connect` opens a new connection when credentials have expired. A `namespace` of None serves all namespaces.
    """
    try:
        import kopf
    except ImportError:
        raise MissingExtraError.of("kubernetes", "the operator") from None
    worker = Worker(cluster, config, namespace, log)
    registry = kopf.OperatorRegistry()
    settings = kopf.OperatorSettings()
    settings.scanning.disabled = True  # the watched kinds are fixed, and scanning needs more permissions
    settings.posting.enabled = False
    settings.watching.server_timeout = 300
    nodes: dict[str, ClusterNode] = {}

    @kopf.on.login(registry=registry)  # type: ignore[untyped-decorator]
    def login(**_: Any) -> Any:
        api = connect()._api
        headers: dict[str, str] = {}
        api.update_params_for_auth(headers, [], ["BearerToken"], "/", "GET", None)
        scheme, _space, token = headers.get("authorization", "").partition(" ")
        return kopf.ConnectionInfo(
            server=api.configuration.host,
            ca_path=api.configuration.ssl_ca_cert if api.configuration.verify_ssl else None,
            insecure=not api.configuration.verify_ssl,
            scheme=scheme or None,
            token=token or None,
            certificate_path=api.configuration.cert_file,
            private_key_path=api.configuration.key_file,
        )

    @kopf.on.probe(registry=registry, id="pass")  # type: ignore[untyped-decorator]
    def alive(**_: Any) -> float:
        age = time.monotonic() - worker.last_pass
        if not worker.is_alive() or age > 10 * _RESYNC_S:
            raise kopf.PermanentError(f"no pass for {age:.0f} s")
        return age

    @kopf.on.event(GROUP, "v1alpha1", "stageddatasets", registry=registry)  # type: ignore[untyped-decorator]
    @kopf.on.event("pods", labels={DATASET_LABEL: kopf.PRESENT}, registry=registry)  # type: ignore[untyped-decorator]
    async def dataset_or_pod_changed(**_: Any) -> None:
        worker.wake()

    @kopf.on.event("nodes", registry=registry)  # type: ignore[untyped-decorator]
    async def node_changed(event: Any, body: Any, name: str, **_: Any) -> None:
        node = None if event["type"] == "DELETED" else read_node(body)
        if nodes.get(name) != node:  # heartbeats change nothing relevant
            nodes.pop(name, None)
            if node is not None:
                nodes[name] = node
            worker.wake(nodes=True)

    scope = {"namespaces": [namespace, config.own_namespace]} if namespace else {"clusterwide": True}
    health = f"http://0.0.0.0:{health_port}/healthz" if health_port else None
    worker.start()
    try:
        kopf.run(registry=registry, settings=settings, standalone=True, liveness_endpoint=health, **scope)
    finally:
        worker.stop()
        worker.join(20)
