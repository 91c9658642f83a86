"""Check before a deploy what would keep an app from running in a cluster.

`check` asks the cluster all questions at the same time. What this user may not read is not checked, and noted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from voxlane.cluster.kubernetes.app import k8s, render
from voxlane.cluster.kubernetes.app.config import App, Stage
from voxlane.cluster.kubernetes.app.k8s import Object, Report
from voxlane.cluster.kubernetes.app.pod import build_resources, list_bucket_schemes
from voxlane.cluster.kubernetes.app.pod_diagnosis import format_quantity, get_allocatable, parse_quantity
from voxlane.cluster.kubernetes.app.snapshot import find_kueue_version, run_permitted
from voxlane.cluster.kubernetes.client import Cluster, path_of, plural_of
from voxlane.cluster.kubernetes.credentials import REQUIRED_VARIABLES
from voxlane.cluster.kubernetes.names import API_VERSION, node_folder
from voxlane.cluster.kubernetes.pod_security import find_violations, get_enforced_level, list_pod_templates
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
"""Commands that install the kinds that a plain cluster lacks."""
_REGISTRY_KEY = ".dockerconfigjson"
"""Key of a Secret that holds credentials for pulling images."""
_PRIORITY_CLASSES = "/apis/scheduling.k8s.io/v1/priorityclasses"


@dataclass(frozen=True)
class Finding:
    """The result of a check."""

    message: str
    fix: str = ""
    is_note: bool = False
    """Whether the app can be deployed anyway."""

    def __str__(self) -> str:
        return f"{self.message}. {self.fix}" if self.fix else self.message


def list_secrets(app: App) -> dict[str, set[str]]:
    """Return the names of the Secrets that an app's pods and data use, with the keys that each must have."""
    secrets: dict[str, set[str]] = defaultdict(set)
    name, file = app.credentials.secret, app.credentials.file
    # The variables of a TrainJob are optional, because they name each key that the Secret may have.
    if name and (file or app.template != "trainjob" or any(stage.source for stage in app.stage)):
        variables = {key for scheme in list_bucket_schemes(app) for key in REQUIRED_VARIABLES.get(scheme, ())}
        secrets[name] |= {file} if file else variables
    if app.pull_secret:
        secrets[app.pull_secret].add(_REGISTRY_KEY)
    return secrets


# -- checks ------------------------------------------------------------------------------------------------------------


def check(cluster: Cluster, app: App, manifests: Sequence[Object], *, nodes: bool, report: Report) -> None:
    """Check an app and its manifests against the cluster: report notes, and raise ClusterError for problems or an
    unreachable cluster. `nodes` says whether nodes must exist already, which is not the case if they are created on
    demand."""
    findings = _collect_findings(cluster, app, manifests, nodes=nodes)
    for note in (finding.message for finding in findings if finding.is_note):
        report(note)
    problems, uri = [finding for finding in findings if not finding.is_note], f"app {app.name}"
    if len(problems) == 1:
        raise ClusterError(f"it cannot be deployed: {problems[0].message}", uri=uri, fix=problems[0].fix)
    if problems:
        listed = "".join(f"\n  - {problem}" for problem in problems)
        raise ClusterError(f"it cannot be deployed, for {len(problems)} reasons:{listed}", uri=uri)


def _collect_findings(cluster: Cluster, app: App, manifests: Sequence[Object], *, nodes: bool) -> list[Finding]:
    namespace = cluster.namespace
    try:
        existing = cluster.find(path_of("v1", "Namespace", None, namespace))
        if existing is None:
            return [Finding(f"namespace {namespace} does not exist", f"Run: kubectl create namespace {namespace}")]
        security = check_pod_security(get_enforced_level(existing), app, manifests)
    except ForbiddenError:
        # Users of one namespace may not read namespaces; the other checks fail if it does not exist.
        security = [Finding("Pod Security was not checked: you may not read the namespace", is_note=True)]
    kinds = {manifest["kind"]: manifest["apiVersion"] for manifest in manifests}
    tasks: dict[str, Callable[[], list[Finding]]] = {
        f"kind {kind}": partial(_check_kind, cluster, version, kind) for kind, version in kinds.items()
    }
    for name, keys in list_secrets(app).items():
        tasks[f"Secret {name}"] = partial(_check_secret, cluster, name, keys)
    if account := app.credentials.service_account:
        path = path_of("v1", "ServiceAccount", namespace, account)
        fix = f"Run: kubectl create serviceaccount {account} -n {namespace}"
        tasks[f"account {account}"] = partial(_check_exists, cluster, path, f"service account {account}", fix)
    if app.template != "tensorboard":  # its Deployment has neither a queue nor a priority
        if app.queue:
            tasks["queue"] = partial(_check_queue, cluster, app.queue)
        if priority := app.priority_class:
            fix = "`kubectl get priorityclasses` lists them; see priority_class in app.yaml"
            path = f"{_PRIORITY_CLASSES}/{priority}"
            tasks[f"priority {priority}"] = partial(_check_exists, cluster, path, f"priority class {priority}", fix)
    if app.template == "trainjob":
        tasks["runtime"] = partial(_check_runtime, cluster, app.runtime)
    for stage in app.stage:
        tasks[f"data {stage.name}"] = partial(_check_data, cluster, stage, app)
    if nodes:
        tasks["nodes"] = lambda: check_nodes(cluster.list(path_of("v1", "Node")), app, manifests)
    results, forbidden = run_permitted(tasks)
    for name in forbidden:
        results[name] = [Finding(f"{name} was not checked: you may not read it", is_note=True)]
    return [*security, *(finding for name in sorted(results) for finding in results[name])]


def check_pod_security(level: str, app: App, manifests: Sequence[Object]) -> list[Finding]:
    """Return what a namespace that enforces a level would refuse about the pods of an app and of its data. Pure."""
    if level == "privileged":
        return []
    findings = [Finding(f"the namespace enforces the Pod Security level {level}", is_note=True)]
    for manifest in manifests:
        title = k8s.title_of(manifest)
        refused = [line for template in list_pod_templates(manifest) for line in find_violations(template, level)]
        if refused:
            fix = "Set user in app.yaml to the id of a user other than root" if app.user == 0 else ""
            reasons = "; ".join(dict.fromkeys(refused))
            findings.append(Finding(f"the namespace would refuse the pods of {title}: {reasons}", fix))
        if manifest["kind"] == "StagedDataset" and level == "restricted":
            source = str(k8s.spec(manifest).get("source"))
            if source.startswith("nfs://"):
                message = f"the namespace would refuse the pods that copy {title}: volume source is of the type nfs"
                findings.append(Finding(message, f"Copy {source} to a bucket, or to a PersistentVolume of your own"))
    return findings


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


def _check_data(cluster: Cluster, stage: Stage, app: App) -> list[Finding]:
    """Check that data which the app does not stage itself is on enough nodes and at the path that its pods mount."""
    name = stage.name
    dataset = cluster.find(path_of(API_VERSION, "StagedDataset", cluster.namespace, name))
    if dataset is None:
        fix = "Give its source in app.yaml (stage), so that the app stages it"
        return [Finding(f"StagedDataset {name} does not exist", fix)] if stage.source is None else []
    if stage.source is not None and k8s.label(dataset, k8s.APP_LABEL) == app.name:
        return []  # it belongs to the app, and the deploy changes it
    problems, spec = [], k8s.spec(dataset)
    replicas = spec.get("replicas") or (None if spec.get("nodeSelector") else 1)
    if replicas is not None and replicas < app.nodes:
        message = f"StagedDataset {name} is on {k8s.count_noun(replicas, 'node')}, but the app runs on {app.nodes}"
        patch = f'{{"spec":{{"replicas":{app.nodes}}}}}'
        fix = f"Run: kubectl patch sds {name} -n {cluster.namespace} --type merge -p '{patch}'"
        problems.append(Finding(message, f"{fix}, or give the data another name in app.yaml"))
    actual_path = str(k8s.status(dataset).get("hostPath") or spec.get("dataPath") or "")
    actual_root = actual_path.partition("/datasets/")[0].removesuffix(node_folder("", cluster.namespace))
    mounted_root = stage.data_path.rstrip("/")
    if actual_root and actual_root != mounted_root:
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


def _check_runtime(cluster: Cluster, name: str) -> list[Finding]:
    version, kind = k8s.WORKLOADS["TrainJob"], "ClusterTrainingRuntime"
    if cluster.find(path_of(version, kind, None, name)) is not None:
        return []
    names = _list_names(cluster, version, kind)
    fix = f"There are: {names}; see runtime in app.yaml" if names else "Install Kubeflow Trainer's runtimes"
    return [Finding(f"{kind} {name} does not exist", fix)]


def list_node_requests(
    app: App, manifests: Sequence[Object]
) -> list[tuple[str, int, Mapping[str, str], Mapping[str, str]]]:
    """Return who requests nodes ("the app" or a dataset), how many, their labels, and what each pod requests. Pure."""
    training_pods = (app.nodes, app.node_selector, build_resources(app, app.resources))
    pods: list[tuple[int, Mapping[str, str], Object]] = [training_pods]
    if app.template == "rayjob":
        head, submitter = (build_resources(app, item, devices=False) for item in (app.head, render.SUBMITTER_RESOURCES))
        pods = [(1, {}, head), training_pods, (1, {}, submitter)]
    elif app.template == "tensorboard":
        pods = [(1, {}, build_resources(app, render.TENSORBOARD_RESOURCES, devices=False))]
    datasets = [item for item in manifests if item["kind"] == "StagedDataset"]
    data_specs = [(f"data {k8s.name_of(item)}", k8s.spec(item)) for item in datasets]
    return [
        *((user, spec.get("replicas", 1), spec.get("nodeSelector", {}), {}) for user, spec in data_specs),
        *(("the app", count, labels, resources.get("requests", {})) for count, labels, resources in pods),
    ]


def check_nodes(nodes: Sequence[Object], app: App, manifests: Sequence[Object]) -> list[Finding]:
    """Check whether the existing nodes are enough. Pure."""
    findings = []
    for user, count, labels, requests in list_node_requests(app, manifests):
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
        for resource, quantity in requests.items():
            amount = parse_quantity(quantity)
            largest = max((get_allocatable(node, resource) for node in selected), default=0.0)
            if selected and amount > largest:
                limit = f"none has more than {format_quantity(largest, resource)}" if largest else "none has any"
                request = f"{format_quantity(amount, resource)} {resource} on each node{with_labels}"
                shortages.append(f"{request}, but {limit}")
        findings += [Finding(f"{user} requests {shortage}: it will wait", is_note=True) for shortage in shortages]
    return list(dict.fromkeys(findings))
