"""One file plus dotted overrides, refused by the field's name."""

from __future__ import annotations

from pathlib import Path

import pydantic
import pytest

from voxlane import settings
from voxlane.errors import ConfigError
from voxlane.settings import record


@record
class Inner:
    rate: float = pydantic.Field(default=0.1, gt=0)
    """How fast."""
    sizes: tuple[int, ...] = (1, 2)


@record
class Outer:
    epochs: int = 3
    """How long."""
    inner: Inner = Inner()


def test_file_and_overrides(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("epochs: 5\ninner:\n  rate: 0.5\n")
    made = settings.load(Outer, file, ["inner.rate=1e-3", "inner.sizes=[4,5,6]"])
    assert made == Outer(epochs=5, inner=Inner(rate=1e-3, sizes=(4, 5, 6)))
    assert settings.build(Outer, settings.plain(made)) == made


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["epoch=4"], r"epoch: no such field. Did you mean epochs\?"),
        (["inner.rat=4"], r"inner.rat: no such field. Did you mean inner.rate\?"),
        (["inner.rate=-1"], "inner.rate: input should be greater than 0, not -1"),
        (["inner.rate=fast"], "inner.rate: .*number.*'fast'"),
        (["epochs.x=1", "epochs=many"], "epochs: "),
        (["epochs"], "is no override"),
        (["inner=4"], "inner: "),
    ],
)
def test_refusals_name_the_field(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        settings.load(Outer, None, overrides)


def test_records_built_in_code_are_checked_too() -> None:
    with pytest.raises(ConfigError, match="rate: "):
        Inner(rate=0)


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        settings.load(Outer, tmp_path / "none.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: [1,\nb: 2")
    with pytest.raises(ConfigError, match="not YAML or JSON, line"):
        settings.load(Outer, broken)
    broken.write_text("- 1")
    with pytest.raises(ConfigError, match="named fields"):
        settings.load(Outer, broken)


def test_help_shows_defaults_and_words() -> None:
    text = settings.help_text(Outer)
    assert "epochs=3" in text
    assert "inner.rate=0.1" in text
    assert "How fast." in text
