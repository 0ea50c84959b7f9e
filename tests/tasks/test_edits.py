"""Edits in a model's reply: applied where they are unambiguous, or refused."""

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


TABS = PROGRAM.replace("    ", "\t")


@pytest.mark.parametrize(
    ("program", "reply", "new"),
    [
        (PROGRAM, block("    return x", "    return 2").replace("\n", "\r\n"), "    return 2"),
        (PROGRAM, "  <<<<<<< SEARCH\n    return x\n  =======\n    return 2\n  >>>>>>> REPLACE", "    return 2"),
        (PROGRAM, "<<<<<SEARCH\n    return x\n=====\n    return 2\n>>>>>REPLACE", "    return 2"),
        (PROGRAM, block("\n    return x   \n", "    return 2"), "    return 2"),
        (PROGRAM, block("return x", "if x:\n    return 2\n\nreturn x"), "    if x:\n        return 2\n\n    return x"),
        (PROGRAM, block("        return x", "        return 2"), "    return 2"),
        (TABS, block("    return x", "    if x:\n      return 2"), "\tif x:\n\t  return 2"),
        (TABS, block("return x", "if x:\n    return 2"), "\tif x:\n\t\treturn 2"),
    ],
)
def test_marks_and_lines_may_differ_in_white_space(program: str, reply: str, new: str) -> None:
    line = "\treturn x" if program is TABS else "    return x"
    assert edited(program, reply) == program.replace(line, new)


@pytest.mark.parametrize("width", [5, 9])
def test_an_underline_is_not_the_middle_of_a_block(width: int) -> None:
    old, new = (f"Title\n{'=' * width}\n{text}" for text in ("Old.", "New."))
    program = 'TEXT = """\n%s\n"""\n'
    assert edited(program % old, block(old, new)) == program % new


def test_a_block_that_can_be_read_in_two_ways_is_refused() -> None:
    with pytest.raises(EditError, match="occur 2 times"):
        edited("a\n=======\nb\n", block("a\n=======\nb", "c"))


def test_a_block_keeps_the_end_of_the_region() -> None:
    assert edited(MARKED, block("    return x\n", "    return 2")) == MARKED.replace("return x", "return 2")


def test_several_blocks_are_applied_in_order() -> None:
    blocks = [("import math", "import cmath"), ("    return x", "    y = x"), ("    y = x", "    z = x")]
    reply = "\nand\n".join(block(*one) for one in blocks)
    assert edited(PROGRAM, reply) == "import cmath\n\n\ndef f(x):\n    z = x\n"


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (block("    return y", "    return 2"), "occur 0 times"),
        (block("def f(x):\nreturn x", "return 2"), "occur 0 times"),
        (f"<<<<<<< SEARCH\n    return x\n{block('y', 'z')}", "incomplete"),
        ("<<<<<<< SEARCH\n    return x\n>>>>>>> REPLACE", "incomplete"),
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
