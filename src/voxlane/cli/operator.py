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
from voxlane.cluster.kubernetes.operator import installation
from voxlane.cluster.kubernetes.operator.agent import (
    OperatorAgentPrepareCommand,
    OperatorAgentRemoveCommand,
    OperatorAgentStageCommand,
)
from voxlane.cluster.kubernetes.operator.manifests import OPERATOR_NAME, build_manifests
from voxlane.cluster.kubernetes.operator.resource import (
    DEFAULT_DISK_RESERVE,
    DiskReserve,
    InstallConfig,
    OperatorConfig,
)
from voxlane.errors import ClusterError, ConfigError, ForbiddenError
from voxlane.settings import ARGUMENT, Flag, record

__all__ = [  # the table of commands finds them here
    "OperatorAgentPrepareCommand",
    "OperatorAgentRemoveCommand",
    "OperatorAgentStageCommand",
]
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
  voxlane operator install -n team-a-voxlane --serve team-a    only for one namespace, beside other operators
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
        log(f"serving StagedDatasets of {scope} of {cluster.name}; data below {', '.join(config.data_paths)}")
        serve(cluster, connect, config, namespace=namespace, health_port=self.health_port, log=log)
        log("ended; copies and removals continue at the next start")


# -- install, uninstall ------------------------------------------------------------------------------------------------


@record
class OperatorInstallCommand(InstallConfig):
    """Install the operator, and the kind StagedDataset, in a cluster.

    Operators in several namespaces work side by side if each serves another namespace (--serve).
    """

    context: Context = None
    """Context of the kubeconfig (default: the current one)."""
    render: bool = False
    """Print the manifests instead of applying them."""
    namespace: Annotated[str, Flag("-n", metavar="NAME")] = _SYSTEM_NAMESPACE
    """Namespace of the operator."""
    serve: Annotated[str | None, Flag(metavar="NAMESPACE")] = None
    """Only namespace whose datasets the operator stages (default: all namespaces)."""
    disk_reserve: DiskReserve = ()
    """Space that staging leaves free on a node's disk, as a percentage of it or a size (repeatable: the largest counts;
    default: the largest eviction threshold of the cluster's kubelets, or 15% if it cannot be read)."""

    def _run(self) -> None:
        if self.render:
            config = dataclasses.replace(self, disk_reserve=self.disk_reserve or (DEFAULT_DISK_RESERVE,))
            print(_format_manifests(build_manifests(config, namespace=self.namespace, serve=self.serve)))
            return
        cluster = Cluster.connect(context=self.context, namespace=self.namespace)
        reserve, origin = self.disk_reserve, "as given"
        installed = None if self.image else installation.find_operator(cluster, self.namespace)
        config = dataclasses.replace(self, image=installed.image if installed else self.image)
        manifests = build_manifests(config, namespace=self.namespace, serve=self.serve)
        _check_permissions(cluster, manifests, "patch")
        installation.check_side_by_side(installation.list_others(cluster, self.namespace), self.serve)
        namespace = cluster.find(path_of_object(manifests[0]))
        if namespace is not None and "deletionTimestamp" in namespace["metadata"]:
            raise ClusterError(
                f"the namespace {self.namespace} is being deleted", fix="Run the command again in a minute"
            )
        if namespace is not None:
            installation.check_pod_security(namespace, config)
        if not reserve:
            reserve, origin = installation.read_disk_reserve(cluster)
        config = dataclasses.replace(config, disk_reserve=reserve)
        for manifest in build_manifests(config, namespace=self.namespace, serve=self.serve):
            existing = cluster.find(path_of_object(manifest))
            if manifest["kind"] == "Namespace" and existing is not None:
                continue  # it may belong to somebody else: unlabelled, it outlives an uninstall
            cluster.apply(manifest)
            print(f"{_title_of_manifest(manifest)}: {'updated' if existing is not None else 'created'}")
        _delete_all(cluster, installation.list_obsolete(cluster, self.namespace, manifests))
        print(f"serves {f'namespace {self.serve}' if self.serve else 'all namespaces'}")
        print(f"leaves {' and '.join(reserve)} of each disk free: {origin}")
        print(f"see: kubectl -n {self.namespace} get deployment; kubectl get stageddatasets -A")


def _format_manifests(manifests: Sequence[Object]) -> str:
    return "\n---\n".join(yaml.safe_dump(dict(item), sort_keys=False, width=120).strip() for item in manifests)


def _title_of_manifest(manifest: Object) -> str:
    scope = "" if manifest["kind"] in CLUSTER_WIDE else f" in {manifest['metadata']['namespace']}"
    return f"{manifest['kind']} {manifest['metadata']['name']}{scope}"


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


def _is_own(cluster: Cluster, manifest: Object) -> bool:
    """Return whether `install` created an object; it does not create a namespace that exists already."""
    if manifest["kind"] != "Namespace":
        return True
    labels = (cluster.find(path_of_object(manifest)) or {"metadata": {}})["metadata"].get("labels") or {}
    return bool(labels.get("app.kubernetes.io/name") == OPERATOR_NAME)


def _delete_all(cluster: Cluster, items: Sequence[Object]) -> None:
    for item in items:
        if cluster.delete(path_of_object(item)):
            print(f"{_title_of_manifest(item)}: removed")


@record
class OperatorUninstallCommand:
    """Remove the operator from a cluster.

    StagedDatasets, their kind and the data on the nodes' disks stay, and the next install takes them over. With --data,
    those that the operator serves are removed too, each as soon as nothing uses it. What another operator uses stays.
    """

    data: bool = False
    """Delete every StagedDataset that the operator serves, and its data, first."""
    timeout: Annotated[int, Flag(metavar="SECONDS")] = 600
    """Seconds to wait until the data is deleted."""
    namespace: Annotated[str, Flag("-n", metavar="NAME")] = _SYSTEM_NAMESPACE
    """Namespace of the operator."""
    context: Context = None
    """Context of the kubeconfig (default: the current one)."""

    def _run(self) -> None:
        cluster = Cluster.connect(context=self.context, namespace=self.namespace)
        installed = installation.find_operator(cluster, self.namespace)
        serves = installed.serves if installed else None
        others = installation.list_others(cluster, self.namespace)
        manifests = build_manifests(InstallConfig(image="none"), namespace=self.namespace, serve=serves)
        keeps_kind = not self.data or bool(others)
        removed = [m for m in reversed(manifests) if not keeps_kind or m["kind"] != "CustomResourceDefinition"]
        _check_permissions(cluster, removed, "delete")
        # Without an operator here, datasets may belong to any of the others.
        datasets = [] if installed is None and others else cluster.list(path_of(API_VERSION, "StagedDataset", serves))
        count = count_noun(len(datasets), "StagedDataset")
        if self.data and datasets:
            if installed is None:
                message = f"{count} cannot be removed from nodes: no operator is in {self.namespace}"
                raise ClusterError(message, uri=cluster.name, fix="Install it first, or leave out --data")
            _delete_datasets(cluster, datasets, self.timeout, serves)
        _delete_all(cluster, [manifest for manifest in removed if _is_own(cluster, manifest)])
        _delete_all(cluster, installation.list_obsolete(cluster, self.namespace, []))
        if self.data and installed is not None:
            _delete_all(cluster, installation.list_copier_permissions(cluster, serves))
            _delete_all(cluster, installation.list_volumes(cluster, serves))
        if self.data and others:
            users = " and ".join(operator.namespace for operator in others)
            print(f"the kind StagedDataset stays, because the operators in {users} use it")
        if datasets and not self.data:
            print(f"{count} left, with the data; nothing serves or removes them until the next install")


def _delete_datasets(cluster: Cluster, datasets: list[Object], timeout_s: float, serves: str | None) -> None:
    """Delete the StagedDatasets of a namespace (None: of all) and wait for the operator to remove their data."""
    deadline = time.monotonic() + timeout_s
    for dataset in datasets:
        cluster.delete(path_of_object(dataset))
    while remaining := cluster.list(path_of(API_VERSION, "StagedDataset", serves)):
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
