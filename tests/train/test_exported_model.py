"""The format of exported models: complete or absent, verified, and readable by people and by other programs."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.conftest import Bucket
from tests.train.tiny_models import DESCRIPTION, export_tiny_model, make_facts, make_member, make_weights
from voxlane.errors import ConfigError, CorruptError, IncompleteError, MismatchError, RunError, VoxlaneError
from voxlane.model.networks import build
from voxlane.train.exported_model import ExportedModel, is_model, load_model, save_model
from voxlane.train.model_facts import Member, Postprocessing


def check_networks(model: ExportedModel) -> None:
    """Compare the network of every member with one that has the weights that were exported."""
    image = torch.randn(1, 1, 16, 16, 16, generator=torch.Generator().manual_seed(0))
    for member in model.facts.members:
        expected = build(member.network, 1, 3, deep_supervision=True).eval()
        expected.load_state_dict(make_weights(member))
        with torch.no_grad():
            assert torch.equal(model.build_network(member)(image), expected(image))


@pytest.mark.parametrize("name", ["models/balls", "balls.zip"])
def test_a_model_in_a_bucket_gives_the_same_networks(gcs: Bucket, name: str) -> None:
    uri = f"{gcs.uri}/{name}"
    written = export_tiny_model(uri, config=gcs.config, licence="Apache-2.0", intended_use="Tests only.")
    model = load_model(uri, gcs.config)
    assert model.facts == written.facts
    assert model.digest == written.digest
    assert [member.provenance.fold for member in model.facts.members] == [0, 1]
    check_networks(model)


def test_folder_and_zip_file_hold_the_same_files(tmp_path: Path) -> None:
    facts = make_facts(created="2026-01-01T00:00:00+00:00")
    folder = save_model(facts, make_weights, str(tmp_path / "folder"))
    zipped = save_model(facts, make_weights, str(tmp_path / "model.zip"))
    assert folder.digest == zipped.digest
    with zipfile.ZipFile(tmp_path / "model.zip") as archive:
        assert archive.testzip() is None
        assert {info.compress_type for info in archive.infolist()} == {zipfile.ZIP_STORED}
        assert archive.namelist()[-1] == "model.json"
        for name in archive.namelist():
            assert archive.read(name) == (tmp_path / "folder" / name).read_bytes()
        archive.extractall(tmp_path / "unpacked")
    check_networks(load_model(str(tmp_path / "unpacked")))


def test_others_can_read_weights_and_card(tmp_path: Path) -> None:
    export_tiny_model(tmp_path / "m", licence="CC-BY-4.0", intended_use="Counting balls in phantoms.")
    weights = safetensors.torch.load_file(tmp_path / "m/weights/fold_0.safetensors")
    expected = make_weights(make_member("fold_0"))
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in weights)
    card = (tmp_path / "m/README.md").read_text()
    for text in ('license: "CC-BY-4.0"', "Counting balls in phantoms.", "| Balls | d1 |", "| core | 2 |", "0.910"):
        assert text in card


def test_nothing_is_published_when_an_export_fails(tmp_path: Path) -> None:
    def fail(member: Member) -> dict[str, torch.Tensor]:
        if member.name == "fold_1":
            raise OSError("no more weights")
        return make_weights(member)

    for name in ("m", "m.zip"):
        with pytest.raises(OSError, match="no more weights"):
            save_model(make_facts(), fail, str(tmp_path / name))
        with pytest.raises(RunError, match="no exported model is here"):
            load_model(str(tmp_path / name))
        check_networks(export_tiny_model(tmp_path / name))  # the name can be used again


def test_an_existing_model_is_not_replaced(tmp_path: Path) -> None:
    for name in ("m", "m.zip"):
        export_tiny_model(tmp_path / name)
        with pytest.raises(RunError, match=r"a model already exists here. Choose another name"):
            export_tiny_model(tmp_path / name)


def test_folder_of_something_else_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    assert not is_model(str(tmp_path / "run"))
    export_tiny_model(tmp_path / "m")
    assert is_model(str(tmp_path / "m"))


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "m"
    export_tiny_model(folder)
    return folder


@pytest.fixture
def copy(exported: Path, tmp_path: Path) -> Path:
    """A copy of a model that a test may damage."""
    shutil.copytree(exported, tmp_path / "m")
    return tmp_path / "m"


def load_everything(folder: Path) -> None:
    check_networks(load_model(str(folder)))


def test_tampered_weights_are_refused(copy: Path) -> None:
    path = copy / "weights/fold_1.safetensors"
    body = bytearray(path.read_bytes())
    body[-1] ^= 1
    path.write_bytes(body)
    with pytest.raises(CorruptError, match=r"fold_1.safetensors: .* SHA-256 differs .*\. Copy the model again"):
        load_everything(copy)
    path.write_bytes(body[:-4])
    with pytest.raises(CorruptError, match=r"it has [\d,]+ bytes instead of [\d,]+\."):
        load_everything(copy)


def test_missing_weights_are_named(copy: Path) -> None:
    (copy / "weights/fold_1.safetensors").unlink()
    with pytest.raises(IncompleteError, match=r"fold_1.safetensors: the model lacks this file. Copy the whole model"):
        load_everything(copy)


def test_damaged_zip_file(exported: Path, tmp_path: Path) -> None:
    export_tiny_model(tmp_path / "m.zip")
    body = (tmp_path / "m.zip").read_bytes()
    (tmp_path / "cut.zip").write_bytes(body[: len(body) // 2])
    with pytest.raises(IncompleteError, match=r"cut.zip: not a complete .zip file"):
        load_model(str(tmp_path / "cut.zip"))
    with zipfile.ZipFile(tmp_path / "again.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(exported / "model.json", "model.json")
    with pytest.raises(IncompleteError, match="compressed again"):
        load_model(str(tmp_path / "again.zip"))
    spoiled = bytearray(body)
    spoiled[len(body) // 2] ^= 1  # in the weights of one of the folds
    (tmp_path / "spoiled.zip").write_bytes(spoiled)
    with pytest.raises(CorruptError):
        load_everything(tmp_path / "spoiled.zip")


BAD_DESCRIPTIONS: list[tuple[dict[str, Any], type[VoxlaneError], str]] = [
    ({"version": 2}, RunError, r"newer version of voxlane \(format 2; this version reads formats up to 1\). Install"),
    ({"version": None}, RunError, "newer version"),
    ({"format": "other"}, RunError, "not the description of an exported model"),
    ({"members": []}, ConfigError, r"model.json: members: "),
    ({"files": {"../outside": {"size_bytes": 1, "sha256": "0"}}}, ConfigError, "'../outside' is not inside the model"),
    ({"files": {}}, IncompleteError, "fold_0.safetensors: the model lacks this file"),
]


@pytest.mark.parametrize(("changes", "kind", "words"), BAD_DESCRIPTIONS)
def test_unusable_descriptions(copy: Path, changes: dict[str, Any], kind: type[VoxlaneError], words: str) -> None:
    values = json.loads((copy / "model.json").read_text())
    (copy / "model.json").write_text(json.dumps(values | changes))
    with pytest.raises(kind, match=words):
        load_everything(copy)


def test_description_that_is_not_json(copy: Path) -> None:
    (copy / "model.json").write_text("{")
    with pytest.raises(RunError, match="not the description of an exported model"):
        load_model(str(copy))


def test_weights_of_another_network(tmp_path: Path) -> None:
    facts = make_facts(make_member("fold_0"))
    save_model(facts, lambda member: {"down.0.0.weight": torch.zeros(1)}, str(tmp_path / "m"))
    with pytest.raises(MismatchError, match=r"the weights do not match the network fold_0 in model.json"):
        load_everything(tmp_path / "m")


def test_facts_that_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match="two networks have the same name"):
        make_facts(make_member("a"), make_member("a"))
    with pytest.raises(ConfigError, match="name"):
        make_member("../a")
    with pytest.raises(ConfigError, match=r"\[7\] are not label values"):
        make_facts(postprocessing=Postprocessing(keep_largest=((1, 7),)))
    assert make_facts().description == DESCRIPTION
