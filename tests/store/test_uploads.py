"""Unfinished uploads are found and dropped, on every kind of store."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

from tests.conftest import Bucket
from voxlane.store import Store, StoreConfig
from voxlane.store.uploads import drop_upload, list_unfinished_uploads


def _write_and_wait(uri: str, config: StoreConfig, key: str, ready: str) -> None:
    writer = Store(uri, config).open_writer(key)
    writer.write(bytes(40 << 20))
    open(ready, "w").close()
    time.sleep(300)


def test_upload_of_a_killed_process_is_found_and_removed(shared_bucket: Bucket, tmp_path: object) -> None:
    ready = f"{tmp_path}/ready"
    key = shared_bucket.key("run/big file.ckpt")
    process = multiprocessing.get_context("spawn").Process(
        target=_write_and_wait, args=(shared_bucket.uri, shared_bucket.config, key, ready)
    )
    process.start()
    store = shared_bucket.store
    while not (os.path.exists(ready) and list_unfinished_uploads(store, shared_bucket.key("run/"))):
        time.sleep(0.05)
        assert process.is_alive()
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()

    assert not store.exists(key)
    uploads = list_unfinished_uploads(store, shared_bucket.key("run/"))
    assert [upload.key for upload in uploads] == [key]
    assert abs(uploads[0].started.timestamp() - time.time()) < 300
    assert list_unfinished_uploads(store, shared_bucket.key("other/")) == []
    drop_upload(store, uploads[0])
    drop_upload(store, uploads[0]) if shared_bucket.kind == "file" else None
    assert list_unfinished_uploads(store, shared_bucket.key("run/")) == []
    assert not store.exists(key)
