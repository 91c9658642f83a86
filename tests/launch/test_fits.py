"""What fits on a cluster, who goes where, and what ended a group of ranks: decisions without a cluster."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from voxlane.errors import ClusterError, ConfigError, LostError, NoMemoryError, RunError, VoxlaneError
from voxlane.launch.cluster import Node, check, fits, place, share, with_back
from voxlane.launch.elastic import Shape
from voxlane.launch.ranks import collateral, reason

TWO = [Node("a", "h1", 2, 0), Node("b", "h2", 2, 0)]


@pytest.mark.parametrize(
    ("workers", "cpus", "gpus", "spread", "room"),
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
def test_how_many_fit(workers: int, cpus: float, gpus: float, spread: int | None, room: int) -> None:
    assert fits(TWO, workers, cpus, gpus, spread) == room


def test_workers_lie_where_there_is_most_room_and_together() -> None:
    nodes = [Node("a", "", 1, 0), Node("b", "", 4, 0), Node("c", "", 3, 0)]
    assert place(nodes, 5, 1) == ["b", "b", "b", "b", "c"]
    assert place(nodes, 4, 1, 0, 2) == ["b", "b", "c", "c"]
    assert place(nodes, 3, 1, 0, 3) == ["b", "c", "a"]


def test_workers_that_do_not_share_out_over_nodes() -> None:
    with pytest.raises(ConfigError, match=r"--nodes 2: 3 workers .* Give --workers 4"):
        share(3, 2)
    with pytest.raises(ConfigError, match="--nodes 0"):
        share(3, 0)


@pytest.mark.parametrize(
    ("arguments", "kind", "said"),
    [
        ((TWO, 8, 1), ClusterError, "8 workers of 1 CPU asked for, the cluster has 4 CPU on 2 nodes: 4 fit. "
         "Give --workers 4 or --cpus-per-worker 0.5"),
        ((TWO[:1], 4, 1), ClusterError,
         "the cluster has 2 CPU on 1 node: 2 fit. Give --workers 2 or --cpus-per-worker 0.5"),
        ((TWO, 2, 1, 1), ClusterError,
         "2 workers of 1 CPU and 1 GPU asked for, the cluster has 0 GPU on 2 nodes: 0 fit. "
         "Give fewer workers, or a smaller --gpus-per-worker"),
        ((TWO, 3, 1, 0, 3), ClusterError, "3 nodes asked for, the cluster has 2. Give --nodes 2"),
        ((TWO, 6, 1, 0, 2), ClusterError, "6 workers of 1 CPU on 2 nodes asked for"),
        ((TWO, 0, 1), ConfigError, "--workers 0. Give 1 or more"),
        ((TWO, 1, -1), ConfigError, "--cpus-per-worker -1. Give zero or more"),
        ((TWO, 1, float("nan")), ConfigError, "--cpus-per-worker nan"),
        ((TWO, 8, 1, 0, None, 5), ClusterError, "8 workers of 1 CPU asked for"),
    ],
)  # fmt: skip
def test_too_much_is_said_at_once(arguments: tuple, kind: type[VoxlaneError], said: str) -> None:
    with pytest.raises(kind) as raised:
        check(*arguments)
    assert said in str(raised.value)


def test_fewer_will_do_where_that_was_said() -> None:
    check(TWO, 8, 1, 0, None, 4)


def test_what_an_attempt_holds_counts_as_room_for_the_next() -> None:
    free = [Node("a", "", 0, 0), Node("b", "", 1, 1)]
    assert with_back(free, ["a", "a", "b"], 1, 0.5) == [Node("a", "", 2, 1), Node("b", "", 2, 1.5)]


@given(
    workers=st.integers(1, 12), batch=st.integers(1, 48), cpus=st.lists(st.integers(0, 8), min_size=1, max_size=4),
    least=st.integers(1, 4),
)  # fmt: skip
def test_as_many_workers_as_fit_and_share_the_batch_out(workers: int, batch: int, cpus: list[int], least: int) -> None:
    nodes = [Node(str(n), "", c, 0) for n, c in enumerate(cpus)]
    width = Shape(workers, least, least, None, 1, 0, batch).width(nodes)
    assert width == max((n for n in range(1, workers + 1) if batch % n == 0 and n <= sum(cpus)), default=0)


def test_nodes_that_are_left_keep_their_share() -> None:
    shape = Shape(workers=6, least=1, least_at_first=6, nodes=3, cpus=1, gpus=0, batch=12)
    nodes = [Node(str(n), "", 2, 0) for n in range(3)]
    assert [shape.width(nodes[:n]) for n in (3, 2, 1, 0)] == [6, 4, 2, 0]
    assert [shape.nodes_of(n) for n in (6, 4, 2)] == [3, 2, 1]
    odd = Shape(workers=6, least=1, least_at_first=6, nodes=3, cpus=1, gpus=0, batch=6)
    assert odd.width(nodes[:2]) == 2, "4 workers cannot share 6 patches"


class _Group(Exception):
    def __init__(self, failures: dict[int, Exception]) -> None:
        super().__init__("Training failed due to worker errors")
        self.worker_failures = failures


def _died(text: str) -> Exception:
    from ray.exceptions import RayActorError
    from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError

    return WorkerHealthCheckFailedError("A worker health check failed.", RayActorError(error_msg=text))


KILLED = (
    "The actor died unexpectedly before finishing this task. Worker unexpectedly exits with a connection error code 2. "
    "End of file. Some common causes include: (1) the process was killed by the OOM killer due to high memory usage."
)


@pytest.mark.parametrize(
    ("failures", "kind", "said"),
    [
        ({0: ConfigError("lr: no")}, ConfigError, "lr: no"),
        ({0: LostError("rank 0 lost the others: gloo"), 1: ConfigError("lr: no")}, ConfigError, "lr: no"),
        ({0: LostError("rank 0 lost the others"), 1: KILLED}, LostError, "rank 1 was lost: its process was killed"),
        ({0: RunError("unlucky"), 1: KILLED}, LostError, "rank 1 was lost: its process was killed"),
        ({1: "The actor died because its node has died. Node Id: 12"}, LostError, "its machine went away"),
        ({0: "Killed due to the node running low on memory."}, NoMemoryError, "of rank 0 ran out of memory"),
        ({0: LostError("rank 0 lost the others")}, LostError, "rank 0 lost the others"),
    ],
)  # fmt: skip
def test_what_ended_the_ranks(failures: dict[int, Exception | str], kind: type[VoxlaneError], said: str) -> None:
    """Text stands for what Ray says of a worker that died."""
    found = reason(_Group({rank: _died(f) if isinstance(f, str) else f for rank, f in failures.items()}))
    assert type(found) is kind
    assert said in str(found)


def test_errors_keep_their_type_and_words_on_the_way() -> None:
    there = ConfigError("lr: no", uri="gs://b/run", fix="Give another")
    back = pickle.loads(pickle.dumps(there))
    assert type(back) is ConfigError
    assert (str(back), back.uri, back.fix) == (str(there), there.uri, there.fix)


def test_what_only_says_that_another_rank_is_gone() -> None:
    assert collateral(RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:26314."))
    assert not collateral(RuntimeError("shape '[2]' is invalid for input of size 3"))
    assert not collateral(ValueError("gloo"))
