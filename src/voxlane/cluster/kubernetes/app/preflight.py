"""Check before a deploy what would keep an app from running in a cluster.

`collect_requirements` reads the manifests and does no I/O; `check` asks the cluster, all questions at the same time.
What this user may not read is not checked, and noted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from voxlane.cluster.kubernetes.app import k8s
from voxlane.cluster.kubernetes.app.k8s import Object, Report
from voxlane.cluster.kubernetes.app.pod_diagnosis import format_quantity, get_allocatable, sum_requests
from voxlane.cluster.kubernetes.app.snapshot import find_kueue_version, run_permitted
from voxlane.cluster.kubernetes.client import Cluster, path_of, plural_of
from voxlane.cluster.kubernetes.names import API_VERSION, node_key
from voxlane.errors import ClusterError, ForbiddenError

_APPLY = "kubectl apply --server-side -f https://github.com/kubernetes-sigs/{}/releases/latest/download/manifests.yaml"
INSTALL_COMMANDS = {
    "JobSet": _APPLY.format("jobset"),
    "RayJob": "helm install kuberay-operator kuberay-operator --repo https://ray-project.github.io/kuberay-helm",
    "TrainJob": "kubectl apply --server-side -k "
    '"https://github.com/kubeflow/trainer.git/manifests/overlays/manager?ref=master"',
    "LocalQueue": _APPLY.format("kueue"),
    "StagedDataset": "voxlane operator install",
}
"""Commands that install the kinds which a cluster does not have by itself."""
_TRAINER_VERSION = k8s.WORKLOADS["TrainJob"]
_REGISTRY_KEY = ".dockerconfigjson"
"""Key of a Secret that holds credentials for pulling images."""
_PRIORITY_CLASSES = "/apis/scheduling.k8s.io/v1/priorityclasses"


@dataclass(frozen=True)
class Finding:
    """The result of a check."""

    message: str
    fix: str = ""
    is_note: bool = False
    """Whether the app can be deployed all the same."""

    def __str__(self) -> str:
        return f"{self.message}. {self.fix}" if self.fix else self.message


@dataclass(frozen=True)
class Requirements:
    """What an app's manifests require of a cluster."""

    app: str
    kinds: list[tuple[str, str]]
    """apiVersion and kind of each object to create."""
    queue: str
    secrets: dict[str, set[str]]
    """Keys that each Secret must have; an empty set if it must only exist."""
    accounts: set[str]
    priorities: set[str]
    runtime: Object
    """Kind and name of a TrainJob's runtime; {} if none."""
    data: dict[str, tuple[bool, str]]
    """StagedDatasets that the app's pods use: whether each must exist already, and the host path that pods mount."""
    nodes: list[tuple[str, int, dict[str, str], dict[str, float]]]
    """User ("the app" or a dataset), number of nodes, their labels, and the resources that each pod requests."""


def collect_requirements(manifests: Sequence[Object], *, keys: Iterable[str] = ()) -> Requirements:
    """Return what manifests require. `keys` are the variables of a Secret that becomes a container's environment."""
    *_, workload = manifests
    counted_pods = [item for manifest in manifests for item in k8s.list_pod_specs(manifest)]
    pods = [pod for _, pod in counted_pods]
    own_data = {k8s.name_of(item): k8s.spec(item) for item in manifests if item["kind"] == "StagedDataset"}
    volumes = [volume for pod in pods for volume in pod.get("volumes", ())]
    host_paths = {str(volume["hostPath"]["path"]) for volume in volumes if "hostPath" in volume}
    paths, namespace = {path.rpartition("/")[2]: path for path in host_paths}, workload["metadata"].get("namespace", "")
    users = [(f"data {name}", dataset.get("replicas", 1), dataset) for name, dataset in own_data.items()]
    users += [("the app", count, pod) for count, pod in counted_pods]
    return Requirements(
        app=k8s.label(workload, k8s.APP_LABEL),
        kinds=list(dict.fromkeys((manifest["apiVersion"], manifest["kind"]) for manifest in manifests)),
        queue=k8s.label(workload, k8s.QUEUE_LABEL),
        secrets=_collect_secrets(own_data.values(), pods, set(keys)),
        accounts={*filter(None, (pod.get("serviceAccountName") for pod in pods))},
        priorities={*filter(None, (pod.get("priorityClassName") for pod in pods))},
        runtime=k8s.spec(workload).get("runtimeRef") or {},
        data={
            name: (name not in own_data, paths.get(node_key(namespace, name), ""))
            for name in k8s.list_used_datasets(workload)
        },
        nodes=[
            (user, count, dict(spec.get("nodeSelector", {})), sum_requests({"spec": spec}))
            for user, count, spec in users
        ],
    )


def _collect_secrets(datasets: Iterable[Object], pods: Iterable[Object], keys: set[str]) -> dict[str, set[str]]:
    """Return the names of the Secrets that datasets and pods use, with the keys that each must have."""
    secrets: dict[str, set[str]] = defaultdict(set)
    for dataset in datasets:
        credentials = dataset.get("credentials") or {}
        if credentials.get("secret"):
            secrets[credentials["secret"]] |= {credentials["file"]} if credentials.get("file") else keys
    for pod in pods:
        for secret in (volume["secret"] for volume in pod.get("volumes") or () if "secret" in volume):
            secrets[secret["secretName"]] |= {item["key"] for item in secret.get("items") or ()}
        for secret in pod.get("imagePullSecrets") or ():
            secrets[secret["name"]].add(_REGISTRY_KEY)
        for container in pod.get("containers") or ():
            for name, container_keys in _list_container_secrets(container, keys):
                secrets[name] |= container_keys
    return secrets


def _list_container_secrets(container: Object, keys: set[str]) -> Iterator[tuple[str, set[str]]]:
    for source in container.get("envFrom") or ():
        if "secretRef" in source:
            yield source["secretRef"]["name"], keys
    for variable in container.get("env") or ():
        reference = (variable.get("valueFrom") or {}).get("secretKeyRef")
        if reference and not reference.get("optional"):
            yield reference["name"], {reference["key"]}


# -- checks ------------------------------------------------------------------------------------------------------------


def check(cluster: Cluster, requirements: Requirements, *, nodes: bool, report: Report) -> None:
    """Check requirements against the cluster: report notes, and raise ClusterError for problems or an unreachable
    cluster. `nodes` says whether nodes must exist already, which is not the case if they are created on demand."""
    findings = _collect_findings(cluster, requirements, nodes=nodes)
    for note in (finding.message for finding in findings if finding.is_note):
        report(note)
    problems, uri = [finding for finding in findings if not finding.is_note], f"app {requirements.app}"
    if len(problems) == 1:
        raise ClusterError(f"it cannot be deployed: {problems[0].message}", uri=uri, fix=problems[0].fix)
    if problems:
        listed = "".join(f"\n  - {problem}" for problem in problems)
        raise ClusterError(f"it cannot be deployed, for {len(problems)} reasons:{listed}", uri=uri)


def _collect_findings(cluster: Cluster, requirements: Requirements, *, nodes: bool) -> list[Finding]:
    namespace = cluster.namespace
    try:
        if cluster.find(path_of("v1", "Namespace", None, namespace)) is None:
            return [Finding(f"namespace {namespace} does not exist", f"Run: kubectl create namespace {namespace}")]
    except ForbiddenError:
        pass  # users of one namespace may not read namespaces; the other checks fail if it does not exist
    tasks: dict[str, Callable[[], list[Finding]]] = {
        f"kind {kind}": partial(_check_kind, cluster, version, kind) for version, kind in requirements.kinds
    }
    if requirements.queue:
        tasks["queue"] = partial(_check_queue, cluster, requirements.queue)
    for name, keys in requirements.secrets.items():
        tasks[f"Secret {name}"] = partial(_check_secret, cluster, name, keys)
    for name in requirements.accounts:
        path = path_of("v1", "ServiceAccount", namespace, name)
        fix = f"Run: kubectl create serviceaccount {name} -n {namespace}"
        tasks[f"account {name}"] = partial(_check_exists, cluster, path, f"service account {name}", fix)
    for name in requirements.priorities:
        fix = "`kubectl get priorityclasses` lists them; see priority_class in app.yaml"
        path = f"{_PRIORITY_CLASSES}/{name}"
        tasks[f"priority {name}"] = partial(_check_exists, cluster, path, f"priority class {name}", fix)
    if requirements.runtime:
        tasks["runtime"] = partial(_check_runtime, cluster, requirements.runtime["kind"], requirements.runtime["name"])
    for name in requirements.data:
        tasks[f"data {name}"] = partial(_check_data, cluster, name, requirements)
    if nodes:
        tasks["nodes"] = lambda: check_nodes(cluster.list(path_of("v1", "Node")), requirements)
    results, forbidden = run_permitted(tasks)
    for name in forbidden:
        results[name] = [Finding(f"{name} was not checked: you may not read it", is_note=True)]
    return [finding for name in sorted(results) for finding in results[name]]


def _check_kind(cluster: Cluster, version: str, kind: str) -> list[Finding]:
    if not cluster.serves(version, kind):
        fix = f"Install it: {INSTALL_COMMANDS[kind]}" if kind in INSTALL_COMMANDS else ""
        return [Finding(f"the cluster has no {kind} ({version})", fix)]
    verbs = ["create", "get", "list", "delete"] + ["update"] * (kind not in k8s.WORKLOADS)
    refused = [verb for verb in verbs if not cluster.may(verb, version, kind)]
    if not refused:
        return []
    group = version.rpartition("/")[0]
    resource = f"{plural_of(kind)}.{group}" if group else plural_of(kind)
    fix = f"Ask the cluster's administrator for a role with {'these verbs' if len(refused) > 1 else 'this verb'}"
    return [Finding(f"you may not {', '.join(refused)} {resource} in namespace {cluster.namespace}", fix)]


def _check_exists(cluster: Cluster, path: str, title: str, fix: str) -> list[Finding]:
    return [] if cluster.find(path) else [Finding(f"{title} does not exist", fix)]


def _check_data(cluster: Cluster, name: str, requirements: Requirements) -> list[Finding]:
    """Check that data which the app does not stage itself is on enough nodes and at the path that its pods mount."""
    must_exist, path = requirements.data[name]
    dataset = cluster.find(path_of(API_VERSION, "StagedDataset", cluster.namespace, name))
    if dataset is None:
        fix = "Give its source in app.yaml (stage), so that the app stages it"
        return [Finding(f"StagedDataset {name} does not exist", fix)] if must_exist else []
    if not must_exist and k8s.label(dataset, k8s.APP_LABEL) == requirements.app:
        return []  # it belongs to the app, and the deploy changes it
    problems, spec = [], k8s.spec(dataset)
    required = max((count for user, count, *_ in requirements.nodes if user == "the app"), default=1)
    replicas = spec.get("replicas") or (None if spec.get("nodeSelector") else 1)
    if replicas is not None and replicas < required:
        message = f"StagedDataset {name} is on {k8s.count_noun(replicas, 'node')}, but the app runs on {required}"
        patch = f'{{"spec":{{"replicas":{required}}}}}'
        fix = f"Run: kubectl patch sds {name} -n {cluster.namespace} --type merge -p '{patch}'"
        problems.append(Finding(message, f"{fix}, or give the data another name in app.yaml"))
    actual_path = str(k8s.status(dataset).get("hostPath") or spec.get("dataPath") or "")
    actual_root, mounted_root = (text.partition("/datasets/")[0] for text in (actual_path, path))
    if actual_root and mounted_root and actual_root != mounted_root:
        message = f"StagedDataset {name} is below {actual_root}, but the app expects it below {mounted_root}"
        problems.append(Finding(message, f"Give data_path: {actual_root} with it in app.yaml"))
    return problems


def _list_names(cluster: Cluster, version: str, kind: str) -> str:
    return ", ".join(sorted(map(k8s.name_of, cluster.list(path_of(version, kind, cluster.namespace)))))


def _check_queue(cluster: Cluster, name: str) -> list[Finding]:
    version = find_kueue_version(cluster)
    if not version:
        return [Finding("the cluster has no queues (Kueue)", f"Install it: {INSTALL_COMMANDS['LocalQueue']}")]
    queue = cluster.find(path_of(version, "LocalQueue", cluster.namespace, name))
    if queue is None:
        names = _list_names(cluster, version, "LocalQueue")
        fix = f"There are: {names}" if names else "There are none; create a LocalQueue of Kueue"
        return [Finding(f"queue {name} does not exist in namespace {cluster.namespace}", fix)]
    active = k8s.condition(queue, "Active")
    reason = k8s.collapse_message(active.get("message"))
    is_inactive = active.get("status") == "False"
    return [Finding(f"queue {name} is not active ({reason}): the app will wait", is_note=True)] if is_inactive else []


def _check_secret(cluster: Cluster, name: str, keys: set[str]) -> list[Finding]:
    secret = cluster.find(path_of("v1", "Secret", cluster.namespace, name))
    if secret is None:
        kind, values = "generic", " ".join(f"--from-literal={key}=..." for key in sorted(keys)) or "..."
        if keys == {_REGISTRY_KEY}:
            kind, values = "docker-registry", "--docker-server=... --docker-username=..."
        fix = f"Run: kubectl create secret {kind} {name} -n {cluster.namespace} {values}"
        return [Finding(f"Secret {name} does not exist in namespace {cluster.namespace}", fix)]
    existing = {*(secret.get("data") or {})}
    existing |= {_REGISTRY_KEY} if ".dockercfg" in existing else set()  # the older form, which nodes accept too
    missing = sorted(keys - existing)
    fix = f"It has: {', '.join(sorted(existing))}" if existing else "It is empty"
    return [Finding(f"Secret {name} has no key {' or '.join(missing)}", fix)] if missing else []


def _check_runtime(cluster: Cluster, kind: str, name: str) -> list[Finding]:
    if cluster.find(path_of(_TRAINER_VERSION, kind, cluster.namespace, name)) is not None:
        return []
    names = _list_names(cluster, _TRAINER_VERSION, kind)
    fix = f"There are: {names}; see runtime in app.yaml" if names else "Install Kubeflow Trainer's runtimes"
    return [Finding(f"{kind} {name} does not exist", fix)]


def check_nodes(nodes: Sequence[Object], requirements: Requirements) -> list[Finding]:
    """Check whether the existing nodes are enough. Pure."""
    findings = []
    for user, count, labels, requests in requirements.nodes:
        selected = [node for node in nodes if all(k8s.label(node, key) == value for key, value in labels.items())]
        selector = ", ".join(f"{key}={value}" for key, value in labels.items())
        if labels and not selected:
            fix = "Correct node_selector in app.yaml, or give --no-node-check if nodes are created on demand"
            findings.append(Finding(f"no node has the labels that {user} requires ({selector})", fix))
            continue
        with_labels = f" with {selector}" if selector else ""
        shortages = []
        if count > len(selected):
            existing = k8s.count_noun(len(selected), "node")
            shortages.append(f"{count} nodes{with_labels}, but the cluster has {existing}")
        for resource, amount in requests.items():
            largest = max((get_allocatable(node, resource) for node in selected), default=0.0)
            if selected and amount > largest:
                limit = f"none has more than {format_quantity(largest, resource)}" if largest else "none has any"
                request = f"{format_quantity(amount, resource)} {resource} on each node{with_labels}"
                shortages.append(f"{request}, but {limit}")
        findings += [Finding(f"{user} requests {shortage}: it will wait", is_note=True) for shortage in shortages]
    return list(dict.fromkeys(findings))
