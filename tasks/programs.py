"""Read programs: the Python code in a model's reply, and the complete program behind a question."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from textwrap import dedent, indent
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from doctest import Example

_OPENS = re.compile(r"(?P<quote>[ \t>]*)(?P<before>[^`~]*)(?P<fence>`{3,}|~{3,})[ \t]*\{?\.?(?P<kind>[\w.+#-]*)[^`~]*")
_PYTHON = re.compile(r"(?:py|python)[\w.]*|code|source|", re.IGNORECASE)
_STATEMENT = re.compile(r"\s*(?:(?:async )?def |class |import |from |@)|return\b")
_TOKENS = r"(?:</?s>|<eos>|<end_of_turn>|<[|｜][^|｜<>\n]+[|｜]>)+"
_MARKS = re.compile(rf"\ufeff|\A\s*{_TOKENS}|{_TOKENS}[ \t]*$|^\[/?[A-Z]{{3,}}\][ \t]*$", re.MULTILINE)
"""Marks around a program: control tokens, and lines such as [BEGIN] and [DONE]."""
_TYPED = str.maketrans(
    "\xa0\u2002\u2003\u2007\u2009\u202f\u3000\u2018\u2019\u201c\u201d\u2212",
    "       ''\"\"-",
    "\u200b\u200c\u200d\u2060",
)
"""Characters of a text processor, as they are typed in Python."""
_TRIES, _STARTS = 30, 5
"""Maximum candidates for the end of code, and for its start in a text without blocks."""


def program_in(reply: str) -> str:
    """Return the Python code in a reply.

    This is its code blocks with definitions, otherwise the first block, otherwise the code outside of blocks, otherwise
    the input of a Python session.
    """
    reply = _MARKS.sub("", reply)
    programs = []
    for reading in (str, lambda text: text.translate(_TYPED), _session):
        programs.append(_program_in(reading(reply)))
        if _defines(programs[-1]):
            return programs[-1]
    return next((program for program in programs if program and parsed(program)), programs[0])


def _session(reply: str) -> str:
    """Return the statements after `>>>` in a reply."""
    return "".join(test.source for test in doctests(reply))


def doctests(text: str) -> list[Example]:
    from doctest import DocTestParser  # imports pdb and unittest

    try:
        return DocTestParser().get_examples(text)
    except ValueError:
        return []


def _program_in(reply: str) -> str:
    blocks = [(kind, dedent(block)) for kind, block in _blocks(reply)]
    python = [block for kind, block in blocks if _PYTHON.fullmatch(kind)]
    others = [block for kind, block in blocks if not _PYTHON.fullmatch(kind)]
    for some in (python, others):
        if programs := [block for block in some if _defines(block)]:
            return _tidy("\n".join(programs))
    candidates = [block for block in python if "def " in block] or [block for block in python if block.strip()][:1]
    opens = len(blocks) > 1 or _OPENS.fullmatch(reply.lstrip().partition("\n")[0])
    if candidates and (opens or not _defines(_code_in(reply))):  # otherwise the only fence ends the code before it
        return _tidy("\n".join(candidates))
    if not blocks:
        return _tidy(reply if parsed(reply) is not None else _code_in(reply))
    return "" if (code := _code_in(reply)) == reply else _tidy(code)


def _tidy(program: str) -> str:
    return program.strip("\n").rstrip()


def _blocks(reply: str) -> Iterator[tuple[str, str]]:
    """Yield (language, text) of each fenced block; a fence in a string literal does not end a block."""
    lines = iter(reply.splitlines())
    while (line := next(lines, None)) is not None:
        opened = _OPENS.fullmatch(line)
        if opened is None:
            continue
        mark = ">" if ">" in opened["quote"] else ""
        rest = [text.strip(" \t").removeprefix(mark).removeprefix(" ") if mark else text for text in lines]
        ends = [i for i, text in enumerate(rest) if _closes(text, opened["fence"])]
        candidates = ends[:_TRIES]
        parsable = (end for end in candidates if parsed(dedent("\n".join(rest[:end]))) is not None)
        end = next(parsable, candidates[0] if candidates else len(rest))
        yield opened["kind"], "\n".join(rest[:end]) + "\n"
        lines = iter(rest[end + 1 :])


def _closes(line: str, fence: str) -> bool:
    line = line.strip()
    return len(line) >= len(fence) and set(line) == {fence[0]}


def _code_in(text: str) -> str:
    """Return the code in a text without blocks: from its first statement to the last line that still parses.

    Returns the whole text if no code is found.
    """
    lines = [line for line in text.strip("\n").splitlines() if not line.strip().startswith(("```", "~~~"))]
    starts = [i for i, line in enumerate(lines) if _STATEMENT.match(line)]
    for first in dict.fromkeys((0, *starts[:_STARTS])):
        for end in range(len(lines), max(first, len(lines) - _TRIES), -1):
            code = dedent("\n".join(lines[first:end]))
            if (tree := parsed(code)) is not None and _is_code(tree):
                return code
    return text


def _is_code(tree: ast.AST) -> bool:
    return any(isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Return | ast.Import) for node in ast.walk(tree))


def _defines(program: str) -> bool:
    tree = parsed(program)
    return isinstance(tree, ast.Module) and any(
        isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign)
        and (not isinstance(node, ast.Assign) or isinstance(node.value, ast.Lambda))
        for node in tree.body
    )


def parsed(text: str, mode: str = "exec") -> ast.AST | None:
    """Return the syntax tree of Python code; None if it can't be parsed."""
    try:
        return ast.parse(text, mode=mode)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def whole(question: str, program: str) -> str:
    """Return the complete program: if the question is code, its imports and functions come first.

    A program that is only a function body becomes the body of the question's function.
    """
    asked = parsed(question)
    if asked is None or not _is_code(asked):  # prose such as "fibonacci" can be parsed, too
        return f"{program}\n"
    tree = parsed(dedent(program))
    statements = tree.body if isinstance(tree, ast.Module) else []
    if any(isinstance(node, ast.Return) for statement in statements for node in _walk_outside(statement)):
        return f"{question.rstrip()}\n{indent(dedent(program), '    ')}\n"
    first = "".join(line for line in program.splitlines(True) if line.startswith("from __future__ "))
    rest = "".join(line for line in program.splitlines(True) if not line.startswith("from __future__ "))
    return f"{first}{question.rstrip()}\n\n\n{rest}\n"


def _walk_outside(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a statement's nodes that are outside of functions and classes."""
    yield node
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
        for child in ast.iter_child_nodes(node):
            yield from _walk_outside(child)
