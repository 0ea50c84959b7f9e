"""Text from outside is printed to terminals without control characters."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.table import Table
from rich.text import Text

from tot.cli.app import main
from tot.report.terminal import PlainFormatter, complain, console

HOSTILE = "a\x1b[31mb\x1b]0;title\x07c\x9b2Jd\u202ee\x7f"
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]")


def test_a_console_prints_no_control_characters_and_ignores_markup(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table(f"head {HOSTILE}", title=f"title {HOSTILE}")
    table.add_row(f"cell {HOSTILE}")
    for printed in (HOSTILE, Text(HOSTILE), table, "[bold]x[/bold] [/] :smile:"):
        console().print(printed)
    out = capsys.readouterr().out
    assert not CONTROL.search(out)
    assert "[bold]x[/bold] [/] :smile:" in out
    assert out.count("a�[31mb�]0;title�c�2Jd�e�") == 4  # rich removes the bell from a Text


def test_an_error_and_a_log_record_have_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    complain(HOSTILE)
    assert capsys.readouterr().err == "a�[31mb�]0;title�c�2Jd�e�\n"
    record = logging.LogRecord("tot", logging.WARNING, "", 0, "model %s", (HOSTILE,), None)
    assert PlainFormatter().format(record) == "model a�[31mb�]0;title�c�2Jd�e�"


@pytest.mark.parametrize("name", [f"no{HOSTILE}.json", f"no{HOSTILE}"])
def test_an_error_names_a_file_without_its_control_characters(capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert main(["report", name]) == 2
    assert "does not exist" in (printed := capsys.readouterr().err)
    assert not CONTROL.search(printed)


def test_an_error_names_a_column_without_its_control_characters(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({HOSTILE: 1}) + "\n")
    for command in ("solve", "eval"):
        assert main([command, "game24", "--model", "none", "--data", str(tmp_path / "rows.jsonl")]) == 2
        assert "has no 'question'" in (printed := capsys.readouterr().err)
        assert not CONTROL.search(printed)


def test_bad_rows_and_folders_are_printed_and_logged_without_control_characters(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rows, out = tmp_path / "rows.jsonl", tmp_path / f"out{HOSTILE}"
    rows.write_text(json.dumps({"question": "4 6"}) + "\n" + json.dumps({HOSTILE: 1}) + "\n")
    how = ("--model", "none", "--generator", "enumerate:prior=uniform")
    main(["eval", "game24", "--data", str(rows), *how, "--out", str(out)])
    main(["eval", "--compare", str(out), str(out)])
    main(["report", str(out)])
    printed = capsys.readouterr()
    assert "has no 'question'" in printed.err
    assert "report: " in printed.out
    assert not CONTROL.search(printed.out + printed.err + (out / "log.txt").read_text(encoding="utf-8"))


def test_warnings_and_log_records_of_a_command_have_no_control_characters(tmp_path: Path) -> None:
    program = (
        "import logging, sys, warnings\n"
        "from tot.cli import app\n"
        "def command():\n"
        f"    logging.getLogger('tot').warning('model %s', {HOSTILE!r})\n"
        f"    warnings.warn({HOSTILE!r})\n"
        "app.COMMANDS['say'] = '__main__:command'\n"
        "sys.exit(app.main(['say']))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=120, check=False)
    printed = done.stderr.decode()
    assert (done.returncode, printed.count("�[31mb")) == (0, 2), printed
    assert not CONTROL.search(printed)
