"""The command line: its commands and error handling. Results go to standard output, progress to standard error."""

from __future__ import annotations

import io
import logging
import os
import re
import signal
import sys
import warnings
from typing import Any

import typer
from pydantic import ValidationError

from tot.cli import bench, cllm, fastcot
from tot.cli.eval import eval_command
from tot.cli.models import models_command
from tot.cli.report import report_command
from tot.cli.serve import serve_command
from tot.cli.solve import solve_command
from tot.cli.training import instances_command, train_draft_command, train_value_command
from tot.decoders.errors import TotError, readable
from tot.report.terminal import PlainFormatter, complain

# OpenMP threads spin while they wait for each other. Next to a busy process, long spinning makes a step 10x slower; no
# spinning costs 20% on an idle machine; this is a compromise. Torch reads it when loaded, so it is set before.
os.environ.setdefault("GOMP_SPINCOUNT", "100000")

app = typer.Typer(
    name="tot",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Tree-of-thought search on local language models.",
)
app.command("solve")(solve_command)
app.command("eval")(eval_command)
app.command("report")(report_command)
app.command("serve")(serve_command)
app.command("models")(models_command)
app.command("train-draft")(train_draft_command)
app.command("train-value")(train_value_command)
app.command("instances")(instances_command)
app.add_typer(bench.app, name="bench")
app.add_typer(cllm.app, name="cllm")
app.add_typer(fastcot.app, name="fastcot")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line. Errors that the user can correct are one line on standard error, with exit status 2."""
    command = typer.main.get_command(app)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # the terminal may lack some characters
    if logging.lastResort is not None:  # used if logging is not configured
        logging.lastResort.setFormatter(PlainFormatter())
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        try:
            return int(command.main(args=arguments, prog_name="tot", standalone_mode=False) or 0)
        except ValidationError as error:
            return _fail(readable(error))
        except TotError as error:
            return _fail(" ".join(str(error).split()))
        except typer.TyperException as error:
            message = error.format_message()
            if message.startswith("Usage:"):  # `tot` or `tot bench` without a command: the help
                complain(message)
                return 2
            return _fail(_usage_message(error))
        except (typer.Abort, KeyboardInterrupt):
            _fail("interrupted")
            return 130
        finally:
            if arguments is None:  # the process ends: ignore a second Ctrl-C
                signal.signal(signal.SIGINT, signal.SIG_IGN)


def _show_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    complain(f"{category.__name__}: {message}")


def _fail(message: str) -> int:
    complain(f"tot: {message}")
    return 2


def _usage_message(error: Any) -> str:
    """Return the parser's error on one line, with the choices for an unknown option or command."""
    message = " ".join(error.format_message().split())
    context = getattr(error, "ctx", None)
    if context is None or not message.lower().startswith("no such"):
        return message
    command = context.command
    names = list(getattr(command, "commands", {})) or [
        option for p in command.params for option in p.opts if option[0] == "-"
    ]
    problem = re.split(r"\.? Did you mean| \(|\.$", message)[0]
    return f"{problem}: choose one of {', '.join(names)}"


if __name__ == "__main__":
    sys.exit(main())
