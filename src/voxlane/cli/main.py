"""`voxlane`: the command line.

`voxlane` and `voxlane --help` print the table of commands and import nothing else. Each command is imported when it
runs; `voxlane.cli.flags` says how to declare one.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from voxlane import redaction
from voxlane.errors import ReportedError, StoppedError, UsageError, VoxlaneError

if TYPE_CHECKING:
    from voxlane.cli.flags import CommandParser

COMMANDS: dict[str, tuple[str, str]] = {
    "prepare": ("segmentation", "Check scans and write them as a dataset to train on"),
    "check": ("segmentation", "Check scans without preparing them, or a prepared dataset"),
    "train": ("segmentation", "Train a segmentation network on a prepared dataset"),
    "evaluate": ("segmentation", "Score a run on the cases it did not train on"),
    "score": ("scores", "Score masks from any tool against labels"),
    "compare": ("scores", "Compare the scores of two runs on the same cases"),
    "predict": ("models", "Segment new scans"),
    "export": ("models", "Write a trained model that needs neither its run nor its dataset"),
    "import": ("import_model", "Turn a model or a preprocessed dataset of nnU-Net into one of voxlane"),
    "report": ("segmentation", "Write one page about a run: curves, scores, overlays, timing"),
    "tune": ("segmentation", "Search for the best config with many training runs at once"),
    "stage": ("stage", "Copy a dataset to this machine's own disk"),
    "slurm": ("slurm", "Run commands as SLURM jobs"),
    "slurm submit": ("slurm", "Submit a voxlane command as a job"),
    "slurm render": ("slurm", "Print the batch script of a voxlane command's job"),
    "slurm status": ("slurm", "Show your jobs: state, reason for waiting, progress"),
    "slurm logs": ("slurm", "Print the log of a job"),
    "slurm cancel": ("slurm", "Cancel jobs; their checkpoints and results stay"),
    "app": ("app", "Run a training app on Kubernetes"),
    "app init": ("app", "Create the folder of an app from a template"),
    "app templates": ("app", "List the templates that `voxlane app init` offers"),
    "app fields": ("app", "List the fields of app.yaml, with their defaults"),
    "app build": ("app", "Build and push the app's image"),
    "app render": ("app", "Print the app's manifests"),
    "app update": ("app", "Merge a template's changes into an app"),
    "app deploy": ("app_cluster", "Start an app in the cluster"),
    "app status": ("app_cluster", "Show the state of an app, and why it is not running"),
    "app logs": ("app_cluster", "Print the output of an app's pods"),
    "app events": ("app_cluster", "Print the cluster's events about an app"),
    "app exec": ("app_cluster", "Run a command in one of an app's pods"),
    "app tensorboard": ("app_cluster", "Show TensorBoard of an app's run at a local port"),
    "app undeploy": ("app_cluster", "Remove everything that an app created in the cluster"),
    "app entry": ("app", "Run a command as the first process of a container"),
    "operator": ("operator", "Stage datasets onto nodes' disks in a cluster"),
    "operator install": ("operator", "Install the operator, and the kind StagedDataset, in a cluster"),
    "operator uninstall": ("operator", "Remove the operator from a cluster"),
    "operator convert": ("operator", "Print StagedDatasets for the VolumeManagers of kube-volume-controller"),
    "operator run": ("operator", "Run the operator until SIGTERM or Ctrl-C"),
    "operator agent": ("operator", "Commands that the operator's pods run"),
    "operator agent prepare": ("operator", "Make the folder of a namespace on this node, for the operator"),
    "operator agent stage": ("operator", "Copy a dataset to this node, for the operator"),
    "operator agent remove": ("operator", "Remove a dataset from this node, for the operator"),
    "tensorboard": ("segmentation", "Show a run in TensorBoard"),
    "checkpoint": ("checkpoint", "List, verify, copy, remove and clean up checkpoints"),
    "checkpoint ls": ("checkpoint", "List checkpoints, including unfinished ones, oldest first"),
    "checkpoint latest": ("checkpoint", "Print the URI of the newest complete checkpoint"),
    "checkpoint verify": ("checkpoint", "Read every byte of checkpoints and compare with their checksums"),
    "checkpoint rm": ("checkpoint", "Delete a checkpoint, or all but the newest"),
    "checkpoint gc": ("checkpoint", "Remove unfinished uploads and stray files that killed saves left"),
    "checkpoint cp": ("checkpoint", "Copy a checkpoint to another URI, checking every byte"),
    "bench": ("bench", "Run benchmarks on your own machines and buckets"),
    "bench checkpoint": ("bench", "Save and load checkpoints of a demo model"),
    "bench loading": ("bench", "Load data as training does, and report what it waits for"),
    "bench scaling": ("bench", "Measure how training or a search speeds up with more workers"),
    "bench simulate": ("bench", "Simulate loading on up to thousands of nodes"),
    "bench step": ("bench", "Time one training step on this device, in several variants"),
    "ls": ("storage", "List the objects under a URI, or save them as a manifest"),
    "cp": ("storage", "Copy a prepared dataset, or any objects, between disks and buckets"),
    "clean": ("storage", "Remove temporary objects that killed runs left in a GCS bucket"),
    "completion": ("completion", "Print a script that completes commands in your shell"),
    "emulator": ("storage", "Serve a local, in-memory GCS and S3 (needs voxlane[testing])"),
}
"""Module of voxlane.cli and summary of every command. The summary is the first line of the docstring of the command's
record, which is named after the command: `AppInitCommand` is `voxlane app init`. A command that has subcommands has no
record; its help text is `HELP` of its module."""
HIDDEN = frozenset({"app entry", "operator agent"})
"""Commands that containers run and no help lists."""

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
  voxlane export gs://my-bucket/run1 gs://my-bucket/model  all that predict needs, without the run and the dataset
  voxlane slurm submit --nodes 2 --gpus-per-node 4 -- train gs://my-bucket/kits19-prepared --run gs://my-bucket/run2
  voxlane app init kits19 && voxlane app deploy kits19     the same on Kubernetes; see voxlane app --help
  voxlane tensorboard gs://my-bucket/run1                  curves and images in a browser
  voxlane ls gs://my-bucket/kits19/ --match '*.nii.gz'     list objects
  voxlane ls s3://my-bucket/scans/ --save scans.parquet    a manifest for training, pinned to versions
  voxlane checkpoint latest gs://my-bucket/run1            the newest complete checkpoint
  voxlane emulator --bucket demo                           a local GCS and S3 to try things on
"""


_LACK_OF_MEMORY = re.compile("can't start new thread|failed to map segment|cannot allocate memory", re.IGNORECASE)
"""What Python, the loader of shared libraries and the system say when a process may have no more memory."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status. A user's mistake is one line on stderr, never a traceback."""
    # Torch reads this when it is loaded. Threads that spin while they wait for each other take the processor from those
    # that fetch and decode patches, and from everything else on the machine: measured, 4 times slower steps.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        before = _count_retries()
        try:
            status = _run(list(sys.argv[1:] if arguments is None else arguments))
        finally:
            if retries := _count_retries() - before:
                print(f"voxlane: {retries:,} failed request{'s' * (retries != 1)} repeated", file=sys.stderr)
        sys.stdout.flush()
        return status
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    except StoppedError as error:
        print(f"voxlane: {error}", file=sys.stderr)
        return _mark_stopped()
    except ReportedError:
        return 1
    except VoxlaneError as error:
        print(f"voxlane: {error}{_suggest_path(error.uri)}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of our output went away, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (MemoryError, RuntimeError, ImportError, OSError) as error:
        if not isinstance(error, MemoryError) and not _LACK_OF_MEMORY.search(str(error)):
            raise
        print("voxlane: memory ran out. Use a machine with more, or raise the limit (ulimit -v)", file=sys.stderr)
        return 1
    except KeyboardInterrupt as interrupt:
        from voxlane.cli.signals import TerminatedError

        is_terminated = isinstance(interrupt, TerminatedError)
        cause = "stopped by SIGTERM" if is_terminated else "interrupted"
        print("; ".join([f"voxlane: {cause}", *map(str, interrupt.args)]), file=sys.stderr)
        return _mark_stopped() if is_terminated else 130


def _mark_stopped() -> int:
    """Return the status of a command that was asked to stop, and tell its launcher so."""
    from voxlane.cluster.commands import STOPPED, mark_stopped

    mark_stopped(os.environ)
    return STOPPED


def _count_retries() -> int:
    """Return how many requests of this process failed and were repeated."""
    counters: Any = sys.modules.get("voxlane.store.counters")  # not loaded by commands without a bucket
    return 0 if counters is None else int(counters.count_process_retries())


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
    parser = load_parser(name)
    if "-h" in flags or "--help" in flags:
        sys.stdout.write(parser.format_help())
        return 0
    if "--fields" in flags and hasattr(parser.command_class, "config_class"):
        from voxlane.cli.config_options import format_config_fields

        sys.stdout.write(format_config_fields(name, parser.command_class, flags))
        return 0
    from voxlane.cli.signals import terminated_by_sigterm
    from voxlane.processes import end_with_launcher
    from voxlane.temporary import remove_abandoned

    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_launcher()
    with terminated_by_sigterm():
        remove_abandoned()
        _protect_secrets(rest)
        return parser.run(rest)


def _protect_secrets(words: Sequence[str]) -> None:
    """Hide the secrets on the command line from the list of processes, and say which ways are safer."""
    names = redaction.name_secrets(words)
    if not names:
        return
    redaction.hide_from_process_list(redaction.find_secrets(words))
    if os.environ.get("RANK", "0") == "0":
        print(
            f"voxlane: warning: other users of this machine can read {', '.join(names)} on the command line, and the "
            "shell's history keeps it; safer: variables such as AWS_SECRET_ACCESS_KEY, a profile "
            "(store.profile=NAME) or a file (--config FILE)",
            file=sys.stderr,
        )


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
    """Return the error for a missing or unknown command of a group; for an unknown one, suggest the nearest."""
    from voxlane.cli.help import did_you_mean

    names = list(subcommands(group))
    kind = "option" if words and words[0].startswith("-") else "command"
    problem = f"unknown {kind} {words[0]!r}" if words else "missing COMMAND"
    suggestion = did_you_mean(words[0], [*names, "--help", "--version"]) if words else ""
    choices = f". Choose from: {', '.join(names)}"
    return UsageError(f"{f'voxlane {group}'.strip()}: {problem}{suggestion or choices}")


def load_parser(name: str) -> CommandParser:
    """Import a command, such as `AppInitCommand` for `app init`, and make the parser of its flags."""
    from pkgutil import resolve_name

    from voxlane.cli.flags import CommandParser

    class_name = f"{name.title().replace(' ', '')}Command"
    return CommandParser(name, resolve_name(f"voxlane.cli.{COMMANDS[name][0]}:{class_name}"))


def parse(words: Sequence[str]) -> Any:
    """Return the command of a whole command line, or raise UsageError or ConfigError, without running it."""
    name, rest = split_command(words)
    if is_group(name):
        raise _wrong_command(name, rest)
    return load_parser(name).parse(rest)


def _format_group(name: str) -> str:
    """Return the help of a command that has subcommands, or of `voxlane` itself."""
    import importlib

    from voxlane.cli.help import format_rows, format_text, terminal_width

    width = terminal_width()
    description = importlib.import_module(f"voxlane.cli.{COMMANDS[name][0]}").HELP if name else _DESCRIPTION
    usage = f"Usage: voxlane {name} COMMAND ..." if name else "Usage: voxlane [--version] [--help] COMMAND ..."
    text, _, examples = description.partition("\nExamples:\n")
    parts = [usage, format_text(text, width), f"Commands:\n{format_rows(list(subcommands(name).items()), width, 16)}"]
    parts += [f"Examples:\n{examples.rstrip()}"] if examples else []
    parts += [] if name else [format_text(_EPILOG, width)]
    return "\n\n".join(parts) + "\n"


def _suggest_path(uri: str) -> str:
    """Return a suggestion for a local path with a missing part that is spelt like an existing file or folder."""
    path = uri.removeprefix("file://").rstrip("/")
    if not path or "://" in path or os.path.lexists(path):
        return ""
    while not os.path.isdir(os.path.dirname(path) or "."):
        path = os.path.dirname(path)
    if os.path.lexists(path):
        return ""
    from voxlane.cli.help import did_you_mean

    folder, name = os.path.split(path)
    return did_you_mean(name, os.listdir(folder or "."), os.path.join(folder, ""), cutoff=0.75)


if __name__ == "__main__":
    sys.exit(main())
