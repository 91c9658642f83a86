"""A Kubernetes of three nodes to try apps in: a real control plane, kubelets and a JobSet controller that are played,
an object store, and a small prepared dataset in it.

    python -m tests.kube.rig               starts one and a shell in it; leaving the shell stops it
    python -m tests.kube.rig walk.sh       runs a script in it instead
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.kube import control_plane as plane
from tests.kube.jobsets import JobSets
from tests.kube.kubelet import Kubelet
from tests.volume import made
from voxlane import StoreConfig
from voxlane.kube.client import Cluster
from voxlane.testing import Emulator

NODES = ("node-a", "node-b", "node-c")


@contextmanager
def rig() -> Iterator[dict[str, str]]:
    """The environment in which kubectl and voxlane reach it."""
    with tempfile.TemporaryDirectory(prefix="voxlane-kube-", ignore_cleanup_errors=True) as folder, Emulator() as store:
        root = Path(folder)
        store.create_bucket("work")
        scans = made.save(root / "scans", made.kits(12))
        made.prepared(scans, "gs://work/kits19", StoreConfig(endpoint=store.url), folds=4)
        with plane.running(root / "plane") as kubeconfig:
            os.environ["KUBECONFIG"] = str(kubeconfig)
            cluster = Cluster.connect()
            plane.install_kinds(cluster)
            for name in NODES:
                plane.add_node(cluster, name, cpu=8, memory="32Gi")
            with Kubelet(cluster, root / "nodes", kubeconfig), JobSets(cluster):
                yield {
                    **os.environ,
                    "PATH": plane.path_with_tools(),
                    "STORAGE_EMULATOR_HOST": store.url,
                    "NODES": str(root / "nodes"),
                }


if __name__ == "__main__":
    if plane.starter() is None:
        sys.exit(plane.WHY_SKIPPED)
    with rig() as environment:
        print(f"nodes {', '.join(NODES)}; gs://work/kits19 at {environment['STORAGE_EMULATOR_HOST']}", flush=True)
        words = ["bash", *sys.argv[1:]] if sys.argv[1:] else [os.environ.get("SHELL", "bash")]
        sys.exit(subprocess.run(words, env=environment, check=False).returncode)
