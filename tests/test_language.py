"""Keep texts in plain English: phrases that readers stumble over, and docstrings whose first sentence is too long.

Run it as a program to list the findings in some files or folders: `python tests/test_language.py tot/search`.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PARTS = (
    "tot",
    "decoders",
    "tasks",
    "benchmarks",
    "tests",
    "docs",
    "notebooks",
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
)
QUOTED = {
    "decoders/methods/steps_format.py": ("go on",),
    "benchmarks/word_problems.py": ("as many",),
    "tests/tasks/test_instances.py": ("as many",),
}
"""Phrases in prompts and questions, by file."""
MOST_WORDS = 25
"""In the first sentence of a docstring."""
PHRASES = {
    r"\b(came|comes|come) of\b": "result, observation",
    r"\b(go|goes|going|gone|went) on\b": "resume, continue, extend",
    r"\b(is|are|was|were|be|been|being) told\b": "describe, receive, report",
    r"\btold\b": "describe, report, given",
    r"\b(is|are|was|were|be) (?-i:none)\b": "is not a ..., is invalid, is missing",
    r"\bthere (is|are|was|were) (?-i:none)\b": "is missing, does not exist",
    r"\bthose (that|who|which|of|with|without|in|for|from|it|they|to|whose)\b": "name the thing",
    r"\b(that|those) of (the|a|an|its|their|one|each|this|all|any|other|another)\b": "name the thing",
    r"\b(?-i:what) (it|they|its|their|is|was|are|were|has|have|had|came|comes|else|can|does|did|each|one|a|an|the|this"
    r"|that|others?|models?|searches|no|some|all|we|he|she|you|to|stands|remains|follows|takes|makes|gives)\b": "noun",
    r"^\s*(r?\"\"\"|#\s)What\b": "a noun",
    r"\b(so|(?<!half )(?<!wice )as) many\b": "n, the number of",
    r"\btimes as (long|many|much|fast|large|often)\b": "3.6x faster, 2x larger",
    r"\blet(s|ting)? go of\b": "free, release, close",
    r"\b(whoever|whosoever|one's|anew|thereof|nobody|beforehand)\b": "a plain word",
    r"\bsees? to it\b": "ensure",
    r"\b(is|are) to be\b": "should be, must be",
    r"\bwhere there (is|are|was|were)\b": "if there is",
    r"\bhad rather\b|\bbe it\b|\bif any does\b|\bdoes so\b": "a plain clause",
    r"\bcomes? to (the|no|an|a|its|that|this|be|nothing)\b": "reaches, results in",
    r"\bput to (the|a|it)\b": "sent to, asked of",
    r"\b(says|said) (so|as much)\b": "state, report",
    r"\bin (one's|its|their) own name\b": "a plain word",
}
_ALLOWED = re.compile(r"language: ok\b")
"""On a line: its words are quoted, or an input to a program."""
_FOUND = re.compile("|".join(f"(?:{phrase})" for phrase in PHRASES), re.IGNORECASE | re.MULTILINE)
_SENTENCE_END = re.compile(r"(?<!\be\.g)(?<!\bi\.e)(?<!\bvs)(?<!\bal)[.!?:](\s|$)|\n\s*\n")


def texts(paths: list[Path]) -> Iterator[tuple[Path, str]]:
    """Each file of text below some paths, without prompts: models were measured with those."""
    for path in paths:
        files = [path] if path.is_file() else sorted(path.rglob("*"))
        for file in files:
            hidden = any(part.startswith((".", "__pycache__", "build")) for part in file.relative_to(ROOT).parts)
            linked = any(parent.is_symlink() for parent in file.parents if parent != ROOT and ROOT in parent.parents)
            if hidden or linked or file.is_symlink() or file.name == Path(__file__).name:
                continue
            if file.suffix in (".py", ".pyi", ".c", ".h", ".md", ".toml"):
                yield file, file.read_text(encoding="utf-8")
            elif file.suffix == ".ipynb":
                cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
                yield file, "\n\n".join("".join(cell["source"]) for cell in cells)


def phrases(text: str) -> Iterator[str]:
    """Line number and phrase of each finding. Code is read as text: names of several words have no spaces."""
    for match in _FOUND.finditer(text):
        number = text.count("\n", 0, match.start()) + 1
        if not _ALLOWED.search(text.split("\n")[number - 1]):
            yield f"{number}: {match[0].strip()!r}"


def long_docstrings(text: str) -> Iterator[str]:
    """Line number and words of each docstring whose first sentence is too long."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring is None:
                continue
            words = len(_SENTENCE_END.split(docstring, maxsplit=1)[0].split())
            if words > MOST_WORDS:
                yield f"{getattr(node, 'lineno', 1)}: a first sentence of {words} words"


def findings(paths: list[Path]) -> list[str]:
    """All of them, each with its file."""
    found = []
    for file, text in texts(paths):
        quoted = QUOTED.get(str(file.relative_to(ROOT)), ())
        problems = [problem for problem in phrases(text) if not any(f"'{one}'" in problem for one in quoted)]
        problems = [*problems, *(long_docstrings(text) if file.suffix == ".py" else ())]
        found += [f"{file.relative_to(ROOT)}:{problem}" for problem in problems]
    return found


@pytest.mark.parametrize("part", PARTS)
def test_texts_are_plain_english(part: str) -> None:
    found = findings([ROOT / part])
    assert not found, "\n".join(found)


@pytest.mark.parametrize("phrase", ["a run goes on where it was", "what came of it", "unfinished thinking is none"])
def test_the_phrases_are_found(phrase: str) -> None:
    assert list(phrases(f"x = 1\n# {phrase}\n")) != []
    assert list(phrases(f"# {phrase}  # language: ok\n")) == []


def test_long_first_sentences_are_found() -> None:
    words = " ".join(["word"] * 26)
    assert list(long_docstrings(f'"""{words}."""')) == ["1: a first sentence of 26 words"]
    assert list(long_docstrings(f'"""Short. {words}."""')) == []


if __name__ == "__main__":
    listed = findings([Path(path).resolve() for path in sys.argv[1:]] or [ROOT / part for part in PARTS])
    sys.stdout.write("".join(f"{line}\n" for line in listed) + f"{len(listed)} findings\n")
    sys.exit(bool(listed))
