"""`voxlane operator`: datasets on nodes' disks, in a Kubernetes cluster."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import yaml

from voxlane.cluster.kubernetes.app.k8s import count_noun
from voxlane.cluster.kubernetes.client import CLUSTER_WIDE, Cluster, Object, path_of, path_of_object
from voxlane.cluster.kubernetes.names import API_VERSION
from voxlane.cluster.kubernetes.operator.agent import OperatorAgentRemoveCommand, OperatorAgentStageCommand
from voxlane.cluster.kubernetes.operator.manifests import COPIER, OPERATOR_NAME, build_manifests
from voxlane.cluster.kubernetes.operator.resource import InstallConfig, OperatorConfig
from voxlane.errors import ClusterError, ConfigError, ForbiddenError
from voxlane.settings import ARGUMENT, Flag, record

__all__ = ["OperatorAgentRemoveCommand", "OperatorAgentStageCommand"]  # the table of commands finds them here
_SYSTEM_NAMESPACE = "voxlane-system"

HELP = """\
Copy datasets from buckets onto nodes' disks before the pods that read them start there. `install` adds the operator to
a cluster. It then copies each StagedDataset that is created there, keeps the copy while it is used, and removes it with
the StagedDataset.

  apiVersion: voxlane.dev/v1alpha1
  kind: StagedDataset
  metadata: {name: kits19}
  spec: {source: "gs://work/kits19-prepared", replicas: 2, capacity: 100Gi}

`kubectl get stageddatasets` shows their progress; apps (voxlane app) create their own from `stage:` in app.yaml.

Examples:
  voxlane operator install --image registry.lab/voxlane:1      into the cluster that kubectl talks to
  voxlane operator install --image registry.lab/voxlane:1 --render > operator.yaml
  voxlane operator run --image registry.lab/voxlane:1          here, instead of in the cluster
  voxlane operator convert volumes.yaml | kubectl apply -f -   from kube-volume-controller
  voxlane operator uninstall --data                            with every dataset on the nodes
"""

Context = Annotated[str | None, Flag(metavar="NAME")]


# -- run ---------------------------------------------------------------------------------------------------------------


@record
class OperatorRunCommand(OperatorConfig):
    """Run the operator until SIGTERM or Ctrl-C."""

    context: Context = None
    """Context of the kubeconfig (default: the current one)."""
    namespace: Annotated[str, Flag(metavar="NAME")] = "all"
    """Namespace to serve."""
    health_port: Annotated[int | None, Flag(metavar="PORT")] = None
    """Port that answers /healthz (default: none)."""

    def _run(self) -> None:
        from voxlane.cluster.kubernetes.operator.serve import check_permissions, serve

        connect = partial(Cluster.connect, context=self.context)
        cluster = connect()
        namespace = None if self.namespace == "all" else self.namespace
        config = dataclasses.replace(self, own_namespace=cluster.namespace)
        check_permissions(cluster, namespace)

        def log(text: str) -> None:
            print(f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {text}", flush=True)

        scope = f"namespace {namespace}" if namespace else "all namespaces"
        log(f"serving StagedDatasets of {scope} of {cluster.name}; data at or below {', '.join(config.data_paths)}")
        serve(cluster, connect, config, namespace=namespace, health_port=self.health_port, log=log)
        log("ended; copies and removals continue at the next start")


# -- install, uninstall ------------------------------------------------------------------------------------------------


@record
class OperatorInstallCommand(InstallConfig):
    """Install the operator, and the kind StagedDataset, in a cluster."""

    context: Context = None
    """Context of the kubeconfig (default: the current one)."""
    render: bool = False
    """Print the manifests instead of applying them."""
    namespace: Annotated[str, Flag("-n", metavar="NAME")] = _SYSTEM_NAMESPACE
    """Namespace of the operator."""

    def _run(self) -> None:
        if self.render:
            manifests = build_manifests(self, namespace=self.namespace)
            print(_format_manifests(manifests))
            return
        cluster = Cluster.connect(context=self.context, namespace=self.namespace)
        image = self.image or _find_installed_image(cluster, self.namespace)
        manifests = build_manifests(dataclasses.replace(self, image=image), namespace=self.namespace)
        _check_permissions(cluster, manifests, "patch")
        namespace = cluster.find(path_of_object(manifests[0]))
        if namespace is not None and "deletionTimestamp" in namespace["metadata"]:
            raise ClusterError(
                f"the namespace {self.namespace} is being deleted", fix="Run the command again in a minute"
            )
        for manifest in manifests:
            existing = cluster.find(path_of_object(manifest))
            if manifest["kind"] == "Namespace" and existing is not None:
                continue  # it may belong to somebody else: unlabelled, it outlives an uninstall
            cluster.apply(manifest)
            scope = "" if manifest["kind"] in CLUSTER_WIDE else f" in {self.namespace}"
            action = "updated" if existing is not None else "created"
            print(f"{manifest['kind']} {manifest['metadata']['name']}{scope}: {action}")
        print(f"see: kubectl -n {self.namespace} get deployment; kubectl get stageddatasets -A")


def _format_manifests(manifests: Sequence[Object]) -> str:
    return "\n---\n".join(yaml.safe_dump(dict(item), sort_keys=False, width=120).strip() for item in manifests)


def _find_installed_image(cluster: Cluster, namespace: str) -> str | None:
    """Return the image of the operator that is installed already."""
    deployment = cluster.find(path_of("apps/v1", "Deployment", namespace, OPERATOR_NAME))
    return None if deployment is None else str(deployment["spec"]["template"]["spec"]["containers"][0]["image"])


def _check_permissions(cluster: Cluster, manifests: list[Object], verb: str) -> None:
    """Raise ForbiddenError before the first object is changed, so that nothing is left half done."""
    for manifest in manifests:
        kind, metadata = manifest["kind"], manifest["metadata"]
        if not cluster.may(verb, manifest["apiVersion"], kind, metadata.get("namespace")):
            raise ForbiddenError(
                f"you may not {verb} {kind} {metadata['name']}",
                uri=cluster.name,
                fix="Ask the cluster's administrator to run this command, or to apply what --render prints",
            )


@record
class OperatorUninstallCommand:
    """Remove the operator from a cluster.

    StagedDatasets, their kind and the data on the nodes' disks stay, and the next install takes them over. With --data
    they are removed too, each as soon as nothing uses it.
    """

    data: bool = False
    """Delete every StagedDataset, and its data, first."""
    timeout: Annotated[int, Flag(metavar="SECONDS")] = 600
    """Seconds to wait until the data is deleted."""
    namespace: Annotated[str, Flag("-n", metavar="NAME")] = _SYSTEM_NAMESPACE
    """Namespace of the operator."""
    context: Context = None
    """Context of the kubeconfig (default: the current one)."""

    def _run(self) -> None:
        cluster = Cluster.connect(context=self.context, namespace=self.namespace)
        manifests = reversed(build_manifests(InstallConfig(image="none"), namespace=self.namespace))
        removed = [manifest for manifest in manifests if self.data or manifest["kind"] != "CustomResourceDefinition"]
        _check_permissions(cluster, removed, "delete")
        datasets = cluster.list(path_of(API_VERSION, "StagedDataset"))
        count = count_noun(len(datasets), "StagedDataset")
        if self.data and datasets:
            if _find_installed_image(cluster, self.namespace) is None:
                raise ClusterError(
                    f"{count} cannot be removed from nodes: no operator is in {self.namespace}",
                    uri=cluster.name,
                    fix="Install it first, or leave out --data",
                )
            _delete_datasets(cluster, datasets, self.timeout)
        for manifest in removed:
            path = path_of_object(manifest)
            if manifest["kind"] == "Namespace":
                labels = (cluster.find(path) or {"metadata": {}})["metadata"].get("labels") or {}
                if labels.get("app.kubernetes.io/name") != OPERATOR_NAME:
                    continue  # `install` did not create it
            if cluster.delete(path):
                print(f"{manifest['kind']} {manifest['metadata']['name']}: removed")
        if self.data:
            _delete_copier_permissions(cluster)
        if datasets and not self.data:
            print(f"{count} left, with the data; nothing serves or removes them until the next install")


def _delete_copier_permissions(cluster: Cluster) -> None:
    """Delete the roles and accounts of copiers in every namespace that had datasets."""
    rbac, labels = "rbac.authorization.k8s.io/v1", "app.kubernetes.io/managed-by=voxlane,voxlane.dev/part=data"
    for version, kind in ((rbac, "RoleBinding"), (rbac, "Role"), ("v1", "ServiceAccount")):
        for item in cluster.list(path_of(version, kind), labels=labels):
            name = item["metadata"]["name"]
            if (name == COPIER or name.startswith(f"{COPIER}-")) and cluster.delete(path_of_object(item)):
                print(f"{kind} {name} in {item['metadata']['namespace']}: removed")


def _delete_datasets(cluster: Cluster, datasets: list[Object], timeout_s: float) -> None:
    """Delete StagedDatasets and wait for the operator to remove their data."""
    deadline = time.monotonic() + timeout_s
    for dataset in datasets:
        cluster.delete(path_of_object(dataset))
    while remaining := cluster.list(path_of(API_VERSION, "StagedDataset")):
        if time.monotonic() > deadline:
            count, first = count_noun(len(remaining), "StagedDataset"), remaining[0]
            message = (first.get("status") or {}).get("message", "")
            raise ClusterError(
                f"{count} not deleted yet; {_title_of(first)}: {message}",
                uri=cluster.name,
                fix="End what uses them, and run the command again",
            )
        time.sleep(0.5)
    for dataset in datasets:
        print(f"StagedDataset {_title_of(dataset)}: removed, with its data")


def _title_of(dataset: Object) -> str:
    return f"{dataset['metadata']['namespace']}/{dataset['metadata']['name']}"


# -- convert -----------------------------------------------------------------------------------------------------------


@record
class OperatorConvertCommand:
    """Print StagedDatasets for the VolumeManagers of kube-volume-controller.

    Each volume of a VolumeManager becomes a StagedDataset that is named after both, MANAGER-ID. Fields without a
    counterpart are named on standard error, with the reason. Nothing is printed if one of them cannot be converted.

    Examples:
      voxlane operator convert volumes.yaml > datasets.yaml
      kubectl get volumemanagers -A -o yaml | voxlane operator convert - | kubectl apply -f -
    """

    file: Annotated[str, ARGUMENT]
    """YAML or JSON file with one or several VolumeManagers; -: standard input."""

    def _run(self) -> None:
        from voxlane.cluster.kubernetes.validate import validate
        from voxlane.cluster.kubernetes.volume_manager import convert

        conversion = convert(_read_text(self.file), self.file)
        validate(conversion.datasets)
        for warning in conversion.warnings:
            print(f"warning: {warning}", file=sys.stderr)
        print(_format_manifests(conversion.datasets))


def _read_text(file: str) -> str:
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the manifest: {error.strerror}", uri=file) from None
    except UnicodeDecodeError:
        raise ConfigError("the manifest is not UTF-8 text", uri=file) from None
