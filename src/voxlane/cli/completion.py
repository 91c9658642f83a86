"""`voxlane completion`: completion of commands and flags in a shell."""

from __future__ import annotations

import sys
from typing import Annotated, Literal

import cyclopts

from voxlane.cli.main import COMMANDS, HIDDEN, is_group, load_parser
from voxlane.settings import ARGUMENT, record


@record
class CompletionCommand:
    """Print a script that completes commands in your shell.

    Load the script in the shell's start-up file, or store it where the shell looks for completions.

    Examples:
      voxlane completion bash > ~/.local/share/bash-completion/completions/voxlane
      voxlane completion zsh > ~/.zsh/completions/_voxlane
      voxlane completion fish > ~/.config/fish/completions/voxlane.fish
    """

    shell: Annotated[Literal["bash", "zsh", "fish"], ARGUMENT]
    """Name of your shell."""

    def _run(self) -> None:
        sys.stdout.write(make_app().generate_completion(shell=self.shell))


def make_app() -> cyclopts.App:
    """Return all commands as one application of cyclopts."""
    apps = {"": cyclopts.App(name="voxlane", help_format="plaintext", version_flags=())}
    for name, (_, summary) in COMMANDS.items():
        if any(name == hidden or name.startswith(f"{hidden} ") for hidden in HIDDEN):
            continue
        parent, _, last = name.rpartition(" ")
        apps[name] = cyclopts.App(name=last, help=summary) if is_group(name) else load_parser(name).app
        apps[parent].command(apps[name])
    return apps[""]
