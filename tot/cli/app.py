"""The command line: its commands and its errors. Results go to standard output, progress to standard error."""

from __future__ import annotations

import atexit
import errno
import io
import logging
import os
import re
import shlex
import signal
import sys
import threading
import warnings
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from tot.decoders.errors import REMOVED, TotError, readable, reason, unknown
from tot.report.terminal import PlainFormatter, complain
from tot.running import LOADING

COMMANDS = {
    "solve": "tot.cli.solve:solve_command",
    "ask": "tot.cli.solve:ask_command",
    "chat": "tot.cli.chat:chat_command",
    "eval": "tot.cli.eval:eval_command",
    "report": "tot.cli.report:report_command",
    "export": "tot.cli.export:export_command",
    "serve": "tot.cli.serve:serve_command",
    "mcp": "tot.cli.mcp:mcp_command",
    "list": "tot.cli.listing:list_command",
    "models": "tot.cli.models:models_command",
    "pull": "tot.cli.models:pull_command",
    "cache": "tot.cli.models:cache_command",
    "instances": "tot.cli.instances:instances_command",
    "train": "tot.cli.train:app",
}
"""The commands, and groups of commands, in the order of `tot --help`."""
_OF_OUTPUT = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
"""Errors of writing to standard output."""
_NO_MEMORY = re.compile("allocate memory|start new thread|failed to map segment|out of memory", re.IGNORECASE)


def _print_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"tot {version('tot')}\n")
        raise typer.Exit


def _options(
    show: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of `tot` itself."""


def make_app(name: str = "") -> typer.Typer:
    """Return the command line with the command `name`, or with all if there is no such command."""
    app = typer.Typer(
        name="tot",
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"]},
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        help="Tree-of-thought search on language models that you run yourself.",
    )
    app.callback()(_options)
    for command in [name] if name in COMMANDS else COMMANDS:
        module, _, member = COMMANDS[command].partition(":")
        found = getattr(import_module(module), member)
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=command)
        else:
            app.command(command)(found)
    return app


def main(arguments: list[str] | None = None, app: typer.Typer | None = None, program: str = "tot") -> int:
    """Run a command, by default the command line's, and return its exit status.

    An error that the user can correct is one line on standard error, with exit status 2. `app` is the command line of
    another program.
    """
    if arguments is not None:
        return _run(arguments, app, program)
    try:
        status = _run(sys.argv[1:], app, program)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process ends: ignore a second Ctrl-C
    if any(thread.name == LOADING for thread in threading.enumerate()):
        # Python would end the thread by unwinding its stack, which aborts the process in C++ code of a loading model.
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(status)
    return status


def _run(given: list[str], app: typer.Typer | None, program: str) -> int:
    if given[:1] == ["help"]:
        given = [*given[1:], "--help"]
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed
            setattr(sys, name, io.StringIO())
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without a star must not lose the answer
    if logging.lastResort is not None:  # prints records if the program has not set up logging
        logging.lastResort.setFormatter(PlainFormatter())
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        try:
            command = typer.main.get_command(app or make_app(given[0] if given else ""))
            status = int(command.main(args=given, prog_name=program, standalone_mode=False, obj=given) or 0)
            sys.stdout.flush()
            return status
        except typer.TyperException as error:
            message = error.format_message()
            if message.startswith("Usage:"):  # a program alone prints its help
                complain(message)
                return 2
            return _say(_usage_message(error, given[0] if given else ""))
        except (typer.Abort, KeyboardInterrupt):
            _say("interrupted")
            return 130
        except BaseException as error:
            if isinstance(error, BrokenPipeError) or isinstance(error.__context__, BrokenPipeError):
                _discard_output()  # its reader has read enough, as `head` does
                return 0
            if (line := _message(error)) is None:
                raise
            return _say(line)


def _message(error: BaseException) -> str | None:
    """Return the line about an error that the user can correct; None for any other error."""
    if isinstance(error, ValidationError):
        return readable(error)
    if isinstance(error, TotError):
        return " ".join(str(error).split())
    allocation = isinstance(error, OSError | RuntimeError | ImportError) and _NO_MEMORY.search(str(error))
    if isinstance(error, MemoryError) or allocation:
        return (
            f"there is not enough memory ({reason(error)[:200]}): free some, raise its limit (ulimit -v), or use a "
            "smaller model or --kv-budget"
        )
    if isinstance(error, OSError) and error.filename is None and error.errno in _OF_OUTPUT:
        _discard_output()
        return f"standard output can't be written: {reason(error)}; write it to another place"
    return None


def _discard_output() -> None:
    """Discard the rest of standard output, so that the process does not fail again when it ends."""
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _show_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    complain(f"{category.__name__}: {message}")


def _say(message: str) -> int:
    complain(f"tot: {message}")
    return 2


def _usage_message(error: Any, first: str) -> str:
    """The parser's error on one line, with a remedy for an unknown option or command.

    `first` is the first argument, which may be a task or a question instead of a command.
    """
    message = " ".join(error.format_message().split())
    context = getattr(error, "ctx", None)
    if context is None or not message.lower().startswith("no such"):
        return message
    if context.parent is None and (instead := _instead_of(first)):
        return instead
    option = getattr(error, "option_name", "")
    if (removed := next((name for name in (option, option.removeprefix("--")) if name in REMOVED), None)) is not None:
        return unknown("option", removed, ())
    return f"{message.rstrip('.')}; see {context.command_path} --help"


def _instead_of(first: str) -> str | None:
    """Return the right command if the first argument is a removed command, a task or a question."""
    from tot.registry import TASKS

    if first in REMOVED:
        return unknown("command", first, ())
    if first in TASKS:
        return f'{first} is a task, not a command: type tot solve {first} "your question"'
    return f"{first!r} is not a command: to ask it, type tot solve {shlex.quote(first)}" if " " in first else None


if __name__ == "__main__":
    sys.exit(main())
