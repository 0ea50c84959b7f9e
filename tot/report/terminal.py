"""The tree of thoughts as text for a terminal. Model output is shown as text: no markup, no control characters."""

from __future__ import annotations

import re

from rich.text import Text
from rich.tree import Tree

from tot.solver import Solution
from tot.tree import Node, ThoughtTree

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def plain(text: str) -> str:
    """Text without control characters, which could rewrite a terminal."""
    return _CONTROL.sub("�", text)


def tree_view(tree: ThoughtTree) -> Tree:
    """Every thought with its value; the chosen path is marked with a star."""
    top = Tree(Text(plain(tree.state(tree.root).question), style="bold"), guide_style="dim")
    branches = {tree.root.id: top}
    for node in tree:
        if node.parent is not None:
            branches[node.id] = branches[node.parent].add(_label(node))
    return top


def _label(node: Node) -> Text:
    value = "  –  " if node.value is None else f"{node.value:5.2f}"
    text = Text(f"{'★' if node.chosen else '·'} {value}  ", style="bold green" if node.chosen else "cyan")
    assert node.thought is not None
    text.append(plain(" → ".join(" ".join(part.split()) for part in node.thought.parts.values())), style="default")
    return text


def usage_line(solution: Solution) -> str:
    """Tokens, reused prompt tokens, forwards and tokens a second."""
    usage = solution.usage
    rate = usage.new_tokens / usage.seconds if usage.seconds else 0.0
    line = (
        f"{len(solution.tree) - 1} thoughts, {solution.calls} calls, {usage.new_tokens} new tokens, "
        f"{usage.prompt_tokens} prompt tokens ({usage.reused_prompt_tokens} reused), {usage.forwards} forwards, "
        f"{usage.seconds:.1f} s, {rate:.0f} tokens/s"
    )
    if solution.parse_failures:
        line += f", {solution.parse_failures} replies could not be read"
    return line
