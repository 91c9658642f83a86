"""A real API server accepts the rendered manifests, and simulated controllers run them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

from tests.cluster.app.test_config import build_app
from tests.cluster.kubernetes.jobsets import JobSets
from tests.cluster.kubernetes.kubelet import Kubelet
from voxlane.cluster.kubernetes.app.config import App, Template
from voxlane.cluster.kubernetes.app.render import render, render_tensorboard
from voxlane.cluster.kubernetes.client import Cluster, path_of, path_of_object
from voxlane.cluster.kubernetes.operator.crd import CRD
from voxlane.cluster.kubernetes.validate import validate
from voxlane.errors import ClusterError, ManifestError

DOCS = Path(__file__).parents[3] / "docs/kubernetes"


def _wait_for(until: Callable[[], Any], seconds: float = 60.0) -> Any:
    end = time.monotonic() + seconds
    while not (result := until()):
        assert time.monotonic() < end
        time.sleep(0.2)
    return result


def test_server_accepts_every_sample(cluster: Cluster) -> None:
    cluster.apply(CRD)
    _wait_for(lambda: cluster.serves("voxlane.dev/v1alpha1", "StagedDataset"))
    for sample in (*get_args(Template), "loading"):
        app = App.load(DOCS / sample)
        manifests = render(app, app.image, namespace=cluster.namespace)
        manifests += render_tensorboard(app, app.image, namespace=cluster.namespace)
        for manifest in manifests:
            accepted = cluster.create(manifest, dry_run=True)
            assert _is_subset(manifest, accepted), manifest["kind"]  # a server of this version drops no field


def _is_subset(sent: Any, accepted: Any) -> bool:
    """Return whether the server would store everything that was sent."""
    if isinstance(sent, dict):
        return isinstance(accepted, dict) and all(
            key in accepted and _is_subset(value, accepted[key]) for key, value in sent.items()
        )
    if isinstance(sent, list):
        return len(sent) == len(accepted) and all(map(_is_subset, sent, accepted))
    return bool(sent == accepted)


@pytest.mark.cluster
def test_ranks_on_several_nodes_find_each_other(
    cluster: Cluster, add_node: Callable[..., None], kubelet: Kubelet, jobsets: JobSets
) -> None:
    for name in ("n0", "n1"):
        add_node(name)
    code = (
        "import torch.distributed as d; d.init_process_group('gloo'); d.barrier();"
        "print('rank', d.get_rank(), 'of', d.get_world_size(), flush=True); d.destroy_process_group()"
    )
    torchrun_app = build_app(command=["torchrun", "--no-python", "python", "-c", code], nodes=2, shared_memory=None)
    jobset = cluster.create(render(torchrun_app, "kits:1", namespace=cluster.namespace)[-1])
    path = path_of("v1", "Pod", cluster.namespace)

    def list_finished_pods() -> list[dict[str, Any]]:
        own_pods = cluster.list(path, labels="voxlane.dev/app=kits")
        phases = [pod["status"].get("phase") for pod in own_pods]
        assert "Failed" not in phases, [_log(cluster, pod) for pod in own_pods]
        return own_pods if phases == ["Succeeded"] * 2 else []

    pods = _wait_for(list_finished_pods)
    assert {pod["spec"]["nodeName"] for pod in pods} == {"n0", "n1"}  # one a node
    assert {_log(cluster, pod).strip() for pod in pods} == {"rank 0 of 2", "rank 1 of 2"}
    _wait_for(lambda: cluster.get(path_of_object(jobset)).get("status", {}).get("terminalState") == "Completed", 10)


def _log(cluster: Cluster, pod: dict[str, Any]) -> str:
    try:
        return "\n".join(line.decode() for line in cluster.stream(f"{path_of_object(pod)}/log"))
    except ClusterError as error:
        return str(error)


def test_server_drops_what_validation_rejects(cluster: Cluster) -> None:
    """Why it is strict: a server keeps silent about a field that it does not know."""
    manifests = render(build_app(), "kits:1", namespace=cluster.namespace)
    manifests[-1]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["nodeSelectr"] = {}
    with pytest.raises(ManifestError, match="Did you mean nodeSelector"):
        validate(manifests)
    assert not _is_subset(manifests[-1], cluster.create(manifests[-1], dry_run=True))
