"""Secrets kept out of what is printed."""

from __future__ import annotations

import base64
import itertools
import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from voxlane.app.hidden import Hider, looks_secret, secrets_of

SECRET = """
AWS_SECRET_ACCESS_KEY AWS_ACCESS_KEY_ID AWS_SESSION_TOKEN AZURE_STORAGE_KEY AZURE_STORAGE_ACCOUNT_KEY HF_TOKEN
WANDB_API_KEY DB_PASSWORD AZURE_STORAGE_CONNECTION_STRING api_key GITHUB_PAT KEY
"""
OTHER = """
PATH TOKENIZERS_PARALLELISM AWS_WEB_IDENTITY_TOKEN_FILE GOOGLE_APPLICATION_CREDENTIALS MONKEY AWS_REGION
OMP_NUM_THREADS KEYBOARD AZURE_STORAGE_ACCOUNT_NAME SECRETS_DIR
"""


def test_names() -> None:
    assert [name for name in SECRET.split() if not looks_secret(name)] == []
    assert [name for name in OTHER.split() if looks_secret(name)] == []


def test_what_is_hidden(tmp_path: Path) -> None:
    file = tmp_path / "key.json"
    key = "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBgkq\nhkiG9w0BAQEFAASC\n-----END PRIVATE KEY-----\n"
    file.write_text(json.dumps({"private_key": key, "client_email": "robot@lab.example"}))
    found = secrets_of(
        {
            "HF_TOKEN": "hf_abc/def",
            "DEBUG_TOKEN": "true",
            "PLAIN": "visible",
            "MINE": "xy",
            "HTTPS_PROXY": "http://me:pass@word.example/",
            "GOOGLE_APPLICATION_CREDENTIALS": str(file),
        },
        ["MINE", "NOT_SET"],
    )
    assert {
        b"hf_abc/def",
        b"hf_abc%2Fdef",
        base64.b64encode(b"hf_abc/def"),
        b"xy",
        b"pass",
        b"MIIEvQIBADANBgkq",
    } <= found
    assert not {b"true", b"visible", b"", b"robot@lab.example"} & found
    hider = Hider(found)
    shown = hider.feed(file.read_bytes()) + hider.end()
    assert b"MIIE" not in shown
    assert b"robot@lab.example" in shown


def test_only_a_possible_beginning_is_held_back() -> None:
    hider = Hider([b"sesame"])
    assert hider.feed(b"open se") == b"open "
    assert hider.feed(b"t; ses") == b"set; "
    assert hider.feed(b"ame!") == b"***!"
    assert hider.feed(b"sesam") == b""
    assert hider.end() == b"sesam"


def test_the_longer_of_two_that_begin_alike() -> None:
    hider = Hider([b"abc", b"abcdef"])
    assert hider.feed(b"1abc") + hider.feed(b"def2abcx") + hider.end() == b"1***2***x"


PIECES = st.lists(st.sampled_from([b"secret-one", b"secret-two!", b"se", b"t-o", b" ", b"x", b"secret-"]), max_size=20)


@given(PIECES, st.lists(st.integers(0, 60), max_size=12))
def test_chunks_make_no_difference(pieces: list[bytes], cuts: list[int]) -> None:
    secrets = [b"secret-one", b"secret-two!"]
    text = b"".join(pieces)
    hider = Hider(secrets)
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    shown = b"".join(hider.feed(text[a:b]) for a, b in itertools.pairwise(places)) + hider.end()
    assert shown == text.replace(b"secret-one", b"***").replace(b"secret-two!", b"***")


def test_nothing_to_hide_changes_nothing() -> None:
    hider = Hider([])
    assert hider.feed(b"abc") + hider.end() == b"abc"
