"""Secrets are redacted from the output."""

from __future__ import annotations

import base64
import itertools
import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from voxlane.redaction import Redactor, collect_secrets, looks_secret

SECRET = """
AWS_SECRET_ACCESS_KEY AWS_ACCESS_KEY_ID AWS_SESSION_TOKEN AZURE_STORAGE_KEY AZURE_STORAGE_ACCOUNT_KEY HF_TOKEN
WANDB_API_KEY DB_PASSWORD AZURE_STORAGE_CONNECTION_STRING api_key GITHUB_PAT KEY
"""
OTHER = """
PATH TOKENIZERS_PARALLELISM AWS_WEB_IDENTITY_TOKEN_FILE GOOGLE_APPLICATION_CREDENTIALS MONKEY AWS_REGION
OMP_NUM_THREADS KEYBOARD AZURE_STORAGE_ACCOUNT_NAME SECRETS_DIR
"""


def test_secret_variable_names() -> None:
    assert [name for name in SECRET.split() if not looks_secret(name)] == []
    assert [name for name in OTHER.split() if looks_secret(name)] == []


def test_collected_secrets(tmp_path: Path) -> None:
    file = tmp_path / "key.json"
    key = "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBgkq\nhkiG9w0BAQEFAASC\n-----END PRIVATE KEY-----\n"
    file.write_text(json.dumps({"private_key": key, "client_email": "robot@lab.example"}))
    secrets_found = collect_secrets(
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
    } <= secrets_found
    assert not {b"true", b"visible", b"", b"robot@lab.example"} & secrets_found
    redactor = Redactor(secrets_found)
    printed = redactor.feed(file.read_bytes()) + redactor.finish()
    assert b"MIIE" not in printed
    assert b"robot@lab.example" in printed


def test_only_a_possible_start_is_held_back() -> None:
    redactor = Redactor([b"sesame"])
    assert redactor.feed(b"open se") == b"open "
    assert redactor.feed(b"t; ses") == b"set; "
    assert redactor.feed(b"ame!") == b"***!"
    assert redactor.feed(b"sesam") == b""
    assert redactor.finish() == b"sesam"


def test_longer_of_two_secrets_with_the_same_start_wins() -> None:
    redactor = Redactor([b"abc", b"abcdef"])
    assert redactor.feed(b"1abc") + redactor.feed(b"def2abcx") + redactor.finish() == b"1***2***x"


PIECES = st.lists(st.sampled_from([b"secret-one", b"secret-two!", b"se", b"t-o", b" ", b"x", b"secret-"]), max_size=20)


@given(PIECES, st.lists(st.integers(0, 60), max_size=12))
def test_result_does_not_depend_on_chunks(pieces: list[bytes], cuts: list[int]) -> None:
    secrets = [b"secret-one", b"secret-two!"]
    text = b"".join(pieces)
    redactor = Redactor(secrets)
    positions = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    printed = b"".join(redactor.feed(text[a:b]) for a, b in itertools.pairwise(positions)) + redactor.finish()
    assert printed == text.replace(b"secret-one", b"***").replace(b"secret-two!", b"***")


def test_output_without_secrets_is_unchanged() -> None:
    redactor = Redactor([])
    assert redactor.feed(b"abc") + redactor.finish() == b"abc"
