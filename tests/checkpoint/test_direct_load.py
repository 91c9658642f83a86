"""Loading straight into final memory gives what `torch.load` gives, for plain states and for all others."""

from __future__ import annotations

import io
import pickle
import time
import zipfile
from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conftest import Bucket
from voxlane import Checkpoint, errors
from voxlane.checkpoint import direct_load
from voxlane.checkpoint.plain import load_file
from voxlane.store import Store

_DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn]


def _tensor(dtype: torch.dtype, size: int) -> torch.Tensor:
    values = torch.arange(size * dtype.itemsize, dtype=torch.int64).remainder(2).to(torch.uint8)
    return values.view(dtype)


_tensors = st.builds(_tensor, st.sampled_from(_DTYPES), st.sampled_from([0, 1, 7, 1000, 400_000]))
_states = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | _tensors,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=12,
)


def _load_direct(store: Store, key: str, map_location: Any = None) -> Any:
    return direct_load.load_direct(
        store, key, map_location, lambda file, place: load_file(file, store.uri(key), place, True)
    )


def _assert_same(first: Any, second: Any) -> None:
    assert type(first) is type(second)
    if isinstance(first, torch.Tensor):
        assert (first.dtype, first.shape, first.stride()) == (second.dtype, second.shape, second.stride())
        assert first.requires_grad == second.requires_grad
        view = torch.uint8 if first.element_size() == 1 else first.dtype
        assert torch.equal(first.detach().view(view), second.detach().view(view))
    elif isinstance(first, dict):
        assert list(first) == list(second)
        for key in first:
            _assert_same(first[key], second[key])
    elif isinstance(first, list | tuple):
        assert len(first) == len(second)
        for left, right in zip(first, second, strict=True):
            _assert_same(left, right)
    else:
        assert first == second


@given(_states)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_plain_states_are_those_of_torch_load(memory: Bucket, state: Any) -> None:
    ckpt = Checkpoint(memory.uri, memory.config)
    ckpt.save(state, "any.ckpt")
    loaded = _load_direct(ckpt.store, ckpt._key("any.ckpt"))
    with ckpt.reader("any.ckpt") as file:
        _assert_same(loaded, torch.load(file))


def test_views_parameters_and_shared_memory(bucket: Bucket) -> None:
    whole = torch.randn(3 << 20)
    state = OrderedDict(
        whole=whole,
        part=whole[5:1000:3],
        matrix=whole[: 1 << 20].view(1024, 1024).T,
        weight=torch.nn.Parameter(torch.randn(7, 9)),
        empty=torch.empty(0, 4),
        shape=torch.Size([1, 2]),
        kind=torch.float16,
        place=torch.device("cpu"),
    )
    ckpt = Checkpoint(bucket.uri, bucket.config)
    ckpt.save(state, "views.ckpt")
    loaded = _load_direct(ckpt.store, ckpt._key("views.ckpt"), "cpu")
    _assert_same(loaded, state)
    assert loaded["part"].untyped_storage().data_ptr() == loaded["whole"].untyped_storage().data_ptr()
    _assert_same(ckpt.load("views.ckpt"), state)


@pytest.mark.parametrize(
    "state",
    [
        pytest.param({"t": torch.eye(3).to_sparse()}, id="sparse"),
        pytest.param({"t": torch.empty(4, device="meta")}, id="meta"),
    ],
)
def test_other_states_are_left_to_torch_load(gcs: Bucket, state: Any) -> None:
    ckpt = Checkpoint(gcs.uri, gcs.config)
    ckpt.save(state, "other.ckpt")
    with pytest.raises(direct_load.NotDirectError):
        _load_direct(ckpt.store, ckpt._key("other.ckpt"))
    loaded = ckpt.load("other.ckpt")["t"]
    assert (loaded.layout, loaded.dtype, loaded.device) == (state["t"].layout, state["t"].dtype, state["t"].device)


def _save_bytes(state: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer, **options)
    return buffer.getvalue()


def _rewrite(body: bytes, edit: Any) -> bytes:
    """Return a zip file with the same records, as another program writes them."""
    target = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(body)) as source, zipfile.ZipFile(target, "w") as copy:
        for info in source.infolist():
            name, data = edit(info.filename, source.read(info))
            copy.writestr(name, data)
    return target.getvalue()


@pytest.mark.parametrize("kind", ["legacy", "rewritten", "permuted"])
def test_files_of_other_writers(gcs: Bucket, kind: str) -> None:
    """The direct way either gives the same or refuses, also if keys are numbered in another order."""
    state = {"a": torch.arange(500_000.0), "b": -torch.arange(500_000.0)}
    body = _save_bytes(state)
    expected: Any = state
    if kind == "legacy":
        body = _save_bytes(state, _use_new_zipfile_serialization=False)
    elif kind == "rewritten":
        body = _rewrite(body, lambda name, data: (name, data))
    else:
        swap = {"archive/data/0": "archive/data/1", "archive/data/1": "archive/data/0"}
        body = _rewrite(body, lambda name, data: (swap.get(name, name), data))
        expected = {"a": state["b"], "b": state["a"]}
    gcs.store.put("other.ckpt", body)
    _assert_same(torch.load(io.BytesIO(body)), expected)
    try:
        _assert_same(_load_direct(gcs.store, "other.ckpt"), expected)
    except direct_load.NotDirectError:
        assert kind == "legacy"
    _assert_same(Checkpoint(gcs.uri, gcs.config).load("other.ckpt"), expected)


def test_scan_of_a_hostile_pickle_calls_nothing(gcs: Bucket) -> None:
    class Attack:
        def __reduce__(self) -> Any:
            return print, ("called",)

    body = _rewrite(
        _save_bytes({"a": torch.ones(1)}),
        lambda name, data: (name, pickle.dumps(Attack(), 2) if name.endswith("data.pkl") else data),
    )
    gcs.store.put("attack.ckpt", body)
    with pytest.raises(direct_load.NotDirectError, match=r"print"):
        _load_direct(gcs.store, "attack.ckpt")
    with pytest.raises(errors.UnsafeError):
        Checkpoint(gcs.uri, gcs.config).load("attack.ckpt")


def test_record_that_lies_elsewhere_than_the_directory_implies_is_refused(gcs: Bucket) -> None:
    """A gap before the next record, which no writer of ours leaves, makes the computed position wrong."""
    body = bytearray(_save_bytes({"a": torch.arange(1000.0)}))
    with zipfile.ZipFile(io.BytesIO(bytes(body))) as archive:
        header = archive.getinfo("archive/data/0").header_offset
    body[header + 28] += 1  # the length of the extra field: the record starts one byte later
    gcs.store.put("gap.ckpt", bytes(body))
    with pytest.raises(direct_load.NotDirectError):
        _load_direct(gcs.store, "gap.ckpt")


@pytest.mark.parametrize("at", [0.0, 0.3, 0.6, 0.999])
def test_damage_anywhere_is_detected(gcs: Bucket, at: float) -> None:
    ckpt = Checkpoint(gcs.uri, gcs.config)
    ckpt.save({"a": torch.randn(3 << 20), "b": torch.randn(100)}, "a.ckpt")
    body = bytearray(ckpt.store.get(ckpt._key("a.ckpt")))
    body[int(at * len(body))] ^= 1
    ckpt.store.put(ckpt._key("a.ckpt"), body)
    with pytest.raises(errors.CorruptError):
        _load_direct(ckpt.store, ckpt._key("a.ckpt"))


@pytest.mark.parametrize("has_checksums", [True, False])
def test_object_that_is_replaced_while_it_is_opened(
    gcs: Bucket, monkeypatch: pytest.MonkeyPatch, has_checksums: bool
) -> None:
    """The start of the old version and the end of the new one are never mixed."""
    ckpt = Checkpoint(gcs.uri, gcs.config)
    old, new = {"a": torch.zeros(900_000), "v": 1}, {"a": torch.ones(900_000), "v": 2}

    def save(state: Any) -> None:
        if has_checksums:
            ckpt.save(state, "a.ckpt")
        else:
            gcs.store.put(ckpt._key("a.ckpt"), _save_bytes(state))

    save(old)
    get_end = Store.get_end

    def replace_first(store: Store, key: str, num_bytes: int) -> Any:
        while store.counters.read().bytes_read < 1 << 20:  # the start is being read by another thread
            time.sleep(0.01)
        save(new)
        return get_end(store, key, num_bytes)

    monkeypatch.setattr(Store, "get_end", replace_first)
    loaded = _load_direct(Checkpoint(gcs.uri, gcs.config).store, ckpt._key("a.ckpt"))
    _assert_same(loaded, new)


def test_keys_that_the_engine_cannot_address(gcs: Bucket) -> None:
    ckpt = Checkpoint(gcs.uri, gcs.config)
    state = {"a": torch.arange(10.0)}
    ckpt.save(state, "runs//last.ckpt")
    _assert_same(_load_direct(ckpt.store, ckpt._key("runs//last.ckpt")), state)


def test_large_load_reads_every_byte_about_once(gcs: Bucket) -> None:
    ckpt = Checkpoint(gcs.uri, gcs.with_config(part_bytes=1 << 20).config)
    state = {str(i): torch.randn(300_000) for i in range(20)}
    size = ckpt.save(state, "a.ckpt").size
    before = ckpt.store.counters.read().bytes_read
    _assert_same(ckpt.load("a.ckpt"), state)
    assert size <= ckpt.store.counters.read().bytes_read - before <= size + (3 << 20)
