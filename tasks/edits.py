"""Edits of a program in a model's reply: the whole program, its marked region, or search/replace blocks.

A region is between the lines `# tot: begin` and `# tot: end`; everything else stays as it is. A search/replace block
replaces lines that must occur exactly once:

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

from tot.tasks.code import parsed, program_in

_BEGIN, _END = (re.compile(rf"^[ \t]*#[ \t]*tot:[ \t]*{mark}[ \t]*$", re.MULTILINE) for mark in ("begin", "end"))
_BLOCK = re.compile(
    r"^<{5,9} SEARCH[ \t]*\n(?P<old>.*?)^={5,9}[ \t]*\n(?P<new>.*?)^>{5,9} REPLACE[ \t]*$", re.MULTILINE | re.DOTALL
)


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
    if re.search(r"^<{5,9} SEARCH", reply, re.MULTILINE):
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
    blocks = list(_BLOCK.finditer(reply))
    if len(blocks) != len(re.findall(r"^<{5,9} SEARCH", reply, re.MULTILINE)):
        raise EditError("a search/replace block is incomplete")
    for block in blocks:
        old = block["old"]
        found = [match.start() for match in re.finditer(f"^{re.escape(old)}", region, re.MULTILINE)]
        if len(found) != 1 or not old.strip():
            raise EditError(f"the lines to replace occur {len(found)} times: {old.strip()[:60]!r}")
        region = region[: found[0]] + block["new"] + region[found[0] + len(old) :]
    return region


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
