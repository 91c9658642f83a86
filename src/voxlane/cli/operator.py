"""`voxlane operator`: datasets on nodes' disks, in a Kubernetes cluster."""

from __future__ import annotations

import argparse
import posixpath
import sys
import time
from typing import TYPE_CHECKING

from voxlane.errors import ClusterError, ConfigError, VoxlaneError

if TYPE_CHECKING:
    from voxlane.kube.client import Cluster, Object
    from voxlane.operator.resource import Rules

Commands = argparse._SubParsersAction
_SYSTEM = "voxlane-system"
_DATA_PATH = "/var/lib/voxlane"

_OPERATOR = """\
Copies datasets from buckets onto nodes' disks, before the pods that read them come there. `install` puts the operator
into a cluster; then each StagedDataset that is created there is copied, kept while it is used, and removed with it.

  apiVersion: voxlane.dev/v1alpha1
  kind: StagedDataset
  metadata: {name: kits19}
  spec: {source: "gs://work/kits19-prepared", replicas: 2, capacity: 100Gi}

`kubectl get stageddatasets` shows how far they are; apps (voxlane app) make their own from `stage:` in app.yaml."""

_EXAMPLES = """\
examples:
  voxlane operator install --image registry.lab/voxlane:1      into the cluster that kubectl talks to
  voxlane operator install --image registry.lab/voxlane:1 --render > operator.yaml
  voxlane operator run --image registry.lab/voxlane:1          here, instead of in the cluster
  voxlane operator uninstall --data                            with every dataset on the nodes"""


def add_parser(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add the command."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = commands.add_parser(
        "operator",
        help="stage datasets onto nodes' disks in a cluster",
        description=_OPERATOR,
        epilog=_EXAMPLES,
        formatter_class=raw,
    )

    def show(_: argparse.Namespace) -> int:
        parser.print_help()
        return 0

    parser.set_defaults(run=show)
    inner = parser.add_subparsers(title="commands", metavar="COMMAND")

    install = inner.add_parser("install", help="put the operator, and the kind StagedDataset, into a cluster")
    install.add_argument("--render", action="store_true", help="print the manifests instead of applying them")
    install.add_argument("-n", "--namespace", metavar="NS", default=_SYSTEM, help=f"its own (default {_SYSTEM})")
    _add_rules(install)
    install.add_argument("--context", metavar="NAME", help="context of the kubeconfig (default: the current one)")
    install.set_defaults(run=_install)

    uninstall = inner.add_parser(
        "uninstall",
        help="take the operator out of a cluster",
        description="Take the operator out of a cluster. StagedDatasets, their kind and the data on nodes' disks stay, "
        "and are served again after the next install; with --data they go too, each when nothing uses it any more.",
    )
    uninstall.add_argument("--data", action="store_true", help="delete every StagedDataset, and its data, first")
    uninstall.add_argument("--timeout", metavar="SECONDS", type=int, default=600, help="for that (default 600)")
    uninstall.add_argument("-n", "--namespace", metavar="NS", default=_SYSTEM, help=f"its own (default {_SYSTEM})")
    uninstall.add_argument("--context", metavar="NAME", help="context of the kubeconfig (default: the current one)")
    uninstall.set_defaults(run=_uninstall)

    run = inner.add_parser("run", help="be the operator, until SIGTERM or Ctrl-C")
    run.add_argument("--namespace", metavar="NS", default="all", help="serve this namespace (default: all)")
    _add_rules(run)
    run.add_argument(
        "--lost-after", metavar="SECONDS", type=float, default=300.0, help="a node that is not ready for longer is lost"
    )
    run.add_argument("--settle", metavar="SECONDS", type=float, default=5.0, help=argparse.SUPPRESS)
    run.add_argument("--retry", metavar="SECONDS", type=float, default=10.0, help=argparse.SUPPRESS)
    run.add_argument("--health-port", metavar="PORT", type=int, help="answer /healthz there (default: nowhere)")
    run.add_argument("--context", metavar="NAME", help="context of the kubeconfig (default: the current one)")
    run.set_defaults(run=_run)

    _add_agent(inner)


def _add_rules(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--image", metavar="IMAGE", help="of the pods that copy: one with voxlane[kubernetes] in it")
    parser.add_argument(
        "--data-path",
        metavar="FOLDER",
        action="append",
        help=f"on nodes' disks, where data may lie; repeatable, the first is the default ({_DATA_PATH})",
    )


def _add_agent(inner: Commands[argparse.ArgumentParser]) -> None:
    """What the operator's pods run; not for people."""
    agent = inner.add_parser("agent")
    verbs = agent.add_subparsers(required=True, metavar="VERB")
    stage, remove = verbs.add_parser("stage"), verbs.add_parser("remove")
    for parser in (stage, remove):
        parser.add_argument("--folder", required=True, help="the node's folder")
        parser.add_argument("--name", required=True, help="of the copy in it")
        parser.add_argument("--last-words", metavar="FILE", help="where to leave how it ended")
    stage.add_argument("--source", required=True, help="what is copied")
    stage.add_argument("--origin", metavar="URI", help="what that is called, where it is a mount")
    stage.add_argument("--node", required=True, help="this node's name")
    stage.add_argument("--dataset", metavar="NS/NAME", required=True, help="the StagedDataset")
    stage.add_argument("--uid", required=True, help="its uid")
    stage.add_argument("--capacity", metavar="BYTES", type=int, help="the most that may be copied")
    stage.set_defaults(run=_stage)
    remove.set_defaults(run=_remove)


def _rules(options: argparse.Namespace, **more: float | str) -> Rules:
    from voxlane.operator.resource import Rules

    paths = options.data_path or [_DATA_PATH]
    for path in paths:
        if not path.startswith("/") or posixpath.normpath(path) == "/" or ".." in path.split("/"):
            raise ConfigError(f"--data-path {path!r}", fix="Give an absolute folder of the nodes, and not all of them")
    cleaned = tuple(posixpath.normpath(path) for path in paths)
    return Rules(data_paths=cleaned, image=options.image, **more)  # type: ignore[arg-type]


# -- run ---------------------------------------------------------------------------------------------------------------


def _run(options: argparse.Namespace) -> int:
    from voxlane.kube.client import Cluster
    from voxlane.operator.serve import check, serve

    for name in ("lost_after", "settle", "retry"):
        if not getattr(options, name) >= 0:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(options, name)}", fix="Give seconds, zero or more")

    def connect() -> Cluster:
        return Cluster.connect(context=options.context)

    cluster = connect()
    namespace = None if options.namespace == "all" else options.namespace
    rules = _rules(
        options,
        namespace=cluster.namespace,
        lost_after_s=options.lost_after,
        settle_s=options.settle,
        retry_s=options.retry,
    )
    check(cluster, namespace)

    def say(text: str) -> None:
        print(f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {text}", flush=True)

    where = f"namespace {namespace}" if namespace else "all namespaces"
    say(f"serving StagedDatasets of {where} of {cluster.name}; data at or below {', '.join(rules.data_paths)}")
    serve(cluster, connect, rules, namespace=namespace, health_port=options.health_port, say=say)
    say("ended; copies and removals go on from here at the next start")
    return 0


def _stage(options: argparse.Namespace) -> int:
    from voxlane.kube.client import Cluster
    from voxlane.operator.agent import Order, stage

    namespace, _, name = options.dataset.partition("/")
    try:
        cluster = Cluster.connect(namespace=namespace)
    except VoxlaneError as error:
        print(f"voxlane: progress cannot be told: {error}", file=sys.stderr)
        cluster = None
    order = Order(
        source=options.source,
        folder=options.folder,
        name=options.name,
        node=options.node,
        namespace=namespace,
        dataset=name,
        uid=options.uid,
        origin=options.origin,
        capacity_bytes=options.capacity,
        last_words=options.last_words,
    )
    return stage(order, cluster)


def _remove(options: argparse.Namespace) -> int:
    from voxlane.operator.agent import remove

    return remove(options.folder, options.name, options.last_words)


# -- install, uninstall ------------------------------------------------------------------------------------------------


def _install(options: argparse.Namespace) -> int:
    from voxlane.kube.client import CLUSTER_WIDE, Cluster, path_of_object
    from voxlane.operator.manifests import manifests

    if options.render:
        import yaml

        made = manifests(_rules(options), namespace=options.namespace)
        print("\n---\n".join(yaml.safe_dump(one, sort_keys=False, width=120).strip() for one in made))
        return 0
    cluster = Cluster.connect(context=options.context, namespace=options.namespace)
    if options.image is None:
        options.image = _image_there(cluster, options.namespace)
    made = manifests(_rules(options), namespace=options.namespace)
    _permitted(cluster, made, "patch")
    own = cluster.find(path_of_object(made[0]))
    if own is not None and "deletionTimestamp" in own["metadata"]:
        raise ClusterError(
            f"the namespace {options.namespace} is being deleted", fix="Run the command again in a minute"
        )
    for one in made:
        found = cluster.find(path_of_object(one))
        if one["kind"] == "Namespace" and found is not None:
            continue  # perhaps somebody else's: unlabelled, it outlives an uninstall
        there = found is not None
        cluster.apply(one)
        where = "" if one["kind"] in CLUSTER_WIDE else f" in {options.namespace}"
        print(f"{one['kind']} {one['metadata']['name']}{where}: {'updated' if there else 'created'}")
    print(f"see: kubectl -n {options.namespace} get deployment; kubectl get stageddatasets -A")
    return 0


def _image_there(cluster: Cluster, namespace: str) -> str | None:
    """Of the operator that is installed already."""
    from voxlane.kube.client import path_of
    from voxlane.operator.manifests import NAME

    found = cluster.find(path_of("apps/v1", "Deployment", namespace, NAME))
    return None if found is None else str(found["spec"]["template"]["spec"]["containers"][0]["image"])


def _permitted(cluster: Cluster, made: list[Object], verb: str) -> None:
    """Ask before the first object is touched, so that nothing is left half done."""
    from voxlane.errors import ForbiddenError

    for one in made:
        if not cluster.may(verb, one["apiVersion"], one["kind"], one["metadata"].get("namespace")):
            raise ForbiddenError(
                f"you may not {verb} {one['kind']} {one['metadata']['name']}",
                uri=cluster.name,
                fix="Ask the cluster's administrator to run this command, or to apply what --render prints",
            )


def _uninstall(options: argparse.Namespace) -> int:
    from voxlane.kube.client import Cluster, path_of, path_of_object
    from voxlane.kube.names import API_VERSION
    from voxlane.operator.manifests import manifests
    from voxlane.operator.resource import Rules

    cluster = Cluster.connect(context=options.context, namespace=options.namespace)
    made = manifests(Rules(image="none"), namespace=options.namespace)
    kept = () if options.data else ("CustomResourceDefinition",)
    gone = [one for one in reversed(made) if one["kind"] not in kept]
    _permitted(cluster, gone, "delete")
    datasets = cluster.list(path_of(API_VERSION, "StagedDataset"))
    if options.data and datasets:
        if _image_there(cluster, options.namespace) is None:
            raise ClusterError(
                f"{_count(datasets)} cannot be removed from nodes: no operator is in {options.namespace}",
                uri=cluster.name,
                fix="Install it first, or leave out --data",
            )
        _delete_datasets(cluster, datasets, options.timeout)
    for one in gone:
        if one["kind"] == "Namespace" and not _ours(cluster.find(path_of_object(one))):
            continue
        if cluster.delete(path_of_object(one)):
            print(f"{one['kind']} {one['metadata']['name']}: removed")
    if options.data:
        _delete_copiers(cluster)
    if datasets and not options.data:
        print(f"{_count(datasets)} left, with the data; nobody serves or removes that until the next install")
    return 0


def _delete_copiers(cluster: Cluster) -> None:
    """Remove the rights that copiers had, in every namespace that had datasets."""
    from voxlane.kube.client import path_of, path_of_object
    from voxlane.operator.pods import COPIER

    rights = "rbac.authorization.k8s.io/v1"
    for version, kind in ((rights, "RoleBinding"), (rights, "Role"), ("v1", "ServiceAccount")):
        for one in cluster.list(
            path_of(version, kind), labels="app.kubernetes.io/managed-by=voxlane,voxlane.dev/part=data"
        ):
            name = one["metadata"]["name"]
            if (name == COPIER or name.startswith(f"{COPIER}-")) and cluster.delete(path_of_object(one)):
                print(f"{kind} {name} in {one['metadata']['namespace']}: removed")


def _count(datasets: list[Object]) -> str:
    return f"{len(datasets)} StagedDataset{'s' if len(datasets) > 1 else ''}"


def _ours(namespace: Object | None) -> bool:
    """Whether `install` made it."""
    from voxlane.operator.manifests import NAME

    labels = (namespace or {}).get("metadata", {}).get("labels") or {}
    return bool(labels.get("app.kubernetes.io/name") == NAME)


def _delete_datasets(cluster: Cluster, datasets: list[Object], timeout_s: float) -> None:
    """Delete them and wait for the operator to remove their data."""
    from voxlane.kube.client import path_of
    from voxlane.kube.names import API_VERSION

    until = time.monotonic() + timeout_s
    for one in datasets:
        meta = one["metadata"]
        cluster.delete(path_of(API_VERSION, "StagedDataset", meta["namespace"], meta["name"]))
    while left := cluster.list(path_of(API_VERSION, "StagedDataset")):
        if time.monotonic() > until:
            one = left[0]
            title = f"{one['metadata']['namespace']}/{one['metadata']['name']}"
            raise ClusterError(
                f"{_count(left)} not gone yet; {title}: {one.get('status', {}).get('message', '')}",
                uri=cluster.name,
                fix="End what uses them, and run the command again",
            )
        time.sleep(0.5)
    for one in datasets:
        print(f"StagedDataset {one['metadata']['namespace']}/{one['metadata']['name']}: removed, with its data")
