"""Run a Kubernetes cluster of three nodes for manual tests: a real control plane, simulated kubelets and JobSet
controller, and an object store with a small prepared dataset.

    python -m tests.cluster.kubernetes.rig               starts one and a shell in it; leaving the shell stops it
    python -m tests.cluster.kubernetes.rig walk.sh       runs a script in it instead
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.cluster.kubernetes import control_plane as plane
from tests.cluster.kubernetes.jobsets import JobSets
from tests.cluster.kubernetes.kubelet import Kubelet
from tests.volume import sample_data
from voxlane import StoreConfig
from voxlane.cluster.kubernetes.client import Cluster
from voxlane.testing import Emulator

NODES = ("node-a", "node-b", "node-c")


@contextmanager
def rig() -> Iterator[dict[str, str]]:
    """Run the cluster and yield the environment for kubectl and voxlane."""
    with tempfile.TemporaryDirectory(prefix="voxlane-kube-", ignore_cleanup_errors=True) as folder, Emulator() as store:
        root = Path(folder)
        store.create_bucket("work")
        scans = sample_data.write_folder(root / "scans", sample_data.make_kits19(12))
        sample_data.prepare_dataset(scans, "gs://work/kits19", StoreConfig(endpoint=store.url), folds=4)
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
    if plane.find_starter() is None:
        sys.exit(plane.SKIP_REASON)
    with rig() as environment:
        print(f"nodes {', '.join(NODES)}; gs://work/kits19 at {environment['STORAGE_EMULATOR_HOST']}", flush=True)
        command = ["bash", *sys.argv[1:]] if sys.argv[1:] else [os.environ.get("SHELL", "bash")]
        sys.exit(subprocess.run(command, env=environment, check=False).returncode)
