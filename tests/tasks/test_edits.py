"""Edits in a model's reply: applied exactly, or refused."""

from __future__ import annotations

import pytest

from tot.tasks.edits import EditError, edited, region_of

PROGRAM = "import math\n\n\ndef f(x):\n    return x\n"
MARKED = "import math\n# tot: begin\ndef f(x):\n    return x\n# tot: end\nprint(f(1))\n"
INSIDE = 'def f(x):\n    """Double."""\n    # tot: begin\n    y = x\n    return y\n    # tot: end\n'


def block(old: str, new: str) -> str:
    return f"<<<<<<< SEARCH\n{old}\n=======\n{new}\n>>>>>>> REPLACE"


def test_a_whole_program_replaces_the_program() -> None:
    assert edited(PROGRAM, "Idea.\n```python\ndef f(x):\n    return 2 * x\n```") == "def f(x):\n    return 2 * x\n"


@pytest.mark.parametrize(
    "reply",
    [
        "```python\ndef f(x):\n    return 2 * x\n```",
        "```python\n# tot: begin\ndef f(x):\n    return 2 * x\n# tot: end\n```",
        "```python\nimport math\n# tot: begin\ndef f(x):\n    return 2 * x\n# tot: end\nprint(f(1))\n```",
        block("    return x", "    return 2 * x"),
    ],
)
def test_only_the_region_changes(reply: str) -> None:
    assert edited(MARKED, reply) == MARKED.replace("return x", "return 2 * x")


@pytest.mark.parametrize(
    "reply",
    [
        "```python\nreturn 2 * x\n```",
        "```python\n    return 2 * x\n```",
        "```python\ndef f(x):\n    return 2 * x\n```",
        '```python\ndef f(x):\n    """Twice."""\n    return 2 * x\n```',
    ],
)
def test_a_region_in_a_function_is_its_body(reply: str) -> None:
    assert edited(INSIDE, reply) == INSIDE.replace("    y = x\n    return y\n", "    return 2 * x\n")


def test_several_blocks_are_applied_in_order() -> None:
    blocks = [("import math", "import cmath"), ("    return x", "    y = x"), ("    y = x", "    z = x")]
    reply = "\nand\n".join(block(*one) for one in blocks)
    assert edited(PROGRAM, reply) == "import cmath\n\n\ndef f(x):\n    z = x\n"


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (block("    return y", "    return 2"), "occur 0 times"),
        (block("return x", "return 2"), "occur 0 times"),
        (block("", "y"), "occur"),
        ("<<<<<<< SEARCH\nreturn x\n=======\nreturn 2", "incomplete"),
        ("I do not know.", "contains no Python"),
        ("Sorry", "contains no Python"),
        ("", "contains no Python"),
        (f"```python\n{PROGRAM}```", "unchanged"),
        (f"```python\n{PROGRAM.replace('math', 'math  ')}\n\n```", "unchanged"),
        (block("    return x", "    return x  "), "unchanged"),
    ],
)
def test_other_edits_are_refused(reply: str, reason: str) -> None:
    with pytest.raises(EditError, match=reason):
        edited(PROGRAM, reply)


@pytest.mark.parametrize(
    "program",
    [
        "# tot: begin\nx = 1\n",
        "# tot: end\nx = 1\n# tot: begin\n",
        "# tot: begin\n# tot: end\n# tot: begin\n# tot: end\n",
    ],
)
def test_a_program_has_one_region_at_most(program: str) -> None:
    with pytest.raises(EditError, match="one region at most"):
        region_of(program)


def test_a_search_outside_of_the_region_matches_nothing() -> None:
    with pytest.raises(EditError, match="occur 0 times"):
        edited(MARKED, block("import math", "import os"))


def test_lines_that_occur_twice_are_not_replaced() -> None:
    with pytest.raises(EditError, match="occur 2 times"):
        edited("x = 1\ny = 2\nx = 1\n", block("x = 1", "x = 3"))
