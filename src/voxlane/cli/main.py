"""`voxlane`: the command line.

`voxlane` and `voxlane --help` print the table of commands and import nothing else. Each command is imported when it
runs; `voxlane.cli.flags` says how to declare one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from voxlane.cli.commands import COMMANDS, HIDDEN
from voxlane.errors import ReportedError, StoppedError, UsageError, VoxlaneError

if TYPE_CHECKING:
    from voxlane.cli.flags import Command, Invocation

_DESCRIPTION = "From a bucket of 3D scans to a trained, evaluated segmentation model."

_EPILOG = """\
URIs: gs://bucket/prefix, s3://bucket/prefix, az://container/prefix, file:///folder or a plain path. Credentials are
those that each cloud's own tools use. For a compatible server or an emulator, give its URL with --endpoint, in the
[store] table of a --config file, or as STORAGE_EMULATOR_HOST or AWS_ENDPOINT_URL.

Examples:
  voxlane prepare gs://my-bucket/kits19 gs://my-bucket/kits19-prepared
  voxlane train gs://my-bucket/kits19-prepared --run gs://my-bucket/run1
  voxlane tune space.yaml gs://my-bucket/kits19-prepared --run gs://my-bucket/search1
  voxlane evaluate gs://my-bucket/run1 && voxlane report gs://my-bucket/run1
  voxlane predict gs://my-bucket/run1 scan.nii.gz -o masks
  voxlane slurm submit --nodes 2 --gpus-per-node 4 -- train gs://my-bucket/kits19-prepared --run gs://my-bucket/run2
  voxlane app init kits19 && voxlane app deploy kits19     the same on Kubernetes; see voxlane app --help
  voxlane tensorboard gs://my-bucket/run1                  curves and images in a browser
  voxlane ls gs://my-bucket/kits19/ --match '*.nii.gz'     list objects
  voxlane ls s3://my-bucket/scans/ --save scans.parquet    a manifest for training, pinned to versions
  voxlane checkpoint latest gs://my-bucket/run1            the newest complete checkpoint
  voxlane emulator --bucket demo                           a local GCS and S3 to try things on
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status. A user's mistake is one line on stderr, never a traceback."""
    # Torch reads this when it is loaded. Threads that spin while they wait for each other take the processor from those
    # that fetch and decode patches, and from everything else on the machine: measured, 4 times slower steps.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        status = _run(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()
        return status
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    except StoppedError as error:
        print(f"voxlane: {error}", file=sys.stderr)
        from voxlane.cluster.commands import STOPPED, mark_stopped

        mark_stopped(os.environ)
        return STOPPED
    except ReportedError:
        return 1
    except VoxlaneError as error:
        print(f"voxlane: {error}{_suggest_path(error.uri)}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of our output went away, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("voxlane: interrupted", file=sys.stderr)
        return 130


def _run(words: list[str]) -> int:
    if words[:1] == ["--version"]:
        from voxlane import __version__

        print(f"voxlane {__version__}")
        return 0
    name, rest = split_command(words)
    flags = rest[: rest.index("--")] if "--" in rest else rest
    if is_group(name):
        if not words or flags[:1] in (["-h"], ["--help"]):
            sys.stdout.write(_format_group(name))
            return 0
        raise _wrong_command(name, rest)
    command = load_command(name)
    if "-h" in flags or "--help" in flags:
        sys.stdout.write(command.format_help())
        return 0
    if "--fields" in flags and command.config_class:
        from voxlane.cli.config_options import format_config_fields

        presets = load_object(command.presets) if command.presets else {}
        sys.stdout.write(format_config_fields(name, load_object(command.config_class), presets, flags))
        return 0
    return command.parse(rest).run()


def split_command(words: Sequence[str]) -> tuple[str, list[str]]:
    """Return the name of the command that `words` start with, empty if they start with none, and the other words."""
    names = (" ".join(words[:count]) for count in (3, 2, 1))
    name = next((name for name in names if name in COMMANDS), "")
    return name, list(words[len(name.split()) :])


def subcommands(name: str) -> dict[str, str]:
    """Return the commands directly below `name` with their summaries; an empty name is the top level."""
    below = {}
    for command, (_, summary) in COMMANDS.items():
        parent, _, last = command.rpartition(" ")
        if parent == name and command not in HIDDEN:
            below[last] = summary
    return below


def is_group(name: str) -> bool:
    """Return whether a command has subcommands; an empty name is the top level."""
    return not name or any(command.startswith(f"{name} ") for command in COMMANDS)


def _wrong_command(group: str, words: Sequence[str]) -> UsageError:
    """Return the error for a group whose command is missing, or unknown: then with the one that is spelt like it."""
    from voxlane.cli.help import did_you_mean

    names = list(subcommands(group))
    problem = f"unknown command {words[0]!r}" if words else "missing COMMAND"
    suggestion = did_you_mean(words[0], names) if words else ""
    choices = f". Choose from: {', '.join(names)}"
    return UsageError(f"{f'voxlane {group}'.strip()}: {problem}{suggestion or choices}")


def load_object(path: str) -> Any:
    """Import the object at `module:name`."""
    import importlib

    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def load_command(name: str) -> Command:
    """Import a command and make the parser of its flags."""
    from voxlane.cli.flags import Command

    return Command(name, load_object(f"voxlane.cli.{COMMANDS[name][0]}"))


def parse(words: Sequence[str]) -> Invocation:
    """Parse a whole command line without running it; raise UsageError or ConfigError for a wrong one."""
    name, rest = split_command(words)
    if is_group(name):
        raise _wrong_command(name, rest)
    return load_command(name).parse(rest)


def _format_group(name: str) -> str:
    """Return the help of a command that has subcommands, or of `voxlane` itself."""
    from voxlane.cli.help import format_rows, format_text, terminal_width

    width = terminal_width()
    description = load_object(f"voxlane.cli.{COMMANDS[name][0]}") if name else _DESCRIPTION
    usage = f"Usage: voxlane {name} COMMAND ..." if name else "Usage: voxlane [--version] [--help] COMMAND ..."
    text, _, examples = description.partition("\nExamples:\n")
    parts = [usage, format_text(text, width), f"Commands:\n{format_rows(list(subcommands(name).items()), width, 16)}"]
    parts += [f"Examples:\n{examples.rstrip()}"] if examples else []
    parts += [] if name else [format_text(_EPILOG, width)]
    return "\n\n".join(parts) + "\n"


def _suggest_path(uri: str) -> str:
    """Return a suggestion for a local path of which a part does not exist and is spelt like a file or folder there."""
    path = uri.removeprefix("file://").rstrip("/")
    if not path or "://" in path or os.path.exists(path):
        return ""
    while not os.path.isdir(os.path.dirname(path) or "."):
        path = os.path.dirname(path)
    if os.path.exists(path):
        return ""
    from voxlane.cli.help import did_you_mean

    folder, name = os.path.split(path)
    return did_you_mean(name, os.listdir(folder or "."), os.path.join(folder, ""), cutoff=0.75)


if __name__ == "__main__":
    sys.exit(main())
