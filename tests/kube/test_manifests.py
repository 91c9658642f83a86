"""What is rendered is what a server takes, and what the played controllers run."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

from tests.app.test_config import app
from tests.kube.jobsets import JobSets
from tests.kube.kubelet import Kubelet
from voxlane.app.config import App, Template
from voxlane.app.render import render, render_board
from voxlane.app.validate import validate
from voxlane.errors import ClusterError, ManifestError
from voxlane.kube.client import Cluster, path_of, path_of_object
from voxlane.operator.crd import CRD

DOCS = Path(__file__).parents[2] / "docs/kubernetes"


def _wait(until: Callable[[], Any], seconds: float = 60.0) -> Any:
    end = time.monotonic() + seconds
    while not (found := until()):
        assert time.monotonic() < end
        time.sleep(0.2)
    return found


def test_a_server_takes_every_sample(cluster: Cluster) -> None:
    cluster.apply(CRD)
    _wait(lambda: cluster.serves("voxlane.dev/v1alpha1", "StagedDataset"))
    for sample in (*get_args(Template), "loading"):
        made = App.load(DOCS / sample)
        for manifest in render(made, made.image, namespace=cluster.namespace) + render_board(
            made, made.image, namespace=cluster.namespace
        ):
            taken = cluster.create(manifest, dry_run=True)
            assert _within(manifest, taken), manifest["kind"]  # a server of this version drops nothing of it


def _within(said: Any, taken: Any) -> bool:
    """Whether all that was said is in what the server would keep."""
    if isinstance(said, dict):
        return isinstance(taken, dict) and all(
            key in taken and _within(value, taken[key]) for key, value in said.items()
        )
    if isinstance(said, list):
        return len(said) == len(taken) and all(map(_within, said, taken))
    return bool(said == taken)


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
    made = app(command=["torchrun", "--no-python", "python", "-c", code], nodes=2, shared_memory=None)
    jobset = cluster.create(render(made, "kits:1", namespace=cluster.namespace)[-1])
    pods = path_of("v1", "Pod", cluster.namespace)

    def ended() -> list[dict[str, Any]]:
        found = cluster.list(pods, labels="voxlane.dev/app=kits")
        phases = [pod["status"].get("phase") for pod in found]
        assert "Failed" not in phases, [_log(cluster, pod) for pod in found]
        return found if phases == ["Succeeded"] * 2 else []

    found = _wait(ended)
    assert {pod["spec"]["nodeName"] for pod in found} == {"n0", "n1"}  # one a node
    assert {_log(cluster, pod).strip() for pod in found} == {"rank 0 of 2", "rank 1 of 2"}
    _wait(lambda: cluster.get(path_of_object(jobset)).get("status", {}).get("terminalState") == "Completed", 10)


def _log(cluster: Cluster, pod: dict[str, Any]) -> str:
    try:
        return "\n".join(line.decode() for line in cluster.stream(f"{path_of_object(pod)}/log"))
    except ClusterError as error:
        return str(error)


def test_what_validation_refuses_a_server_would_drop(cluster: Cluster) -> None:
    """Why it is strict: a server keeps silent about a field that it does not know."""
    made = render(app(), "kits:1", namespace=cluster.namespace)
    made[-1]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["nodeSelectr"] = {}
    with pytest.raises(ManifestError, match="Did you mean nodeSelector"):
        validate(made)
    assert not _within(made[-1], cluster.create(made[-1], dry_run=True))
