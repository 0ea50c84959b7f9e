"""The output of `tot solve`: progress, then the answer, the tree and the usage."""

from __future__ import annotations

from pathlib import Path

from rich.text import Text

from tot.report.terminal import console, plain, print_tree
from tot.solution import Solution
from tot.task.task import answer_text

_SHORT = 80
"""Characters of a thought that the tree shows whole."""


def usage_line(solution: Solution) -> str:
    """Tokens, reuse of prefixes, forward passes, tokens per second and acceptance."""
    usage = solution.usage
    shared = usage.reused_prompt_tokens / usage.prompt_tokens if usage.prompt_tokens else 0.0
    thoughts = counted(len(solution.tree) - 1, "thought")
    if not solution.calls:
        return f"{thoughts}, no model calls"
    line = (
        f"{thoughts}, {counted(solution.calls, 'call')}, {counted(usage.new_tokens, 'new token')}, "
        f"{counted(usage.prompt_tokens, 'prompt token')}, {shared:.0%} of them reused, "
        f"{counted(usage.forwards, 'forward pass', 'forward passes')}, {usage.seconds:.1f} s"
    )
    if usage.new_tokens and usage.seconds:
        line += f", {usage.new_tokens / usage.seconds:.0f} tokens/s"
    for model, used in solution.by_model.items():
        line += f", {counted(used['new_tokens'], 'new token')} by {model}"
    if usage.drafted:
        drafted = counted(usage.drafted, "drafted token")
        line += f", {usage.accepted} of {drafted} accepted ({usage.accepted / usage.drafted:.0%})"
    if usage.acceptance_rate is not None:
        line += f", acceptance rate {usage.acceptance_rate:.0%} (of {usage.reached} reached)"
    if usage.undecoded_tokens:
        line += f", rationales cut: {usage.approximate_tokens} tokens approximate, {usage.undecoded_tokens} not decoded"
    if usage.forced_tokens or usage.masked_tokens:
        line += f", {usage.forced_tokens} forced and {usage.masked_tokens} masked tokens"
    if solution.rejected:
        line += f", {counted(solution.rejected, 'rejected thought')}"
    if solution.parse_failures:
        line += f", {counted(solution.parse_failures, 'unreadable reply', 'unreadable replies')}"
    return line


def counted(number: int, one: str, many: str = "") -> str:
    """Return a number with its noun, such as "1 call" or "2 calls"."""
    return f"{number} {one if number == 1 else many or f'{one}s'}"


def show(solution: Solution, saved: Path | None = None, verdict: str = "") -> None:
    """Print the answer, the text that gave it, the tree and the usage to standard output.

    `saved` is the file with the run, `verdict` a line about the reference.
    """
    page, tree = console(), solution.tree
    page.print(Text(answer_line(solution), style="bold"))
    if verdict:
        page.print(verdict)
    if solution.stopped:
        page.print(f"Stopped early: {solution.stopped}.{_so_far(solution)}")
    best = next((node for node in reversed(list(tree)) if node.chosen), tree.root)
    path = [" ".join(node.thought.parts.values()) for node in tree.path(best) if node.thought is not None]
    if any("\n" in text or len(text) > _SHORT for text in path):
        page.print(f"\n{tree.state(best).text.strip()}")
    page.print()
    if path != [answer_text(solution.answer or "").strip()] or len(tree) > 2:  # otherwise the tree is the answer again
        print_tree(page, tree)
        page.print()
    page.print(Text(usage_line(solution), style="dim"))
    if saved is None:
        page.print(Text("To keep the tree, add --out run.json; `tot report run.json` draws it.", style="dim"))
    else:
        page.print(Text(f"Saved to {saved}; `tot report {saved}` draws it.", style="dim"))


def _so_far(solution: Solution) -> str:
    if solution.answer is not None:
        return " This is the best answer so far."
    return " The thoughts marked ★ are the best so far." if len(solution.tree) > 1 else ""


def answer_line(solution: Solution) -> str:
    """Such as "Answer (4 of 5 votes, 83% sure): 36", or "Answer (value 0.75): x + 1" if the task measures it."""
    answer = solution.answer
    shown = "none found" if answer is None else answer_text(answer) or "no action is needed"
    notes = [solution.verdict] if solution.solved else []
    if solution.votes is not None:
        notes.append("{} of {} votes".format(*solution.votes))
    if answer is not None and not solution.solved and (quality := _quality(solution)):
        notes.append(quality)
    return plain(f"Answer ({', '.join(notes)}): {shown}" if notes else f"Answer: {shown}")


def _quality(solution: Solution) -> str:
    """Return the measured value of an answer without a vote; otherwise its certainty, if it is known."""
    if solution.votes is None and solution.measured is not None:
        return f"value {solution.measured:.6g}"
    if solution.certainty is None:
        return ""
    more = f", one more sample +{100 * solution.gain:.1f} points" if solution.gain else ""
    return f"{solution.certainty:.0%} sure{more}"
