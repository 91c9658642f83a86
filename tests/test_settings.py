"""Config files, dotted overrides, flags of fields, and errors that name the field."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import pydantic
import pytest

from voxlane import settings
from voxlane.cli.config_options import format_fields
from voxlane.errors import ConfigError
from voxlane.settings import ARGUMENT, Flag, PathOrUri, record, suggest_field


@record
class Inner:
    rate: float = pydantic.Field(default=0.1, gt=0)
    """Learning rate."""
    ls: float = 0.5
    """Label smoothing."""
    sizes: tuple[int, ...] = (1, 2)
    """Sizes of the layers."""


@record
class Outer:
    epochs: int = 3
    """Number of epochs."""
    inner: Inner = Inner()


def load(values: dict[str, Any], overrides: Sequence[str] = ()) -> Outer:
    for override in overrides:
        settings.set_dotted(values, override)
    return settings.build(Outer, values)


def test_file_and_overrides(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("epochs: 5\ninner:\n  rate: 0.5\n")
    config = load(settings.read_file(file), ["inner.rate=1e-3", "inner.sizes=[4,5,6]"])
    assert config == Outer(epochs=5, inner=Inner(rate=1e-3, sizes=(4, 5, 6)))
    assert settings.build(Outer, settings.to_plain(config)) == config


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["epoch=4"], r"epoch: no such field. Did you mean epochs\?"),
        (["inner.label_smoothing=4"], r"inner.label_smoothing: no such field. Did you mean inner.ls\?"),
        (["ls=4"], r"ls: no such field. Did you mean inner.ls\?"),
        (["inner.rat=4"], r"inner.rat: no such field. Did you mean inner.rate\?"),
        (["inner.rate=-1"], "inner.rate: expected a value greater than 0, got -1"),
        (["inner.rate=fast"], "inner.rate: expected a number, got 'fast'"),
        (["epochs=many"], "epochs: expected an integer, got 'many'"),
        (["epochs.x=1", "epochs=many"], "epochs: "),
        (["epochs"], "expected field=value, got 'epochs'"),
        (["inner=4"], "inner: "),
    ],
)
def test_errors_name_the_field(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load({}, overrides)


def test_suggestions_prefer_fields_of_the_same_parent() -> None:
    fields = ["optimizer.lr", "optimizer.lr_scaling", "optimizer.weight_decay", "loader.workers", "learning", "epochs"]
    for name, suggestion in (
        ("optimizer.learning_rate", "optimizer.lr"),
        ("optimizer.wd", "optimizer.weight_decay"),
        ("optimizer.decay", "optimizer.weight_decay"),
        ("optimizr.lr", "optimizer.lr"),
        ("workers", "loader.workers"),
        ("num_epochs", "epochs"),
    ):
        assert suggest_field(name, fields) == suggestion
    assert suggest_field("zzz", fields) == ""


def test_records_built_in_code_are_validated_too() -> None:
    with pytest.raises(ConfigError, match="rate: "):
        Inner(rate=0)


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        settings.read_file(tmp_path / "none.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: [1,\nb: 2")
    with pytest.raises(ConfigError, match="not YAML or JSON, line"):
        settings.read_file(broken)
    broken.write_text("- 1")
    with pytest.raises(ConfigError, match="expected named fields"):
        settings.read_file(broken)


def test_errors_use_labels_and_the_origin() -> None:
    with pytest.raises(ConfigError, match=r"^c.yaml: --epochs: expected an integer, got 'x'$") as error:
        settings.build(Outer, {"epochs": "x"}, origin="c.yaml", labels={"epochs": "--epochs"})
    assert error.value.code == "int_parsing"


def test_fields_show_defaults_and_descriptions() -> None:
    text = format_fields(Outer)
    for expected in ("epochs=3", "inner.rate=0.1", "inner.sizes=[1,2]", "Learning rate."):
        assert expected in text
    replaced = format_fields(Outer, {"epochs": 9, "inner": {"rate": None}})
    for expected in ("epochs=9", "inner.rate=null", "inner.ls=0.5"):
        assert expected in replaced


@record
class Base:
    path: Annotated[PathOrUri | None, Flag("-p", metavar="FILE")] = None
    """File to read."""


@record
class Derived(Base):
    paths: Annotated[tuple[PathOrUri, ...], ARGUMENT] = ()
    """Files to write."""
    name: str = ""
    """Name of the copy."""


def test_flags_and_descriptions_of_fields_are_inherited() -> None:
    fields = settings.record_fields(Derived)
    assert {name: settings.is_path(field) for name, field in fields.items()} == {
        "path": True,
        "paths": True,
        "name": False,
    }
    assert settings.flag_of(fields["path"]) == Flag("-p", metavar="FILE")
    assert settings.flag_of(fields["paths"]).positional
    assert fields["path"].description == "File to read."
