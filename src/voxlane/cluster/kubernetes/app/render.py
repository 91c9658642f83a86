"""Render an app as manifests. Pure: no file, no cluster, no clock; the same app always renders the same."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import yaml

from voxlane.cluster.commands import STOPPED
from voxlane.cluster.kubernetes.app import pod
from voxlane.cluster.kubernetes.app.config import REPLICATED_JOB, App, Resources, Stage
from voxlane.cluster.kubernetes.app.k8s import APP_LABEL, BOARD
from voxlane.cluster.kubernetes.app.pod import Manifest
from voxlane.cluster.kubernetes.names import API_VERSION
from voxlane.cluster.kubernetes.pod_security import CONTAINER_SECURITY
from voxlane.errors import ConfigError

RAY_VERSION = "2.60.0"
"""Version of Ray in the image: KubeRay starts Ray with that version's options."""
_OBJECT_STORE_BYTES = 200_000_000
"""Nothing large passes through the object store, because data comes from the bucket and gradients use gloo or NCCL."""
_LINGER_S = 300
"""How long the pods of a finished RayJob stay; their logs are in the bucket."""
_RAY_ENV = [{"name": "RAY_USAGE_STATS_ENABLED", "value": "0"}]
SUBMITTER_RESOURCES = Resources(cpu="500m", memory="512Mi")
TENSORBOARD_PORT = 6006
"""Port on the pod's loopback address: only users who may forward a port to the pod can see it."""
TENSORBOARD_RESOURCES = Resources(cpu="250m", memory="2Gi")


def render(app: App, image: str, *, namespace: str = "default") -> list[Manifest]:
    """Return the manifests of an app in the order to apply them: files, data, and the workload last."""
    if missing := set(app.file_names) - set(app.files):
        raise ConfigError(f"{min(missing)} was not read", fix="Load the app with App.load(folder)")
    app = replace(app, image=image, namespace=namespace)
    metadata = pod.build_metadata(app, f"{app.name}-config", pod.build_labels(app, "config"))
    files = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": dict(app.files)}
    data = [_render_data(app, stage) for stage in app.stage if stage.source]
    return _add_hash([*([files] if app.files else []), *data, _RENDERERS[app.template](app)])


def render_tensorboard(app: App, image: str, *, namespace: str = "default") -> list[Manifest]:
    """Return the manifests of a TensorBoard of the app's run, which outlives the training."""
    return _add_hash([_render_board(replace(app, image=image, namespace=namespace))])


def hash_manifests(manifests: Sequence[Manifest]) -> str:
    """Return a hash of manifests that does not depend on the order of their fields."""
    return hashlib.sha256(json.dumps(manifests, sort_keys=True).encode()).hexdigest()[:16]


def to_yaml(manifests: Sequence[Manifest]) -> str:
    """Return manifests as one YAML text of several documents."""
    text: str = yaml.dump_all(manifests, Dumper=_Dumper, sort_keys=False, explicit_start=True, width=120)
    return text


def _add_hash(manifests: list[Manifest]) -> list[Manifest]:
    """Annotate the workload, which is the last manifest, with the hash of all manifests."""
    manifests[-1]["metadata"]["annotations"]["voxlane.dev/content"] = hash_manifests(manifests)
    return manifests


def _render_data(app: App, stage: Stage) -> Manifest:
    selector = stage.node_selector if stage.node_selector is not None else app.node_selector
    credentials = {
        "secret": app.credentials.secret,
        "file": app.credentials.file,
        "serviceAccount": app.credentials.service_account,
        "endpoint": app.credentials.endpoint,
    }
    spec = {
        "source": stage.source,
        "replicas": stage.replicas or (app.nodes if not stage.node_selector else None),
        "nodeSelector": dict(selector),
        "tolerations": _list_data_tolerations(app),
        "capacity": stage.capacity,
        "dataPath": stage.data_path,
        "credentials": pod.drop_empty(credentials),
        "timeout": stage.timeout,
        "keep": stage.keep,
    }
    return {
        "apiVersion": API_VERSION,
        "kind": "StagedDataset",
        "metadata": pod.build_metadata(app, stage.name, pod.build_labels(app, "data")),
        "spec": pod.drop_empty(spec),
    }


def _list_data_tolerations(app: App) -> list[dict[str, Any]]:
    """Return the taints of nodes that may hold data: those that the app names, and that of its GPUs, which the cluster
    itself adds only to pods that request GPUs."""
    named = [pod.drop_empty(dataclasses.asdict(toleration)) for toleration in app.tolerations]
    if app.device == "gpu" and not any(toleration["key"] == app.gpu_resource for toleration in named):
        named.append({"key": app.gpu_resource, "operator": "Exists"})
    return named


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Writes YAML without anchors, with indented lists and with text of several lines as blocks."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _represent_text(dumper: Any, value: str) -> Any:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _represent_text)


# -- JobSet ------------------------------------------------------------------------------------------------------------


def _render_jobset(app: App) -> Manifest:
    """Return a JobSet: one pod on each node, whose ranks find each other by name and restart together."""
    stopped = {"containerName": REPLICATED_JOB, "operator": "In", "values": [STOPPED]}
    job = {
        "metadata": {"labels": pod.build_job_labels(app)},
        "spec": {
            "parallelism": app.nodes,
            "completions": app.nodes,
            "completionMode": "Indexed",
            "backoffLimit": 0,
            "podFailurePolicy": {
                "rules": [
                    {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                    # Ranks on other nodes that saved and stopped because one rank had to. Only of this container: a
                    # sidecar that the cluster adds is stopped in the same way after every crash, which must count.
                    {"action": "FailJob", "onExitCodes": stopped},
                ]
            },
            "template": _build_jobset_pod(app),
        },
    }
    # Preemptions, evictions and lost nodes are not failures of the app: they do not count.
    action = "RestartJobSetAndIgnoreMaxRestarts"
    disrupted = {"name": "disrupted", "action": action, "onJobFailureReasons": ["PodFailurePolicy"]}
    return pod.build_workload(
        app,
        {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "successPolicy": {"operator": "All", "targetReplicatedJobs": [REPLICATED_JOB]},
            "failurePolicy": {"maxRestarts": app.restarts, "rules": [disrupted]},
            **({"ttlSecondsAfterFinished": app.ttl_s} if app.ttl_s is not None else {}),
            "replicatedJobs": [{"name": REPLICATED_JOB, "replicas": 1, "template": job}],
        },
    )


def _build_jobset_pod(app: App) -> dict[str, Any]:
    torchrun_options = {
        "nnodes": app.nodes,
        "nproc-per-node": app.devices_per_node,
        "node-rank": "$(JOB_COMPLETION_INDEX)",
        "master-addr": f"{app.name}-{REPLICATED_JOB}-0-0.{app.name}",
        "master-port": pod.RANK_ZERO_PORT,
    }
    node_options = [f"--{name}={value}" for name, value in torchrun_options.items()]
    torchrun_env: list[dict[str, Any]] = []
    if app.command is not None and app.parallel is None:
        # With torchrun's own variables, the user's torchrun finds the other ranks; voxlane's commands get options.
        del torchrun_options["node-rank"]  # the Job adds its variable after these, which cannot refer to it
        variables = {f"PET_{name.upper().replace('-', '_')}": str(value) for name, value in torchrun_options.items()}
        index = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
        torchrun_env = [{"name": name, "value": value} for name, value in variables.items()]
        torchrun_env.append({"name": "PET_NODE_RANK", "valueFrom": index})
    fields = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": app.grace_s,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        **pod.build_placement(app, pod.build_selector(app, "job")),
    }
    resources, command = pod.build_resources(app, app.resources), pod.build_ranks_command(app, node_options)
    spec = pod.build_pod_spec(app, REPLICATED_JOB, resources, fields, env=torchrun_env, **command)
    return {"metadata": pod.build_pod_metadata(app), "spec": spec}


# -- RayJob ------------------------------------------------------------------------------------------------------------


def _render_rayjob(app: App) -> Manifest:
    """Return a RayJob: a Ray cluster for one search or benchmark, which is removed when that has ended."""
    return pod.build_workload(
        app,
        {
            "entrypoint": shlex.join([*pod.build_entry_command(app), *pod.build_work_command(app)]),
            "backoffLimit": app.restarts,
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": _LINGER_S if app.ttl_s is None else app.ttl_s,
            "submitterPodTemplate": _build_submitter(app),
            "rayClusterSpec": {
                "rayVersion": RAY_VERSION,
                # Without a token, everyone who reaches Ray could run anything with the app's credentials.
                "authOptions": {"mode": "token"},
                "headGroupSpec": _build_head(app),
                "workerGroupSpecs": [_build_workers(app)],
            },
        },
    )


def _build_head(app: App) -> dict[str, Any]:
    fields = {
        "terminationGracePeriodSeconds": app.grace_s,
        **pod.build_identity(app),
        **pod.drop_empty({"priorityClassName": app.priority_class}),
    }
    resources = pod.build_resources(app, app.head, devices=False)
    # The head may be on a node without the data.
    spec = pod.build_pod_spec(app, "ray-head", resources, fields, env=_RAY_ENV, data=False)
    ports = {"gcs-server": 6379, "dashboard": 8265, "client": 10001}
    spec["containers"][0]["ports"] = [{"name": name, "containerPort": port} for name, port in ports.items()]
    options = {"dashboard-host": "0.0.0.0", "num-cpus": "0", "num-gpus": "0"}
    labels = pod.build_labels(app, "job") | pod.build_identity_labels(app)
    return {
        "rayStartParams": {"object-store-memory": str(_OBJECT_STORE_BYTES), **options},
        "template": {"metadata": {"labels": labels}, "spec": spec},
    }


def _build_workers(app: App) -> dict[str, Any]:
    worker_label = {"voxlane.dev/ray": "worker"}
    fields = {
        "terminationGracePeriodSeconds": app.grace_s,
        **pod.build_placement(app, pod.build_selector(app, "job") | worker_label),
    }
    resources = pod.build_resources(app, app.resources)
    gpus = app.devices_per_node if app.device == "gpu" else 0
    options = {"num-cpus": str(pod.count_ray_cpus(app)), "num-gpus": str(gpus)}
    return {
        "groupName": "workers",
        "replicas": app.nodes,
        "minReplicas": app.nodes,
        "maxReplicas": app.nodes,
        "rayStartParams": {"object-store-memory": str(_OBJECT_STORE_BYTES), **options},
        "template": {
            "metadata": pod.build_pod_metadata(app, worker_label),
            "spec": pod.build_pod_spec(app, "ray-worker", resources, fields, env=_RAY_ENV),
        },
    }


def _build_submitter(app: App) -> dict[str, Any]:
    """Return the pod that submits the command to Ray and prints its output; KubeRay fills in its command."""
    container = {
        "name": "ray-job-submitter",
        "image": app.image,
        "imagePullPolicy": "IfNotPresent",
        "resources": pod.build_resources(app, SUBMITTER_RESOURCES, devices=False),
        "securityContext": CONTAINER_SECURITY,
    }
    spec = {"restartPolicy": "Never", **pod.build_identity(app), "securityContext": pod.build_security(app)}
    return {"metadata": {"labels": pod.build_labels(app, "job")}, "spec": {**spec, "containers": [container]}}


# -- TrainJob ----------------------------------------------------------------------------------------------------------


def _render_trainjob(app: App) -> Manifest:
    """Return a TrainJob of Kubeflow Trainer: its runtime creates the JobSet and decides how often it restarts."""
    credentials, env = app.credentials, pod.build_environment(app)
    if credentials.secret and not credentials.file:  # a variable for each key, because a TrainJob has no envFrom
        names = {variable["name"] for variable in env}
        env += credentials.list_secret_variables(*pod.list_bucket_schemes(app), exclude=names)
    volumes, mounts = pod.build_volumes(app)
    container = {"name": REPLICATED_JOB, "securityContext": CONTAINER_SECURITY}
    template = {
        "metadata": pod.build_pod_metadata(app),
        "spec": {
            "terminationGracePeriodSeconds": app.grace_s,
            **pod.build_placement(app, pod.build_selector(app, "job")),
            "securityContext": pod.build_security(app),
            "containers": [container | pod.drop_empty({"volumeMounts": mounts})],
            **pod.drop_empty({"volumes": volumes}),
        },
    }
    # The changes that a TrainJob may make to its runtime's JobSet.
    patch = {
        "metadata": {"labels": pod.build_job_labels(app)},
        "spec": {"replicatedJobs": [{"name": REPLICATED_JOB, "template": {"spec": {"template": template}}}]},
    }
    runtime = {"apiGroup": "trainer.kubeflow.org", "kind": "ClusterTrainingRuntime", "name": app.runtime}
    return pod.build_workload(
        app,
        {
            "runtimeRef": runtime,
            "trainer": {
                "image": app.image,
                # The runtime sets torchrun's own variables: the node's rank, the number of nodes, the host of rank 0.
                **pod.build_ranks_command(app),
                "env": env,
                "numNodes": app.nodes,
                "numProcPerNode": app.devices_per_node,
                **pod.drop_empty({"resourcesPerNode": pod.build_resources(app, app.resources)}),
            },
            "runtimePatches": [{"manager": APP_LABEL, "trainingRuntimeSpec": {"template": patch}}],
        },
    )


# -- TensorBoard -------------------------------------------------------------------------------------------------------


def _render_board(app: App) -> Manifest:
    """Return the Deployment of the app's TensorBoard, which reads the run's bucket and outlives the training."""
    if app.run_uri is None:
        raise ConfigError("run: missing, so there is nothing to show", fix="Give run: gs://BUCKET/RUN")
    port = TENSORBOARD_PORT
    probe = f"import urllib.request as u; u.urlopen('http://127.0.0.1:{port}/', timeout=5)"
    pod_spec = pod.build_pod_spec(
        app,
        BOARD,
        pod.build_resources(app, TENSORBOARD_RESOURCES, devices=False),
        {
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": 10,
            **pod.build_identity(app),
        },
        data=False,
        files=False,
        command=["voxlane", "tensorboard", app.run_uri, "--port", str(port), "--no-open", "--wait"],
        readinessProbe={"exec": {"command": ["python3", "-c", probe]}, "periodSeconds": 5, "timeoutSeconds": 10},
    )
    labels = pod.build_labels(app, BOARD)
    name = app.name if app.template == "tensorboard" else f"{app.name}-{BOARD}"
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": pod.build_metadata(app, name, labels),
        "spec": {
            "replicas": 1,
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": pod.build_selector(app, BOARD)},
            "template": {"metadata": {"labels": labels | pod.build_identity_labels(app)}, "spec": pod_spec},
        },
    }


_RENDERERS = {
    "jobset": _render_jobset,
    "rayjob": _render_rayjob,
    "trainjob": _render_trainjob,
    "tensorboard": _render_board,
}
"""Functions that render the workload, by the app's template."""
