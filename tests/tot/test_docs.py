"""Commands in README and docs run, and links lead to existing files (extending.md: test_extending.py)."""

from __future__ import annotations

import json
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main as benchmark
from tot import ThoughtTree
from tot.cli.app import main

ROOT = Path(__file__).parents[2]
PAGES = {
    str(path.relative_to(ROOT if path.parent == ROOT else ROOT / "docs")): path.read_text(encoding="utf-8")
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
}


def commands(program: str) -> list[list[str]]:
    """Return the indented commands of a program as words, without comments and redirections."""
    joined = re.sub(r" \\\n +", " ", "\n".join(PAGES.values()))
    lines = re.findall(rf"^    ({program} .*)$", joined, re.MULTILINE)
    return [shlex.split(line.partition("<")[0], comments=True) for line in lines]


def examples(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", PAGES[page], re.MULTILINE | re.DOTALL)


def test_every_make_target_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = {word.partition(";")[0] for _, word, *_ in commands("make")}
    assert targets >= {"solve", "lint", "test", "wheel"}
    for target in targets:
        assert re.search(rf"^{target}:(?:.*\n\t| )\S", makefile, re.MULTILINE), target
        assert re.search(rf"^\.PHONY:.*\b{target}\b", makefile, re.MULTILINE), target


def test_every_command_and_its_options_exist(capsys: pytest.CaptureFixture[str]) -> None:
    invocations = [(main, words) for _, *words in commands("tot")]
    benchmarks = [(benchmark, words) for _, _, _, *words in commands("python -m benchmarks")]
    assert {words[0] for _, words in invocations} >= {"solve", "models", "eval", "report", "train", "serve"}
    assert {words[0] for _, words in benchmarks} >= {"answers", "decoders", "peers", "quality"}
    for program, words in invocations + benchmarks:
        name = words[:2] if program is main and words[0] == "train" else words[:1]
        assert program([*name, "--help"]) == 0
        described = capsys.readouterr().out
        for option in (word for word in words if word.startswith("--")):
            assert re.search(rf"^ +{option}\b", described, re.MULTILINE), f"{' '.join(name)} has no {option}"


def test_the_example_page_has_a_verified_answer_and_is_small() -> None:
    page = (ROOT / "docs" / "example.html").read_text(encoding="utf-8")
    assert '"verified":true' in page.replace(" ", "")
    assert len(page) < 1_000_000


@pytest.mark.parametrize("page", PAGES)
def test_every_link_has_a_target(page: str) -> None:
    folder = (ROOT / page if (ROOT / page).exists() else ROOT / "docs" / page).parent
    for place, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", PAGES[page]):
        assert (folder / place).exists(), place
        headings = re.findall(
            r"^#+ (.+)$", (folder / place).read_text(encoding="utf-8") if anchor else "", re.MULTILINE
        )
        assert not anchor or anchor in {heading.lower().replace(" ", "-") for heading in headings}


def test_the_readme_is_short() -> None:
    assert PAGES["README.md"].count("\n") <= 120


def test_the_design_describes_folders_that_exist() -> None:
    found = re.findall(
        r"`((?:tot|decoders)/\w+)/`", "\n".join(re.findall("^### .*$", PAGES["design.md"], re.MULTILINE))
    )
    for part in ("tot", "decoders"):
        folders = {f"{part}/{path.parent.name}" for path in (ROOT / part).glob("*/__init__.py")}
        assert folders - {"tot/decoders", "tot/prompts", "tot/tasks"} == {one for one in found if one.startswith(part)}


def test_the_design_names_files_that_exist() -> None:
    table = PAGES["design.md"].partition("## Which file")[2].partition("\n## ")[0]
    for file in re.findall(r"`((?:tot|decoders)/[\w/.]+)`", table):
        assert (ROOT / file).exists(), file


def test_the_guides_ask_and_tell_example_prints_the_best_state(python: Any) -> None:
    out, err = python("-").communicate(examples("guide.md")[1], timeout=60)
    assert (out, err) == ("2.0 ['b', 'b']\n", "")


@pytest.mark.real
def test_the_guides_constrained_example_prints_an_answer(smollm2: str, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = [code for code in examples("guide.md") if "constraint=" in code]
    exec(compile(example, "guide.md", "exec", dont_inherit=True), {"__name__": "example"})
    assert capsys.readouterr().out in ("yes\n", "no\n", "unsure\n")


@pytest.mark.real
def test_the_guides_call_of_a_function_prints_it(smollm2: str, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = [code for code in examples("guide.md") if "tool_choice=" in code]
    exec(compile(example, "guide.md", "exec", dont_inherit=True), {"__name__": "example"})
    assert capsys.readouterr().out.startswith('weather {"city": "Paris"} ')


@pytest.mark.real
def test_the_guides_vote_of_calls_prints_them(smollm2: str, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = [code for code in examples("guide.md") if "readonly=" in code]
    exec(compile(example, "guide.md", "exec", dont_inherit=True), {"__name__": "example"})
    assert all(line.startswith('book {"city": ') for line in capsys.readouterr().out.splitlines())


def test_the_guide_describes_every_field_of_a_sample_and_reads_them_with_pandas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pandas")
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"question": "4 9 10 13"}\n{"question": "1 1 4 8"}\n{"question": "1 1 1 1"}\n')
    rules = ("--model", "none", "--search", "best-first:rank=cost", "--generator", "enumerate:prior=uniform")
    assert main(["eval", "game24", "--data", "rows.jsonl", *rules, "--out", "runs/votes"]) == 0
    sample = json.loads(Path("runs/votes/samples.jsonl").read_text().splitlines()[0])
    table = PAGES["guide.md"].partition("### Samples\n")[2].partition("\nWith pandas")[0]
    named = set(re.findall(r"`(\w+)`", table))
    first = set(re.findall(r"`(\w+)`", "".join(line.split("|")[1] for line in table.splitlines() if "|" in line)))
    assert first == {*sample, "judged", "by_model"}
    assert named >= {*sample["measured"], "calls", "prompt_tokens", "new_tokens"}
    (example,) = [code for code in examples("guide.md") if "pandas" in code]
    capsys.readouterr()
    exec(example.replace("usage.generate.new_tokens", "thoughts"), {})  # these searches ask no model
    printed = capsys.readouterr().out.splitlines()
    assert float(printed[0].split()[0]) == pytest.approx(2 / 3)
    assert printed[-1].split()[:6] == ["2", "2-0", "1", "1", "1", "1"]  # which has no solution


def test_the_guide_describes_every_field_of_a_saved_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rules = ("--model", "none", "--search", "best-first:rank=cost", "--generator", "enumerate:prior=uniform")
    assert main(["solve", "game24", "1 1 4 8", *rules, "--out", "run.json"]) == 0
    run = json.loads(Path("run.json").read_text())
    table = PAGES["guide.md"].partition("### Saved runs\n")[2].partition("\nA node has")[0]
    first = "".join(line.split("|")[1] for line in table.splitlines() if line.startswith("| `"))
    assert set(re.findall(r"`(\w+)`", first)) == set(run)
    named = set(re.findall(r"`(\w+)`", table.partition("| `tree`")[2]))
    assert set(run["tree"]) - {"format", "version", "root"} <= named == {"nodes", "links", "calls", "texts"}


@pytest.mark.real
def test_the_readmes_first_example_prints_the_documented_output(smollm2: str, python: Any) -> None:
    out, err = python("-").communicate(examples("README.md")[0], timeout=120)
    documented = PAGES["README.md"].partition("print(solution.tree)\n```\n\n")[2].partition("\n\n")[0]
    expected = [line.removeprefix("    ") for line in documented.splitlines()]
    assert err == ""
    assert out.splitlines()[: len(expected)] == expected


@pytest.mark.real
def test_the_readmes_task_runs_as_pasted(smollm2: str, python: Any, tmp_path: Path) -> None:
    example = examples("README.md")[1]
    process = python("-")
    out, err = process.communicate(example, timeout=120)
    assert (process.returncode, err) == (0, "")
    assert re.search(r"Paris.* (10|[1-9])\.\d+ Usage\(prompt_tokens=\d+, ", out)
    tree = ThoughtTree.load(tmp_path / "fact.json")
    assert tree.state(tree.root).question in example
    thoughts = int(re.findall(r"BFS\(thoughts=(\d+)", example)[0])
    assert 1 <= len(tree.children(tree.root)) <= thoughts  # equal thoughts are one
    assert max(node.depth for node in tree) == 2


@pytest.mark.real
def test_the_readmes_server_streams_thoughts_as_pasted(smollm2: str, tmp_path: Path) -> None:
    lines = PAGES["README.md"].partition("## From other programs\n")[2].partition("\n## ")[0]
    pasted = "\n".join(line for line in lines.splitlines() if line.startswith("    "))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        pasted = pasted.replace("8000", str(free.getsockname()[1]))
    command = pasted.replace(".venv/bin/tot", f"{sys.executable} -m tot.cli.app") + "\nkill %1\nwait"
    done = subprocess.run(["bash", "-mc", command], capture_output=True, text=True, timeout=180, cwd=tmp_path)
    assert "tot serve: searches are shown at http://127.0.0.1:" in done.stderr
    chunks = [json.loads(line) for line in done.stdout.split("data: ") if line.startswith("{")]
    keys = [key for chunk in chunks for choice in chunk["choices"] for key, text in choice["delta"].items() if text]
    assert keys.index("reasoning_content") < keys.index("content")
    assert chunks[-1]["tot"]["votes"][0] >= 1
