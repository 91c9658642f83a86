"""What stands in the way of an app in a cluster, found before anything is made there.

`needs` reads it from the manifests and does no I/O; `check` asks the cluster, all questions at the same time. What this
user may not read is not checked, and said as a note.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from voxlane.app.look import at_once, queue_version
from voxlane.app.objects import APP, QUEUE, WORKLOADS, Object, condition, label, name_of, pod_specs, spec, used_data
from voxlane.app.trouble import asked_of, quantity, shown
from voxlane.errors import ClusterError, ForbiddenError
from voxlane.kube.client import PLURALS, Cluster, path_of
from voxlane.kube.names import API_VERSION as STAGED_API
from voxlane.kube.names import node_key

INSTALL = {
    "JobSet": "kubectl apply --server-side -f "
    "https://github.com/kubernetes-sigs/jobset/releases/latest/download/manifests.yaml",
    "RayJob": "helm install kuberay-operator kuberay-operator --repo https://ray-project.github.io/kuberay-helm",
    "TrainJob": "kubectl apply --server-side -k "
    '"https://github.com/kubeflow/trainer.git/manifests/overlays/manager?ref=master"',
    "LocalQueue": "kubectl apply --server-side -f "
    "https://github.com/kubernetes-sigs/kueue/releases/latest/download/manifests.yaml",
    "StagedDataset": "voxlane operator install",
}
"""How a cluster gets the kinds that it does not have by itself."""
_RUNTIMES = "trainer.kubeflow.org/v1alpha1"
_REGISTRY = ".dockerconfigjson"
"""The key of a Secret with which images are pulled."""
_PRIORITIES = "/apis/scheduling.k8s.io/v1/priorityclasses"


@dataclass(frozen=True)
class Problem:
    """Something that would keep the app from running."""

    said: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.said}. {self.fix}" if self.fix else self.said


@dataclass(frozen=True)
class Needs:
    """What an app's manifests ask of a cluster."""

    kinds: list[tuple[str, str]]
    """(apiVersion, kind) of what is made."""
    queue: str
    secrets: dict[str, set[str]]
    """Keys that a Secret must have; an empty set: that it exists."""
    accounts: set[str]
    priorities: set[str]
    runtime: tuple[str, str]
    """Kind and name of a TrainJob's runtime; ("", ""): none."""
    app: str
    data: dict[str, tuple[bool, str]]
    """StagedDatasets that the app's pods use: whether each must be there already, and the host path that they mount."""
    nodes: list[tuple[str, int, dict[str, str], dict[str, float]]]
    """(for what, how many nodes, their labels, resources that each pod asks for)."""


@dataclass(frozen=True)
class Found:
    """What was found: problems forbid the deploy, notes do not."""

    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def needs(manifests: Sequence[Mapping[str, Any]], *, keys: Iterable[str] = ()) -> Needs:
    """What the manifests ask for. `keys`: variables that a Secret that becomes a container's environment must hold."""
    secrets: dict[str, set[str]] = {}
    accounts, priorities, queue, runtime = set(), set(), "", ("", "")
    nodes: list[tuple[str, int, dict[str, str], dict[str, float]]] = []
    made = {name_of(one) for one in manifests if one["kind"] == "StagedDataset"}
    used: list[str] = []
    for one in manifests:
        queue = queue or label(one, QUEUE)
        used += used_data(one)
        if one["kind"] == "TrainJob":
            ref = spec(one).get("runtimeRef") or {}
            runtime = (str(ref.get("kind") or "ClusterTrainingRuntime"), str(ref.get("name") or ""))
        if one["kind"] == "StagedDataset":
            asked = spec(one)
            nodes.append((f"data {name_of(one)}", asked.get("replicas", 1), dict(asked.get("nodeSelector") or {}), {}))
            _take_secret(secrets, asked.get("credentials") or {}, keys)
        for count, pod in pod_specs(one):
            nodes.append(("the app", count, dict(pod.get("nodeSelector") or {}), asked_of({"spec": pod})))
            accounts |= {pod["serviceAccountName"]} if pod.get("serviceAccountName") else set()
            priorities |= {pod["priorityClassName"]} if pod.get("priorityClassName") else set()
            _take_secrets(secrets, pod, keys)
    kinds = list(dict.fromkeys((one["apiVersion"], one["kind"]) for one in manifests))
    paths = _host_paths(manifests)
    data = {name: (name not in made, paths.get(name, "")) for name in sorted(set(used))}
    app = label(manifests[-1], APP) if manifests else ""
    return Needs(kinds, queue, secrets, accounts, priorities, runtime, app, data, nodes)


def _host_paths(manifests: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Host paths that pods mount, by the name of the StagedDataset that lies there."""
    found = {}
    for one in manifests:
        keys = {node_key(one["metadata"].get("namespace", ""), name): name for name in used_data(one)}
        for _, pod in pod_specs(one):
            for volume in pod.get("volumes") or ():
                path = str((volume.get("hostPath") or {}).get("path") or "")
                if path.rpartition("/")[2] in keys:
                    found[keys[path.rpartition("/")[2]]] = path
    return found


def _take_secrets(into: dict[str, set[str]], pod: Mapping[str, Any], keys: Iterable[str]) -> None:
    for volume in pod.get("volumes") or ():
        if "secret" in volume:
            items = volume["secret"].get("items") or ()
            into.setdefault(volume["secret"]["secretName"], set()).update(item["key"] for item in items)
    for one in pod.get("imagePullSecrets") or ():
        into.setdefault(one["name"], set()).add(_REGISTRY)
    for container in pod.get("containers") or ():
        for source in container.get("envFrom") or ():
            if "secretRef" in source:
                into.setdefault(source["secretRef"]["name"], set()).update(keys)
        for variable in container.get("env") or ():
            ref = (variable.get("valueFrom") or {}).get("secretKeyRef")
            if ref and not ref.get("optional"):
                into.setdefault(ref["name"], set()).add(ref["key"])


def _take_secret(into: dict[str, set[str]], credentials: Mapping[str, Any], keys: Iterable[str]) -> None:
    if credentials.get("secret"):
        wanted = {credentials["file"]} if credentials.get("file") else set(keys)
        into.setdefault(credentials["secret"], set()).update(wanted)


# -- asking ------------------------------------------------------------------------------------------------------------


def check(cluster: Cluster, wanted: Needs, *, nodes: bool = True) -> Found:
    """Ask the cluster; raises ClusterError where it cannot be reached. `nodes`: whether nodes must be there already,
    which a cluster that makes them when they are needed has not."""
    space = cluster.namespace
    try:
        if cluster.find(path_of("v1", "Namespace", None, space)) is None:
            return Found([Problem(f"namespace {space} does not exist", f"Run: kubectl create namespace {space}")])
    except ForbiddenError:
        pass  # users of one namespace may not look at namespaces; what follows fails if it is not there
    tasks: dict[str, Callable[[], Found]] = {
        f"kind {kind}": partial(_kind, cluster, version, kind) for version, kind in wanted.kinds
    }
    if wanted.queue:
        tasks["queue"] = partial(_queue, cluster, wanted.queue)
    for name, keys in wanted.secrets.items():
        tasks[f"Secret {name}"] = partial(_secret, cluster, name, keys)
    for name in wanted.accounts:
        path = path_of("v1", "ServiceAccount", space, name)
        fix = f"Run: kubectl create serviceaccount {name} -n {space}"
        tasks[f"account {name}"] = partial(_there, cluster, path, f"service account {name}", fix)
    for name in wanted.priorities:
        fix = "`kubectl get priorityclasses` lists them; see priority_class in app.yaml"
        tasks[f"priority {name}"] = partial(_there, cluster, f"{_PRIORITIES}/{name}", f"priority class {name}", fix)
    if wanted.runtime[1]:
        tasks["runtime"] = partial(_runtime, cluster, *wanted.runtime)
    for name in wanted.data:
        tasks[f"data {name}"] = partial(_data, cluster, name, wanted)
    if nodes:
        tasks["nodes"] = partial(_nodes, cluster, wanted)
    answers = [answer for _, answer in sorted(at_once({k: _guarded(k, v) for k, v in tasks.items()}).items())]
    return Found([p for one in answers for p in one.problems], [n for one in answers for n in one.notes])


def refuse(found: Found, app: str) -> None:
    """Raise what stands in the way, if anything does."""
    if not found.problems:
        return
    first = found.problems[0]
    if len(found.problems) == 1:
        raise ClusterError(f"it cannot be deployed: {first.said}", uri=f"app {app}", fix=first.fix)
    said = "".join(f"\n  - {one}" for one in found.problems)
    raise ClusterError(f"it cannot be deployed, for {len(found.problems)} reasons:{said}", uri=f"app {app}")


def _guarded(what: str, ask: Callable[[], Found]) -> Callable[[], Found]:
    def run() -> Found:
        try:
            return ask()
        except ForbiddenError:
            return Found(notes=[f"{what} was not checked: you may not read it"])

    return run


def _kind(cluster: Cluster, version: str, kind: str) -> Found:
    if not cluster.serves(version, kind):
        how = f"Install it: {INSTALL[kind]}" if kind in INSTALL else ""
        return Found([Problem(f"the cluster has no {kind} ({version})", how)])
    verbs = ["create", "get", "list", "delete"] + ["update"] * (kind not in WORKLOADS)
    refused = [verb for verb in verbs if not cluster.may(verb, version, kind)]
    if not refused:
        return Found()
    group = version.rpartition("/")[0]
    resource = f"{PLURALS[kind]}.{group}" if group else PLURALS[kind]
    return Found(
        [
            Problem(
                f"you may not {', '.join(refused)} {resource} in namespace {cluster.namespace}",
                "Ask the cluster's administrator for a role with "
                + ("these verbs" if len(refused) > 1 else "this verb"),
            )
        ]
    )


def _there(cluster: Cluster, path: str, what: str, fix: str) -> Found:
    return Found() if cluster.find(path) else Found([Problem(f"{what} does not exist", fix)])


def _data(cluster: Cluster, name: str, wanted: Needs) -> Found:
    """Whether data that the app does not make itself is there, on enough nodes, and where its pods look for it."""
    must, path = wanted.data[name]
    there = cluster.find(path_of(STAGED_API, "StagedDataset", cluster.namespace, name))
    if there is None:
        fix = "Give its source in app.yaml (stage), so that the app stages it"
        return Found([Problem(f"StagedDataset {name} does not exist", fix)]) if must else Found()
    if not must and label(there, APP) == wanted.app:
        return Found()  # the app's own, and changed by the deploy
    problems = []
    count, has = max((n for what, n, *_ in wanted.nodes if what == "the app"), default=1), spec(there).get("replicas")
    has = has or (None if spec(there).get("nodeSelector") else 1)
    if has is not None and has < count:
        problems.append(
            Problem(
                f"StagedDataset {name} is on {has} node{'s' * (has != 1)}, and the app runs on {count}",
                f"Run: kubectl patch sds {name} -n {cluster.namespace} --type merge "
                f'-p \'{{"spec":{{"replicas":{count}}}}}\', or give the data another name in app.yaml',
            )
        )
    lies = str((there.get("status") or {}).get("hostPath") or "") or str(spec(there).get("dataPath") or "")
    roots = [one.partition("/datasets/")[0] for one in (lies, path)]
    if all(roots) and roots[0] != roots[1]:
        fix = f"Give data_path: {roots[0]} with it in app.yaml"
        problems.append(Problem(f"StagedDataset {name} lies below {roots[0]}, and the app looks below {roots[1]}", fix))
    return Found(problems)


def _queue(cluster: Cluster, name: str) -> Found:
    version = queue_version(cluster)
    if not version:
        return Found([Problem("the cluster has no queues (Kueue)", f"Install it: {INSTALL['LocalQueue']}")])
    found = cluster.find(path_of(version, "LocalQueue", cluster.namespace, name))
    if found is None:
        there = ", ".join(sorted(map(name_of, cluster.list(path_of(version, "LocalQueue", cluster.namespace)))))
        fix = f"There are: {there}" if there else "There are none; Kueue's LocalQueue makes one"
        return Found([Problem(f"queue {name} does not exist in namespace {cluster.namespace}", fix)])
    active = condition(found, "Active")
    if active.get("status") == "False":
        message = " ".join(str(active.get("message") or "").split()).rstrip(".")
        return Found(notes=[f"queue {name} is not active ({message}): the app will wait"])
    return Found()


def _secret(cluster: Cluster, name: str, keys: set[str]) -> Found:
    found = cluster.find(path_of("v1", "Secret", cluster.namespace, name))
    if found is None:
        said = " ".join(f"--from-literal={key}=..." for key in sorted(keys)) or "..."
        how = f"generic {name} -n {cluster.namespace} {said}"
        if keys == {_REGISTRY}:
            how = f"docker-registry {name} -n {cluster.namespace} --docker-server=... --docker-username=..."
        problem = Problem(
            f"Secret {name} does not exist in namespace {cluster.namespace}", f"Run: kubectl create secret {how}"
        )
        return Found([problem])
    has = {*(found.get("data") or {})}
    has |= {_REGISTRY} if ".dockercfg" in has else set()  # the older form, which nodes take as well
    if lacking := sorted(keys - has):
        there = f"It has: {', '.join(sorted(has))}" if has else "It is empty"
        return Found([Problem(f"Secret {name} has no key {' and none '.join(lacking)}", there)])
    return Found()


def _runtime(cluster: Cluster, kind: str, name: str) -> Found:
    if cluster.find(path_of(_RUNTIMES, kind, cluster.namespace, name)) is not None:
        return Found()
    there = ", ".join(sorted(map(name_of, cluster.list(path_of(_RUNTIMES, kind, cluster.namespace)))))
    fix = f"There are: {there}; see runtime in app.yaml" if there else "Install Kubeflow Trainer's runtimes"
    return Found([Problem(f"{kind} {name} does not exist", fix)])


def _nodes(cluster: Cluster, wanted: Needs) -> Found:
    return nodes_found(cluster.list(path_of("v1", "Node")), wanted)


def nodes_found(nodes: Sequence[Object], wanted: Needs) -> Found:
    """Whether the nodes there are can hold what is asked. Pure."""
    problems, notes = [], []
    for what, count, labels, asked in wanted.nodes:
        fit = [one for one in nodes if all(label(one, key) == value for key, value in labels.items())]
        pairs = ", ".join(f"{key}={value}" for key, value in labels.items())
        if labels and not fit:
            problems.append(
                Problem(
                    f"no node has the labels that {what} asks for ({pairs})",
                    "Correct node_selector in app.yaml, or give --no-node-check where nodes come when they are needed",
                )
            )
            continue
        chosen = f" with {pairs}" if pairs else ""
        if count > len(fit):
            many = f"{len(fit)} node{'s' * (len(fit) != 1)}"
            notes.append(f"{what} asks for {count} nodes{chosen}, and the cluster has {many}: it will wait")
        for resource, amount in asked.items():
            largest = max((quantity(one["status"].get("allocatable", {}).get(resource, 0)) for one in fit), default=0.0)
            if fit and amount > largest:
                has = f"none has more than {shown(largest, resource)}" if largest else "none has any"
                each = f"{shown(amount, resource)} {resource} on each node{chosen}"
                notes.append(f"{what} asks for {each}, and {has}: it will wait")
    return Found(list(dict.fromkeys(problems)), list(dict.fromkeys(notes)))
