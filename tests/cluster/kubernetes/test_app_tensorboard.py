"""An app's TensorBoard in the cluster, through a forwarded port of the real API server."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.cluster.kubernetes.control_plane import wait_for
from tests.cluster.kubernetes.kubelet import Kubelet
from tests.conftest import Bucket
from tests.servers import free_ports
from tests.train.test_tensorboard import write_run
from voxlane.cluster.kubernetes.app import render, tensorboard
from voxlane.cluster.kubernetes.app.config import App
from voxlane.cluster.kubernetes.client import Cluster, path_of
from voxlane.cluster.kubernetes.forward import PortForward
from voxlane.errors import ConfigError, MissingObjectError, NotRunningError
from voxlane.settings import build

SERVER = """
import http.server, sys
class Answer(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"])) * 8
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_): pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
"""


def server(cluster: Cluster, name: str, port: int) -> None:
    container = {"name": "main", "image": "x", "command": ["python", "-c", SERVER, str(port)]}
    cluster.create(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name},
            "spec": {"containers": [container], "terminationGracePeriodSeconds": 1},
        }
    )


def post(port: int, body: bytes) -> bytes:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/", body)
    with urllib.request.urlopen(request, timeout=120) as answer:
        body_received: bytes = answer.read()
    return body_received


def test_connections_reach_the_current_pod(cluster: Cluster, kubelet: Kubelet, add_node: Callable[..., None]) -> None:
    add_node("node-a")
    port, reports, pod = free_ports(1)[0], [], "first"
    server(cluster, pod, port)
    with PortForward(cluster, lambda: pod, port, report=reports.append) as forward:
        wait_for(lambda: cluster.get(path_of("v1", "Pod", cluster.namespace, "first"))["status"]["phase"] == "Running")
        # The process of a pod that runs may not listen yet: the connection is refused, which is reported.
        wait_for(lambda: _answers(forward.port))
        bodies = [bytes([i]) * 100_003 for i in range(16)]
        with ThreadPoolExecutor(16) as pool:
            assert list(pool.map(lambda body: post(forward.port, body), bodies)) == [body * 8 for body in bodies]
        cluster.delete(path_of("v1", "Pod", cluster.namespace, "first"), grace_s=0)
        wait_for(lambda: not kubelet.processes())
        pod = "second"
        threading.Timer(0.5, server, (cluster, pod, port)).start()
        wait_for(lambda: _answers(forward.port))
        assert post(forward.port, b"abc") == b"abc" * 8
    assert reports[-1] == "connected again"
    with pytest.raises(urllib.error.URLError):
        post(forward.port, b"")


def _answers(port: int) -> bool:
    try:
        return post(port, b"x") == b"x" * 8
    except OSError:
        return False


def test_port_in_use_is_reported(cluster: Cluster) -> None:
    with (
        PortForward(cluster, str, 1) as first,
        pytest.raises(ConfigError, match=f"cannot listen on port {first.port}"),
        PortForward(cluster, str, 1, first.port),
    ):
        pass


@pytest.fixture
def app(gcs: Bucket, monkeypatch: pytest.MonkeyPatch) -> App:
    """Return an app whose TensorBoard has a port of its own, because the nodes share this machine's ports."""
    port = free_ports(1)[0]
    monkeypatch.setattr(render, "TENSORBOARD_PORT", port)
    return build(
        App,
        {
            "name": "kidney",
            "image": "x:1",
            "train": {"data": "gs://bkt/data", "run": "gs://bkt/run"},
            "credentials": {"endpoint": gcs.config.endpoint},
        },
        origin="app.yaml",
    )


@pytest.fixture
def shown_session(cluster: Cluster) -> Iterator[Callable[[], str]]:
    """Run `tensorboard.show` in a thread until it opens its URL."""
    threads: list[threading.Thread] = []

    def fetch_json() -> str:
        urls: list[str] = []
        ended = threading.Event()

        def opened(url: str) -> None:
            urls.append(url)
            ended.wait()
            raise KeyboardInterrupt

        thread = threading.Thread(target=_interrupted, args=(cluster, opened), daemon=True)
        thread.start()
        threads.append(thread)
        stops.append(ended)
        return str(wait_for(lambda: urls, 40)[0])

    stops: list[threading.Event] = []
    yield fetch_json
    for ended, thread in zip(stops, threads, strict=True):
        ended.set()
        thread.join(10)


def _interrupted(cluster: Cluster, opened: Callable[[str], None]) -> None:
    try:
        tensorboard.show(cluster, "kidney", 0, report=print, open_url=opened)
    except KeyboardInterrupt:
        return


def fetch_json(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=120) as answer:
        return json.load(answer)


def test_tensorboard_is_created_shown_reconnected_and_removed(
    cluster: Cluster,
    kubelet: Kubelet,
    add_node: Callable[..., None],
    app: App,
    gcs: Bucket,
    shown_session: Callable[[], str],
) -> None:
    add_node("node-a")
    with pytest.raises(MissingObjectError, match="app kidney: it has no TensorBoard in the cluster"):
        tensorboard.show(cluster, "kidney", 0, report=print, open_url=print)
    tensorboard.apply(cluster, app, "x:1")
    tensorboard.apply(cluster, app, "x:1")
    assert len(cluster.list(path_of("apps/v1", "Deployment", cluster.namespace))) == 1
    url = shown_session()
    assert fetch_json(f"{url}data/runs") == []
    write_run(gcs, "run")
    # The second pod starts after the first is gone, because they share this machine's ports.
    deployment, pods = path_of("apps/v1", "Deployment", cluster.namespace, "kidney-board"), {*_pods(cluster)}
    cluster.patch(deployment, {"spec": {"replicas": 0}})
    wait_for(lambda: not _pods(cluster) and not kubelet.processes())
    cluster.patch(deployment, {"spec": {"replicas": 1}})
    wait_for(lambda: _runs(url) == ["run"], 60)
    assert not pods & {*_pods(cluster)}
    assert tensorboard.stop(cluster, "kidney")
    assert not tensorboard.stop(cluster, "kidney")
    wait_for(lambda: not kubelet.processes())


def _pods(cluster: Cluster) -> list[str]:
    return [pod["metadata"]["name"] for pod in cluster.list(path_of("v1", "Pod", cluster.namespace))]


def _runs(url: str) -> Any:
    try:
        return fetch_json(f"{url}data/runs")
    except OSError:
        return None


def test_reason_for_a_missing_tensorboard_is_reported(
    cluster: Cluster, kubelet: Kubelet, add_node: Callable[..., None], app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports: list[str] = []
    kubelet.missing_images.add("x:1")
    tensorboard.apply(cluster, app, "x:1")
    with pytest.raises(
        NotRunningError, match="TensorBoard of kidney: its pod cannot be scheduled: the cluster has no nodes"
    ):
        tensorboard.wait_for_pod(cluster, "kidney", report=reports.append, deadline=time.monotonic() + 3)
    assert len(reports) == len({*reports})
    reports.clear()
    add_node("node-a")
    monkeypatch.setattr(tensorboard, "_STUCK_TIMEOUT_S", 0.5)
    with pytest.raises(NotRunningError, match=r"TensorBoard of kidney: its pod .*x:1"):
        tensorboard.wait_for_pod(cluster, "kidney", report=reports.append, deadline=time.monotonic() + 200)
    assert len(reports) == len({*reports})
