"""Flags that come from records, the table of commands, suggestions, help and completion."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import pydantic
import pytest

from voxlane.cli.flags import CommandParser, paths_of, summary_of
from voxlane.cli.main import COMMANDS, is_group, load_parser, main, parse
from voxlane.errors import ConfigError, UsageError
from voxlane.settings import ARGUMENT, NO_FLAG, REMAINDER, Flag, PathOrUri, record


@record
class Common:
    flag_group: ClassVar[str] = "Common options"

    endpoint: str | None = None
    """Server to use."""


@record
class Copy(Common):
    """Copy a folder.

    More about it.

    Examples:
      voxlane copy a -o b
    """

    source: Annotated[PathOrUri, ARGUMENT]
    """Folder to read."""
    overrides: Annotated[tuple[str, ...], Flag(positional=True, metavar="field=value")] = ()
    """Config fields."""
    target: Annotated[PathOrUri | None, Flag("-o", "--out")] = None
    """Folder to write."""
    mode: Literal["fast", "exact"] = "fast"
    """How to copy."""
    count: Annotated[int, pydantic.Field(ge=1)] = 3
    """Number of copies."""
    sizes: Annotated[tuple[int, ...], Flag(long="--size")] = (1, 2)
    """Size to try (repeatable)."""
    match: tuple[str, ...] = ()
    """Pattern (repeatable)."""
    wait: bool = True
    """Wait for the end."""
    share: Annotated[float, pydantic.Field(le=1)] = 1.0
    """Share of the machine."""
    verbose: Annotated[bool, Flag("-v")] = False
    """Print more."""
    nodes: Annotated[str | None, Flag(bare_value="all")] = None
    """Number of nodes."""
    secret: Annotated[int, Flag(hidden=True)] = 0
    """Not for people."""
    internal: Annotated[int, NO_FLAG] = 7
    """Not a flag."""

    def _run(self) -> int:
        return self.count


def parse_words(*words: str) -> Copy:
    command = CommandParser("copy", Copy).parse(words)
    assert isinstance(command, Copy)
    return command


def test_fields_become_flags() -> None:
    assert parse_words("a") == Copy(source="a")
    assert parse_words("a", "x=1", "-o", "b", "y.z=2", "--match", "p", "--match=q", "-v", "--no-wait") == Copy(
        source="a", overrides=("x=1", "y.z=2"), target="b", match=("p", "q"), verbose=True, wait=False
    )
    assert parse_words(
        "a", "--mode", "exact", "--count", "5", "--size", "4", "--size", "8", "--endpoint", "e"
    ).sizes == (4, 8)
    assert parse_words("a", "--count=1", "--count=2").count == 2, "the last value counts"
    assert CommandParser("copy", Copy).run(["a", "--count", "9"]) == 9


@pytest.mark.parametrize(
    ("words", "nodes"), [(["--nodes"], "all"), (["--nodes", "2"], "2"), (["--nodes", "-v"], "all")]
)
def test_flag_with_an_optional_value(words: list[str], nodes: str) -> None:
    assert parse_words("a", *words).nodes == nodes


def test_path_options_are_recognised_by_their_type() -> None:
    assert paths_of(parse_words("a", "--out", "b", "--match", "c")) == {"a", "b"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "voxlane copy: missing SOURCE. See: voxlane copy --help"),
        (["a", "--out"], "--out expects a value"),
        (["a", "--moode", "fast"], "voxlane copy: unknown option --moode. Did you mean --mode?"),
        (["--moode", "fast"], "voxlane copy: unknown option --moode. Did you mean --mode?"),
        (["a", "--verb"], "unknown option --verb. Did you mean --verbose?"),
        (["a", "--internal", "3"], "unknown option --internal"),
        (["a", "--count", "many"], "--count: expected an integer, got 'many'"),
        (["a", "--mode", "slow"], "--mode: expected fast or exact, got 'slow'"),
    ],
)
def test_usage_errors_are_one_line(words: list[str], message: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_words(*words)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_underscores_stand_for_dashes() -> None:
    parser = load_parser("bench checkpoint")
    assert parser.parse(["--save_only", "--dir=a_b", "--no_plot", "--out", "c_d.json"]).out == "c_d.json"
    with pytest.raises(UsageError, match=r"unknown option --save_onyl\. Did you mean --save-only"):
        parser.parse(["--save_onyl", "--dir=a"])


def test_values_that_the_record_refuses_name_the_flag() -> None:
    with pytest.raises(ConfigError, match=r"^--count: expected a value greater than or equal to 1, got 0$"):
        parse_words("a", "--count", "0")


@record
class Wrap:
    """Run another command."""

    nodes: int = 1
    """Number of nodes."""
    quick: bool = False
    """Skip checks."""
    command: Annotated[tuple[str, ...], REMAINDER] = ()
    """Command to run."""


@pytest.mark.parametrize("separator", [["--"], []])
def test_arguments_of_another_command_are_not_parsed(separator: list[str]) -> None:
    words = ["--nodes", "2", "--quick", *separator, "train", "--nodes", "4", "--", "-x"]
    assert CommandParser("wrap", Wrap).parse(words) == Wrap(
        nodes=2, quick=True, command=("train", "--nodes", "4", "--", "-x")
    )


def test_help_is_grouped_and_fits_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    text = CommandParser("copy", Copy).format_help()
    assert text.startswith("Usage: voxlane copy [OPTIONS] SOURCE [field=value ...]\n\nCopy a folder.\n\nMore about it.")
    for expected in (
        "Examples:\n  voxlane copy a -o b\n",
        "-o, --out URI",
        "Choices: fast, exact.",
        "--wait, --no-wait",
    ):
        assert expected in text
    for default in ("(default: 3)", "(default: 1)", "(default: 1,2)"):
        assert default in " ".join(text.split())
    assert "secret" not in text
    assert "internal" not in text
    assert max(map(len, text.splitlines())) <= 60
    assert "\x1b" not in text


# -- all commands ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMMANDS)
def test_help_table_matches_the_commands(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*name.split(), "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"Usage: voxlane {name} ")
    if is_group(name):
        return
    assert COMMANDS[name][1] == summary_of(load_parser(name).command_class)
    lines = text.partition("Options:")[2].splitlines()
    for line, next_line in itertools.pairwise(lines):  # the help of a long flag begins on the next line
        assert not line.startswith("  -") or len(line.split()) > 1 or next_line.startswith("      ")
    assert "  None" not in text


def test_every_flag_has_help() -> None:
    for name in COMMANDS:
        if not is_group(name):
            for option in load_parser(name)._options:
                assert option.help.strip(), (name, option.name)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "voxlane: unknown command 'trian'. Did you mean train?"),
        (["--verison"], "voxlane: unknown option '--verison'. Did you mean --version?"),
        (["bench", "--hlep"], "voxlane bench: unknown option '--hlep'. Did you mean --help?"),
        (["train", "--hlep"], "voxlane train: unknown option --hlep. Did you mean --help?"),
        (
            ["train", "d", "--run", "r", "--epochs", "2"],
            "unknown option --epochs: epochs is a config field, write epochs=VALUE",
        ),
        (["app", "depoly"], "voxlane app: unknown command 'depoly'. Did you mean deploy?"),
        (["checkpoint", "zzz"], "Choose from: ls, latest, verify, rm, gc, cp"),
        (["train", "d", "--rum", "r"], "voxlane train: "),
        (["operator", "agent"], "voxlane operator agent: missing COMMAND. Choose from: prepare, stage, remove"),
        (["bench", "loading"], "voxlane bench loading: missing DATA. See: voxlane bench loading --help"),
        (
            ["bench", "checkpoint", "--save-only", "--load-only", "--dir", "x"],
            "--save-only and --load-only exclude each other",
        ),
    ],
)
def test_misspelt_commands_and_flags(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("name", COMMANDS)
def test_missing_argument_is_named(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    required = ["COMMAND"]
    if not is_group(name):
        required = [option.names[0] for option in load_parser(name)._options if option.required]
    if required:
        assert main(name.split()) == 2
        assert capsys.readouterr().err.startswith(f"voxlane {name}: missing {required[0]}")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("stage", "voxlane stage: missing SOURCE. See: voxlane stage --help"),
        ("stage gs://bucket/data", "voxlane stage: missing FOLDER"),
        ("app exec", "voxlane app exec: missing COMMAND after --. See: voxlane app exec --help"),
        ("app exec demo --", "voxlane app exec: missing COMMAND after --"),
        ("slurm submit --nodes 2 --", "voxlane slurm submit: missing COMMAND after --"),
        ("slurm submit -- voxlane", "voxlane: missing COMMAND. Choose from: prepare, check, train"),
        ("slurm submit -- train d", "voxlane train: missing --run"),
        ("bench checkpoint", "voxlane bench checkpoint: missing --dir"),
        ("bench checkpoint --load-only", "voxlane bench checkpoint: missing --restore"),
        ("train fold=0 --run r", "voxlane train: missing DATA"),
        ("predict mirror=true -o m", "voxlane predict: missing RUN"),
        ("predict r mirror=true -o m", "voxlane predict: missing SCAN"),
        ("evaluate masks=false", "voxlane evaluate: missing RUN"),
        ("prepare a b c", "voxlane prepare: unexpected argument 'c'; write config fields as field=value. See: "),
    ],
)
def test_arguments_are_counted_without_overrides(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith(message)
    assert error.count("\n") == 1


def test_overrides_may_stand_anywhere() -> None:
    command = parse(["train", "fold=1", "--run", "a=b", "data", "--resume", "epochs=3"])
    assert command.data == "data"
    assert command.run == "a=b", "the value of a flag is no override"
    assert command.overrides == ("fold=1", "epochs=3")
    assert paths_of(command) == {"data", "a=b"}


def test_misspelt_file_gets_a_suggestion(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text("epochs: 3\n")
    assert main(["train", "d", "--run", str(tmp_path / "r"), "--config", str(tmp_path / "confg.yaml")]) == 1
    assert f"Did you mean {tmp_path}/config.yaml?" in capsys.readouterr().err
    (tmp_path / "kits19" / "scans").mkdir(parents=True)
    assert main(["ls", str(tmp_path / "kits91" / "scans")]) == 1
    assert f"Did you mean {tmp_path}/kits19?" in capsys.readouterr().err, "a folder on the way"
    (tmp_path / "scan.nii.gz").symlink_to(tmp_path / "nowhere")
    assert main(["check", str(tmp_path / "scan.nii.gz")]) == 1
    assert "Did you mean" not in capsys.readouterr().err, "a link to nothing is spelt right"


@pytest.mark.parametrize("words", ["train --fields", "--help", "train --help", "app fields"])
def test_output_survives_head(words: str) -> None:
    command = f"{sys.executable} -m voxlane {words} | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, env=os.environ, timeout=180)
    assert done.stderr == ""
    assert len(done.stdout.splitlines()) == 1


def test_fields_show_the_defaults_of_the_preset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.yaml").write_text("preset: mlperf\n")
    for words, expected in (
        ([], ["preset=nnunet", "epochs=250", "optimizer.lr=0.01", "validation.max_cases=null"]),
        (["preset=small"], ["preset=small", "epochs=14", "optimizer.lr=0.003", "validation.max_cases=8"]),
        (["--config", str(tmp_path / "c.yaml")], ["preset=mlperf", "epochs=4000", "optimizer.clip_norm=null"]),
    ):
        assert main(["train", "--fields", *words]) == 0
        lines = [line.split("  ")[1] for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
        assert set(expected) <= set(lines)
    assert main(["train", "--fields", "preset=large"]) == 1
    assert "preset: unknown preset 'large'. Choose from: nnunet, small, mlperf" in capsys.readouterr().err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_commands_and_flags(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for word in ("train", "checkpoint", "auto-resume", "deploy", "endpoint"):
        assert word in script
    assert "agent" not in script
    with_values = next((line for line in script.splitlines() if "options_with_values" in line), "--run ")
    assert "--run " in with_values
    assert "--dry-run" not in with_values, "a switch takes no value"


def test_paths_of_other_commands_come_from_their_declarations() -> None:
    command = parse(["train", "data", "--run", "runs/a", "--config", "c.yaml", "epochs=3"])
    assert paths_of(command) >= {"data", "runs/a", "c.yaml"}
    assert paths_of(parse(["tune", "space.yaml", "data", "--run", "o"])) >= {"space.yaml", "data", "o"}
    assert paths_of(parse(["ls", "data", "--save", "m.parquet", "--match", "*"])) == {"data", "m.parquet"}
