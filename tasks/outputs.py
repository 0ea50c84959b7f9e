"""Outputs: programs vouch for each other where they give the same on inputs that the model writes (CodeT, Chen et al.,
2023)."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Sequence

from tot.context import Context
from tot.decoders.errors import OptionError
from tot.evaluators.base import Evaluator
from tot.steps import Evaluation
from tot.tasks.checks import outputs
from tot.tasks.code import SANDBOX, Code, program_in
from tot.tree import Node

_MOST = 20
"""Calls that are tried."""


class Outputs(Evaluator):
    """Minus the examples that a program fails, plus the share of the others that agree with it, on average over the
    calls that the model is asked for.

    For the tasks of programs, and searches that value all of them in one step: `best-of-n:until_solved=false`.
    """

    async def evaluate(self, ctx: Context, nodes: Sequence[Node]) -> list[Evaluation]:
        task = ctx.task
        if not isinstance(task, Code):
            raise OptionError(f"outputs values programs, and {task.name} has none: choose another evaluator")
        programs = [task.answer_at(ctx.state(node)) or "" for node in nodes]
        different = list(dict.fromkeys(programs))
        failed = [ctx.heuristic(node) for node in nodes]
        if len(different) < 2:
            return [Evaluation(-each) for each in failed]
        (reply,) = await ctx.ask("inputs", ctx.tree.root, temperature=0.0)
        if reply.cut:
            return [Evaluation(None, reply.usage, calls=reply.calls), *[Evaluation(None) for _ in nodes[1:]]]
        calls = calls_in(reply.text)
        ran = await ctx.each(different, lambda program: outputs(program, calls, SANDBOX))
        given = dict(zip(different, ran, strict=True))
        values = [
            agreement(given[program], [given[other] for other in (*programs[:i], *programs[i + 1 :])]) - failed[i]
            for i, program in enumerate(programs)
        ]
        return [Evaluation(values[0], reply.usage, int(not calls), calls=reply.calls), *map(Evaluation, values[1:])]


def calls_in(reply: str) -> list[str]:
    """The calls of functions, with literals alone, that stand in a text's lines: `f(1)`, `print(f(1))`,
    `assert f(1) == 2`."""
    found = []
    for line in program_in(reply).splitlines():
        try:
            nodes = list(ast.walk(ast.parse(line.strip())))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        calls = [node for node in nodes if isinstance(node, ast.Call) and _is_plain(node)]
        found += [ast.unparse(call) for call in calls[:1]]
    return list(dict.fromkeys(found))[:_MOST]


def _is_plain(call: ast.Call) -> bool:
    """Whether a function that is none of Python's own is called by its name, with nothing but literals."""
    try:
        for argument in (*call.args, *(keyword.value for keyword in call.keywords)):
            ast.literal_eval(argument)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return False
    named = isinstance(call.func, ast.Name) and not hasattr(builtins, call.func.id)
    return named and all(keyword.arg for keyword in call.keywords)


def agreement(own: Sequence[str | None], others: Sequence[Sequence[str | None]]) -> float:
    """The share of others' outputs that equal one's own, over all calls; what gives nothing agrees with nobody."""
    pairs = [(mine, theirs) for other in others for mine, theirs in zip(own, other, strict=True)]
    return sum(mine is not None and mine == theirs for mine, theirs in pairs) / max(len(pairs), 1)
