"""Modules that take seconds to import are imported only if a model runs in this process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

COMMANDS = [
    "--help",
    "solve --help",
    "serve --help",
    "models",
    "solve gsm8k q --search beam",
    "solve chess q",
    "solve gsm8k q --model gpt",
    "solve gsm8k q --decoder beam",
    "solve gsm8k q --decoder sd --decoder-option kk=3",
    "solve gsm8k q --decoder openai --decoder-option url=x",
    "eval chess --data x.jsonl",
    "eval gsm8k --data x.jsonl --evaluator beam",
    "serve --decoder-option kk=3",
    "serve --model gpt",
]
SCRIPT = """
import json, sys
from tot.cli.app import main
found = {}
for command in json.loads(sys.argv[1]):
    main(command.split())
    found[command] = [name for name in ("torch", "transformers", "datasets") if name in sys.modules]
sys.stderr.write("\\n" + json.dumps(found))
"""


def test_help_lists_and_errors_import_no_torch(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(COMMANDS)], capture_output=True, text=True, cwd=tmp_path, timeout=100
    )
    *messages, imported = done.stderr.splitlines()
    assert json.loads(imported) == {command: [] for command in COMMANDS}
    assert len([line for line in messages if line.startswith("tot: ")]) == 10  # the rejected commands


@pytest.mark.real
def test_a_run_with_the_c_engine_imports_neither_torch_nor_transformers(smollm2: str, tmp_path: Path) -> None:
    script = """
import sys
from tot.cli.app import main
from tot.decoders.kernels.native.library import level
status = main(["solve", "gsm8k", "1 + 1?", "--search", "cot", "--max-tokens", "1", "--model", sys.argv[1], "--json"])
heavy = [name for name in ("torch", "transformers", "datasets", "networkx", "gguf", "yaml") if name in sys.modules]
print(status, heavy if level() is not None else [])
"""
    done = subprocess.run(
        [sys.executable, "-c", script, smollm2], capture_output=True, text=True, cwd=tmp_path, timeout=200
    )
    assert done.stdout.splitlines()[-1] == "0 []", done.stdout + done.stderr
