"""`voxlane app entry`: what a training container runs; not for people, so that no help lists it."""

from __future__ import annotations

import argparse
import os
import socket
import sys
import tempfile

from voxlane.cli.store_options import add_store_options, store_config
from voxlane.errors import ConfigError

Commands = argparse._SubParsersAction


def add_parser(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "entry",
        description="Run COMMAND as the first process of a container: pass its output and signals on, keep the output "
        "below --logs, and end with its status. Values of variables that look secret are printed as ***.",
    )
    parser.add_argument("--logs", metavar="URI", help="keep the output below URI/POD (POD_NAME, or the host's name)")
    parser.add_argument(
        "--hide", metavar="NAME", action="append", default=[], help="a variable whose value is a secret (repeatable)"
    )
    add_store_options(parser)
    parser.add_argument("command", metavar="-- COMMAND ...", nargs=argparse.REMAINDER, help="what to run")
    parser.set_defaults(run=_entry)


def _entry(options: argparse.Namespace) -> int:
    from voxlane.app.entry import run
    from voxlane.app.hidden import secrets_of
    from voxlane.launch import status as ended

    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        raise ConfigError("no command", fix="Write it after --: voxlane app entry --logs URI -- COMMAND")
    keeper = None
    if options.logs:
        from voxlane.app.kept import Keeper

        pod = os.environ.get("POD_NAME") or socket.gethostname()
        keeper = Keeper(options.logs, pod, store_config(options))
    with tempfile.TemporaryDirectory(prefix="voxlane-") as folder:
        os.environ[ended.VARIABLE] = os.path.join(folder, "stopped")
        status = ended.of(run(command, secrets_of(os.environ, options.hide), keeper), os.environ)
    if keeper is not None and not keeper.close():
        sys.stderr.flush()
        os._exit(status)  # a request to a bucket that does not answer must not hold the container up
    return status
