"""The command line: its commands and its errors. Results go to standard output, progress to standard error."""

from __future__ import annotations

import difflib
import io
import logging
import re
import signal
import sys
import warnings
from importlib.metadata import version
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from tot.cli import bench, cllm, fastcot
from tot.cli.eval import eval_command
from tot.cli.listing import list_command
from tot.cli.models import cache_command, models_command
from tot.cli.report import report_command
from tot.cli.serve import serve_command
from tot.cli.solve import solve_command
from tot.cli.training import instances_command, train_draft_command, train_value_command
from tot.decoders.errors import TotError, readable
from tot.report.terminal import PlainFormatter, complain

app = typer.Typer(
    name="tot",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Tree-of-thought search on language models that you run yourself.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"tot {version('tot')}\n")
        raise typer.Exit


@app.callback()
def _options(
    show: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of `tot` itself."""


app.command("solve")(solve_command)
app.command("eval")(eval_command)
app.command("report")(report_command)
app.command("serve")(serve_command)
app.command("list")(list_command)
app.command("models")(models_command)
app.command("cache")(cache_command)
app.command("train-draft")(train_draft_command)
app.command("train-value")(train_value_command)
app.command("instances")(instances_command)
app.add_typer(bench.app, name="bench")
app.add_typer(cllm.app, name="cllm")
app.add_typer(fastcot.app, name="fastcot")


def main(arguments: list[str] | None = None) -> int:
    """Run a command. An error that the user can correct is one line on standard error, with exit status 2."""
    command = typer.main.get_command(app)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without a star must not lose the answer
    if logging.lastResort is not None:  # prints records if the program has not set up logging
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
            if message.startswith("Usage:"):  # `tot` and `tot bench` alone print their help
                complain(message)
                return 2
            return _say(_usage_message(error))
        except (typer.Abort, KeyboardInterrupt):
            _say("interrupted")
            return 130
        finally:
            if arguments is None:  # the process ends: ignore a second Ctrl-C
                signal.signal(signal.SIGINT, signal.SIG_IGN)


def _show_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    complain(f"{category.__name__}: {message}")


def _say(message: str) -> int:
    complain(f"tot: {message}")
    return 2


def _usage_message(error: Any) -> str:
    """The parser's error on one line, with the nearest option or command if one is unknown."""
    message = " ".join(error.format_message().split())
    context = getattr(error, "ctx", None)
    if context is None or not message.lower().startswith("no such"):
        return message
    command = context.command
    names = list(getattr(command, "commands", {})) or [
        option for p in command.params for option in p.opts if option[0] == "-"
    ]
    complaint = re.split(r"\.? Did you mean| \(|\.$", message)[0]
    near = difflib.get_close_matches(complaint.rpartition(" ")[2].strip("'"), names, n=1)
    if near:
        return f"{complaint} (did you mean {near[0]}?): see {context.command_path} --help"
    return f"{complaint}: choose one of {', '.join(names)}"


if __name__ == "__main__":
    sys.exit(main())
