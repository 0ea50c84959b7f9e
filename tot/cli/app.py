"""The command line: what commands there are, and what becomes of errors. Results go to standard output, progress to
standard error."""

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

# OpenMP's threads spin while they wait for each other. Beside another busy process long spinning makes a step 10 times
# as slow; none at all costs 20% on a quiet machine; this is in between. Read when torch is loaded, so set before.
os.environ.setdefault("GOMP_SPINCOUNT", "100000")

app = typer.Typer(
    name="tot",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Reasoning with trees of thoughts on language models that you run yourself.",
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
    """Entry point: errors that the user can put right are one line on standard error and exit status 2."""
    command = typer.main.get_command(app)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that has no star is no reason to lose the answer
    if logging.lastResort is not None:  # prints records where the program has set up no logging
        logging.lastResort.setFormatter(PlainFormatter())
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        try:
            return int(command.main(args=arguments, prog_name="tot", standalone_mode=False) or 0)
        except ValidationError as error:
            return _say(readable(error))
        except TotError as error:
            return _say(" ".join(str(error).split()))
        except typer.TyperException as error:
            message = error.format_message()
            if message.startswith("Usage:"):  # `tot` and `tot bench` alone: their help
                complain(message)
                return 2
            return _say(_usage_message(error))
        except (typer.Abort, KeyboardInterrupt):
            _say("interrupted")
            return 130
        finally:
            if arguments is None:  # the process ends: a second Ctrl-C has nothing more to stop
                signal.signal(signal.SIGINT, signal.SIG_IGN)


def _show_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    complain(f"{category.__name__}: {message}")


def _say(message: str) -> int:
    complain(f"tot: {message}")
    return 2


def _usage_message(error: Any) -> str:
    """The parser's complaint on one line, naming the choices where an option or a command is unknown."""
    message = " ".join(error.format_message().split())
    context = getattr(error, "ctx", None)
    if context is None or not message.lower().startswith("no such"):
        return message
    command = context.command
    names = list(getattr(command, "commands", {})) or [
        option for p in command.params for option in p.opts if option[0] == "-"
    ]
    complaint = re.split(r"\.? Did you mean| \(|\.$", message)[0]
    return f"{complaint}: choose one of {', '.join(names)}"


if __name__ == "__main__":
    sys.exit(main())
