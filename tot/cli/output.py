"""The output of `tot solve`: progress, then the tree, the answer and its cost."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.text import Text

from tot.report.terminal import console, plain, print_tree
from tot.search.session import SearchSession
from tot.solver import Solution


def usage_line(solution: Solution) -> str:
    """Return a summary of calls, tokens, reused prompt tokens, forward passes, speed and acceptance."""
    usage = solution.usage
    reused = usage.reused_prompt_tokens / usage.prompt_tokens if usage.prompt_tokens else 0.0
    count = len(solution.tree) - 1
    thoughts = f"{count} thought{'s' * (count != 1)}"
    if not solution.calls:
        return f"{thoughts}, no model calls"
    line = (
        f"{thoughts}, {solution.calls} calls, {usage.new_tokens} new tokens, "
        f"{usage.prompt_tokens} prompt tokens, {reused:.0%} of them reused, {usage.forwards} forwards, "
        f"{usage.seconds:.1f} s"
    )
    if usage.new_tokens and usage.seconds:
        line += f", {usage.new_tokens / usage.seconds:.0f} tokens/s"
    if usage.drafted:
        line += f", {usage.accepted} of {usage.drafted} drafted tokens accepted"
    if usage.acceptance_rate is not None:
        line += f" (acceptance rate {usage.acceptance_rate:.0%})"
    if usage.undecoded_tokens:
        line += f", cut rationales: {usage.approximate_tokens} approximate tokens, {usage.undecoded_tokens} not decoded"
    if usage.cost:
        line += f", cost {usage.cost:.4g}"
    if solution.rejected:
        line += f", {solution.rejected} illegal or returning thoughts"
    if solution.parse_failures:
        line += f", {solution.parse_failures} unparsed replies"
    return line


def show(solution: Solution) -> None:
    """Print the tree, the answer and its usage to standard output."""
    output = console(width=10_000)  # don't wrap lines in a pipe
    print_tree(output, solution.tree)
    output.print()
    if solution.stopped:
        output.print(Text(f"Stopped ({solution.stopped}); this is the best answer so far."))
    answer = solution.answer
    if isinstance(answer, list):
        answer = "  ".join(map(str, answer)) or "no action is needed"
    verified = f" ({solution.verdict})" if solution.solved else ""
    output.print(Text(f"Answer{verified}: {plain('none found' if answer is None else str(answer))}", style="bold"))
    output.print(Text(usage_line(solution), style="dim"))


def search_line(sessions: Sequence[SearchSession], started: float) -> str:
    """Return the progress of the first search: level, thoughts, tokens, seconds."""
    elapsed = time.monotonic() - started
    if not sessions:
        return f"loading the model … {elapsed:.0f} s"
    tree, meter = sessions[0].tree, sessions[0].meter
    level = max(node.depth for node in tree)
    rate = meter.new_tokens / max(meter.seconds, 1e-9)
    return f"level {level}, {len(tree) - 1} thoughts, {meter.new_tokens} tokens, {rate:.0f} tokens/s, {elapsed:.0f} s"
