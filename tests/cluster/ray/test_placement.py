"""Tests of decisions that need no cluster: placing workers, and explaining why ranks ended."""

from __future__ import annotations

import pickle
import socket
from concurrent.futures import Future
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from voxlane.cluster.ray import cluster as clusters
from voxlane.cluster.ray import elastic
from voxlane.cluster.ray.cluster import (
    RayNode,
    add_released,
    check_capacity,
    place_workers,
    workers_per_node,
)
from voxlane.cluster.ray.elastic import WorkerRequest
from voxlane.cluster.ray.ranks import explain_failure, is_peer_loss
from voxlane.errors import ClusterError, ConfigError, LostError, NoMemoryError, RunError, VoxlaneError

TWO = [RayNode("a", 2, 0), RayNode("b", 2, 0)]


@pytest.mark.parametrize(
    ("workers", "cpus", "gpus", "spread", "expected"),
    [
        (4, 1, 0, None, 4),
        (8, 1, 0, None, 4),
        (8, 0.5, 0, None, 8),
        (3, 2, 0, None, 2),
        (2, 4, 0, None, 0),
        (2, 1, 1, None, 0),
        (4, 1, 0, 2, 4),
        (6, 1, 0, 2, 0),
        (3, 1, 0, 3, 2),
        (3, 0, 0, None, 3),
        (20, 0.1, 0, 2, 20),
    ],
)
def test_number_of_workers_that_fit(workers: int, cpus: float, gpus: float, spread: int | None, expected: int) -> None:
    assert len(place_workers(TWO, workers, cpus, gpus, spread)) == expected


def test_workers_are_placed_together_on_the_largest_nodes() -> None:
    nodes = [RayNode("a", 1, 0), RayNode("b", 4, 0), RayNode("c", 3, 0)]
    assert place_workers(nodes, 5, 1) == ["b", "b", "b", "b", "c"]
    assert place_workers(nodes, 4, 1, 0, 2) == ["b", "b", "c", "c"]
    assert place_workers(nodes, 3, 1, 0, 3) == ["b", "c", "a"]


def test_workers_that_do_not_divide_evenly_over_nodes() -> None:
    with pytest.raises(ConfigError, match=r"--nodes 2: 3 workers .* Give --workers 4"):
        workers_per_node(3, 2)
    with pytest.raises(ConfigError, match="--nodes 0"):
        workers_per_node(3, 0)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ((TWO, 8, 1), ClusterError, "8 workers of 1 CPU requested, the cluster has 4 CPU on 2 nodes: 4 fit. "
         "Give --workers 4 or --cpus-per-worker 0.5"),
        ((TWO[:1], 4, 1), ClusterError,
         "the cluster has 2 CPU on 1 node: 2 fit. Give --workers 2 or --cpus-per-worker 0.5"),
        ((TWO, 2, 1, 1), ClusterError,
         "2 workers of 1 CPU and 1 GPU requested, the cluster has 0 GPU on 2 nodes: 0 fit. "
         "Give fewer workers, or a smaller --gpus-per-worker"),
        ((TWO, 3, 1, 0, 3), ClusterError, "3 nodes requested, the cluster has 2. Give --nodes 2"),
        ((TWO, 6, 1, 0, 2), ClusterError, "6 workers of 1 CPU on 2 nodes requested"),
        ((TWO, 0, 1), ConfigError, "--workers 0 is too small. Give 1 or more"),
        ((TWO, 1, -1), ConfigError, "--cpus-per-worker -1 is too small. Give 0 or more"),
        ((TWO, 1, float("nan")), ConfigError, "--cpus-per-worker nan"),
        ((TWO, 8, 1, 0, None, 5), ClusterError, "8 workers of 1 CPU requested"),
    ],
)  # fmt: skip
def test_requests_that_never_fit_are_rejected(arguments: tuple, kind: type[VoxlaneError], message: str) -> None:
    with pytest.raises(kind) as raised:
        check_capacity(*arguments)
    assert message in str(raised.value)


def test_minimum_of_workers_is_enough() -> None:
    check_capacity(TWO, 8, 1, 0, None, 4)


def test_resources_of_an_ended_attempt_count_as_free() -> None:
    free = [RayNode("a", 0, 0), RayNode("b", 1, 1)]
    assert add_released(free, ["a", "a", "b"], 1, 0.5) == [RayNode("a", 2, 1), RayNode("b", 2, 1.5)]


@given(
    workers=st.integers(1, 12), batch=st.integers(1, 48), cpus=st.lists(st.integers(0, 8), min_size=1, max_size=4),
    least=st.integers(1, 4),
)  # fmt: skip
def test_most_workers_that_fit_and_divide_the_batch(workers: int, batch: int, cpus: list[int], least: int) -> None:
    nodes = [RayNode(str(n), c, 0) for n, c in enumerate(cpus)]
    count = WorkerRequest(workers, least, least, None, 1, 0, batch).count_workers(nodes)
    assert count == max((n for n in range(1, workers + 1) if batch % n == 0 and n <= sum(cpus)), default=0)


def test_remaining_nodes_keep_their_number_of_workers() -> None:
    request = WorkerRequest(workers=6, min_workers=1, min_workers_at_start=6, nodes=3, cpus=1, gpus=0, batch=12)
    nodes = [RayNode(str(n), 2, 0) for n in range(3)]
    assert [request.count_workers(nodes[:n]) for n in (3, 2, 1, 0)] == [6, 4, 2, 0]
    assert [request.count_nodes(n) for n in (6, 4, 2)] == [3, 2, 1]
    odd = WorkerRequest(workers=6, min_workers=1, min_workers_at_start=6, nodes=3, cpus=1, gpus=0, batch=6)
    assert odd.count_workers(nodes[:2]) == 2, "4 workers cannot share 6 patches"


class _TrainingFailed(Exception):
    def __init__(self, failures: dict[int, Exception]) -> None:
        super().__init__("Training failed due to worker errors")
        self.worker_failures = failures


def _make_actor_error(text: str) -> Exception:
    from ray.exceptions import RayActorError
    from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError

    return WorkerHealthCheckFailedError("A worker health check failed.", RayActorError(error_msg=text))


KILLED = (
    "The actor died unexpectedly before finishing this task. Worker unexpectedly exits with a connection error code 2. "
    "End of file. Some common causes include: (1) the process was killed by the OOM killer due to high memory usage."
)


@pytest.mark.parametrize(
    ("failures", "kind", "message"),
    [
        ({0: ConfigError("lr: no")}, ConfigError, "lr: no"),
        ({0: LostError("rank 0 lost its peers: gloo"), 1: ConfigError("lr: no")}, ConfigError, "lr: no"),
        ({0: LostError("rank 0 lost its peers"), 1: KILLED}, LostError, "rank 1 was lost: its process was killed"),
        ({0: RunError("unlucky"), 1: KILLED}, LostError, "rank 1 was lost: its process was killed"),
        ({1: "The actor died because its node has died. Node Id: 12"}, LostError, "its machine was lost"),
        ({0: "Killed due to the node running low on memory."}, NoMemoryError, "of rank 0 ran out of memory"),
        ({0: LostError("rank 0 lost its peers")}, LostError, "rank 0 lost its peers"),
    ],
)  # fmt: skip
def test_explain_failure(failures: dict[int, Exception | str], kind: type[VoxlaneError], message: str) -> None:
    """A string stands for Ray's message about a dead worker."""
    error = explain_failure(
        _TrainingFailed({rank: _make_actor_error(f) if isinstance(f, str) else f for rank, f in failures.items()})
    )
    assert type(error) is kind
    assert message in str(error)


def test_errors_survive_pickling() -> None:
    error = ConfigError("lr: no", uri="gs://b/run", fix="Give another")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is ConfigError
    assert (str(copy), copy.uri, copy.fix) == (str(error), error.uri, error.fix)


def test_is_peer_loss() -> None:
    assert is_peer_loss(RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:26314."))
    assert not is_peer_loss(RuntimeError("shape '[2]' is invalid for input of size 3"))
    assert not is_peer_loss(ValueError("gloo"))


def test_wait_for_a_result_ends_when_the_head_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters, "_HEAD_INTERVAL_S", 0.01)
    result: Future[Any] = Future()
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert clusters.wait_watching_head(result, address, on_wait=lambda: result.set_result(5)) == 5
    with pytest.raises(LostError, match=f"the head of the Ray cluster at {address} was lost. Continue with --resume"):
        clusters.wait_watching_head(Future(), address, fix="Continue with --resume")
    with pytest.raises(ZeroDivisionError):
        clusters.wait_watching_head(clusters.run_in_thread(lambda: 1 // 0), address)


@pytest.mark.parametrize("is_written", [True, False])
def test_attempt_that_is_interrupted_while_it_is_recorded_has_an_end(
    monkeypatch: pytest.MonkeyPatch, is_written: bool
) -> None:
    class Records:
        folder_uri, config = "file:///run", None
        attempts: ClassVar[list[dict[str, Any]]] = []

        def read_json(self, name: str) -> list[dict[str, Any]]:
            return [dict(entry) for entry in self.attempts]

        def write_json(self, name: str, entries: list[dict[str, Any]]) -> None:
            if is_written:
                type(self).attempts = entries
            if entries[-1]["ended"] is None:
                raise KeyboardInterrupt

    monkeypatch.setattr(elastic, "_count_epochs", lambda run: 0)
    monkeypatch.setattr(elastic, "_wait_for_capacity", lambda *args, **options: 1)
    request = WorkerRequest(1, 1, 1, None, 1.0, 0.0, batch=2)
    records: Any = Records()
    with pytest.raises(KeyboardInterrupt):
        elastic._run_attempts(records, "token", "127.0.0.1:1", request, False, print, None)  # type: ignore[arg-type]
    assert [entry["why"] for entry in records.attempts] == (["interrupted"] if is_written else [])
