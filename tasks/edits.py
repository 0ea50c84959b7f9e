"""Edits of a program in a model's reply: the whole program, its marked region, or search/replace blocks.

A region is between the lines `# tot: begin` and `# tot: end`; everything else stays as it is. A search/replace block
replaces lines that must occur exactly once, apart from white space at their ends and a common indentation:

    <<<<<<< SEARCH
    old lines
    =======
    new lines
    >>>>>>> REPLACE
"""

from __future__ import annotations

import ast
import re
from textwrap import dedent, indent

from tot.tasks.programs import parsed, program_in

_BEGIN, _END = (re.compile(rf"^[ \t]*#[ \t]*tot:[ \t]*{mark}[ \t]*$", re.MULTILINE) for mark in ("begin", "end"))
_SEARCH, _MIDDLE, _REPLACE = map(re.compile, (r"\s*(<{5,9}) ?SEARCH\s*", r"\s*(={5,9})\s*", r"\s*>{5,9} ?REPLACE\s*"))
_TAB = 4
"""Columns of a tab."""


class EditError(ValueError):
    """An edit that can't be applied exactly."""


def region_of(program: str) -> tuple[str, str, str]:
    """Split a program into the text before its region, the region, and the text after it.

    Without markers the region is the whole program. Raises EditError unless there is one region at most.
    """
    begins, ends = list(_BEGIN.finditer(program)), list(_END.finditer(program))
    if not begins and not ends:
        return "", program, ""
    if len(begins) != 1 or len(ends) != 1 or begins[0].end() > ends[0].start():
        raise EditError("a program has one region at most, from the line '# tot: begin' to the line '# tot: end'")
    start, end = begins[0].end() + 1, ends[0].start()
    return program[:start], program[start:end], program[end:]


def edited(program: str, reply: str) -> str:
    """Return a program after the edit in a reply. Raises EditError if it can't be applied or changes nothing."""
    before, region, after = region_of(program)
    if any(map(_SEARCH.fullmatch, reply.split("\n"))):
        new = _replaced(region, reply)
    else:
        new = written(reply)
        if before or after:
            new = _region_in(new, before, region)
        new += "\n"
    result = f"{before}{new}{after}"
    if _same(result, program):
        raise EditError("the program is unchanged")
    return result


def written(reply: str) -> str:
    """Return the program in a reply. Raises EditError if it contains none."""
    program = program_in(reply)
    if "```" not in reply and "~~~" not in reply:
        tree = parsed(program)
        if not isinstance(tree, ast.Module) or all(isinstance(statement, ast.Expr) for statement in tree.body):
            program = ""
    if not program.strip():
        raise EditError("the reply contains no Python")
    return program


def _replaced(region: str, reply: str) -> str:
    *lines, end = region.split("\n")
    block: list[str] | None = None
    width = 0
    for line in reply.replace("\r\n", "\n").split("\n"):
        if opened := _SEARCH.fullmatch(line):
            if block is not None:
                break
            block, width = [], len(opened[1])
        elif block is not None and _REPLACE.fullmatch(line):
            lines, block = _with_block(lines, block, width), None
        elif block is not None:
            block.append(line)
    if block is not None:
        raise EditError("a search/replace block is incomplete")
    return "\n".join([*lines, end])


def _with_block(lines: list[str], block: list[str], width: int) -> list[str]:
    """Return the lines after a search/replace block whose first mark has this width.

    A line of "=" of the same width is its middle. Others may underline a title.
    """
    marks = [(i, len(mark[1])) for i, line in enumerate(block) if (mark := _MIDDLE.fullmatch(line))]
    middles = [i for i, size in marks if size == width] or [i for i, _ in marks]
    if not middles:
        raise EditError("a search/replace block is incomplete")
    exact = [(block[:i], block[i + 1 :]) for i in middles if any(map(str.strip, block[:i]))]
    loose = [(_trimmed(old), _trimmed(new)) for old, new in exact]
    places = [(i, *change) for change in exact for i in range(len(lines)) if lines[i : i + len(change[0])] == change[0]]
    found = [(*place, 0) for place in places] or [
        (i, old, new, shift)
        for old, new in loose
        for i in range(len(lines))
        if (shift := _shift(lines[i : i + len(old)], old)) is not None
    ]
    if len(found) != 1:
        searched = "\n".join(block[: middles[0]]).strip()
        raise EditError(f"the lines to replace occur {len(found)} times: {searched[:60]!r}")
    ((i, old, new, shift),) = found
    if (after := lines[i : i + len(old)]) != old:
        tabs = any(line.startswith("\t") for line in after)
        new = [_indented(line, _column(line) + shift, tabs) for line in new]
    return [*lines[:i], *new, *lines[i + len(old) :]]


def _trimmed(lines: list[str]) -> list[str]:
    """Return lines without blank ones at both ends."""
    filled = [i for i, line in enumerate(lines) if line.strip()]
    return lines[filled[0] : filled[-1] + 1] if filled else []


def _shift(lines: list[str], old: list[str]) -> int | None:
    """Return the columns by which the first lines are indented more than `old`; None if they differ otherwise."""
    pairs = list(zip(lines, old, strict=False))
    shifts = {_column(line) - _column(one) for line, one in pairs if one.strip()}
    same = len(pairs) == len(old) and all(line.strip() == one.strip() for line, one in pairs)
    return shifts.pop() if same and len(shifts) == 1 else None


def _column(line: str) -> int:
    return len(line[: len(line) - len(line.lstrip())].expandtabs(_TAB))


def _indented(line: str, column: int, tabs: bool) -> str:
    if not line.strip():
        return line
    margin = "\t" * (column // _TAB) + " " * (column % _TAB) if tabs else " " * column
    return margin + line.lstrip()


def _region_in(new: str, before: str, region: str) -> str:
    """Return the new region in a reply's program, with the old region's indentation.

    The reply may be the region alone, with its markers, or the whole function that contains it.
    """
    if _BEGIN.search(new) and _END.search(new):
        new = region_of(new)[1].rstrip("\n")
    first = next((line for line in region.splitlines() if line.strip()), "")
    margin = first[: len(first) - len(first.lstrip())]
    if margin and (body := _body(new, re.findall(r"^[ \t]*(?:async )?def (\w+)", before, re.MULTILINE)[-1:])):
        new = body
    return indent(dedent(new), margin)


def _body(program: str, names: list[str]) -> str | None:
    """Return the body of the function of that name, without its docstring; None if there is no such function."""
    nodes = ast.walk(parsed(program) or ast.Module([], []))
    function = next((one for one in nodes if isinstance(one, ast.FunctionDef) and one.name in names), None)
    if function is None:
        return None
    body = function.body[1:] if ast.get_docstring(function, clean=False) is not None else function.body
    if not body:
        return None
    lines = program.splitlines()[body[0].lineno - 1 : function.end_lineno]
    return "\n".join([" " * body[0].col_offset + lines[0].lstrip(), *lines[1:]])


def _same(one: str, other: str) -> bool:
    """Return whether two programs have the same lines, apart from white space at their ends."""
    return [line.rstrip() for line in one.split("\n") if line.strip()] == [
        line.rstrip() for line in other.split("\n") if line.strip()
    ]
