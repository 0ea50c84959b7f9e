"""Continue: use pieces of one message of the model as thoughts.

The prompt asks for a whole answer, and the model's message is cut into thoughts. Each thought continues exactly the
sampled tokens, so a path of first children is the text that the model would decode without cuts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tot.decoders.errors import OptionError
from tot.generators.base import Count, Generator
from tot.llm.context import Context
from tot.llm.replies import Proposal, Reply
from tot.task.task import Task
from tot.tree.thought import SampledText, Thought
from tot.tree.tree import Node

_DELIMITERS = {
    "paragraph": ("\n\n",),
    "line": ("\n",),
    "sentence": tuple(f"{mark}{blank}" for mark in ".?!" for blank in " \n"),
}
_LABEL = re.compile(r"[\s#*_>-]*(?:[\w'’ ,()&/-]{0,80}:[\s*_]*|#[^\n]*|\*\*[^\n]*\*\*|\d{0,3}[.)]?)\s*")
"""A label that only announces a thought: `Step 2:`, `## Costs`, `**Costs**`, `2.`."""
_MAX_LABELS = 3
"""Maximum number of consecutive labels to join with the thought that they announce."""
_MIN_REPEATED = 3
"""Minimum number of words of a repetition: "so" may occur twice."""


class Continue(Generator):
    """Decode the next piece of one message, up to a delimiter (`until`), the end of turn, or the answer.

    The last thought template asks for the message; the text so far is the assistant's message. A label ("Step 2:") is
    not a thought, but the beginning of one. Empty pieces and repetitions are rejected as parse failures.
    """

    writes_answer = True
    has_confidence = False
    thoughts: Count = 3
    """Number of pieces per state, unless the search sets it."""
    until: str = "paragraph"
    """paragraph, line or sentence; any other text is itself the delimiter. Pieces include their delimiter."""
    tokens: Count | None = None
    """Maximum number of tokens of a piece."""

    def check(self, task: Task) -> None:
        first = self.message_template(task)
        if first in task.schemas:
            raise OptionError(
                f"{type(self).__name__} writes a message in pieces, and {type(task).__name__} has a schema for "
                f"{first!r}: choose generator='sample'"
            )

    async def propose(self, ctx: Context, nodes: Sequence[Node], count: int | None) -> list[list[Proposal]]:
        count = count or self.thoughts
        ends = _DELIMITERS.get(self.until, (self.until,))

        about: dict[str, Any] = {"temperature": self.temperature, "max_tokens": self.tokens, "until": ends}

        async def extend(node: Node) -> list[Proposal]:
            ask = partial(ctx.ask, ctx.task.thought[-1], node, **about)
            replies = await ask(n=count)
            proposals = [Proposal(Thought(parts={}), prior=1 / count, decoder=reply.decoder) for reply in replies]
            pieces = list(enumerate(zip(proposals, replies, strict=True)))
            await ctx.each(pieces, lambda one: self._finish(ctx, node, one[0], *one[1], ask))
            return proposals

        return await ctx.each(nodes, extend)

    async def _finish(
        self, ctx: Context, node: Node, sample: int, proposal: Proposal, reply: Reply, ask: Callable[..., Any]
    ) -> None:
        """Set the thought of a proposal to the piece in a reply, completed if it is only a label."""
        name, state = ctx.task.thought[-1], ctx.state(node)
        for label in range(_MAX_LABELS + 1):
            before = proposal.thought
            assert before is not None
            proposal.usage += reply.usage
            proposal.calls += reply.calls
            thought = _append(before, name, reply, first=not state.thoughts)
            text, reason = thought.parts[name], reply.completion.finish_reason
            ended = reason == "eos" or ctx.task.is_answered(state.message + thought.answer_text)
            full = not ended and (reason == "repetition" or ctx.room(name, (*state.thoughts, thought)) <= 0)
            proposal.thought = thought.model_copy(update={"ended": ended or full, "truncated": full})
            if ended or full or reply.cut or label == _MAX_LABELS or not _LABEL.fullmatch(reply.completion.text):
                break
            (reply,) = await ask(call=sample, begun=proposal.thought)
        previous = [words for one in state.thoughts if len(words := _words(one.parts.get(name, ""))) >= _MIN_REPEATED]
        if reply.cut:
            proposal.thought = None
        elif not _words(text) or _words(text) in previous:
            proposal.thought, proposal.parse_failures = None, 1


def _append(thought: Thought, name: str, reply: Reply, first: bool) -> Thought:
    """Append a piece to a thought's only part. Whitespace at the beginning of the message is dropped."""
    drawn = thought.drawn.get(name, SampledText(text="", tokens=()))
    completion = reply.completion
    drawn = SampledText(
        text=drawn.text + completion.text,
        tokens=drawn.tokens + completion.tokens,
        logprobs=drawn.logprobs + completion.logprobs,
    )
    before = thought.parts.get(name, "")
    thinking = sum(len(part.text) for part in completion.parts if part.kind in ("thinking", "closing"))
    thinking = len(before) + thinking if thinking else thought.thinking
    whole = before + completion.text
    text = whole.lstrip() if first else whole
    return Thought(
        parts={name: text},
        drawn={name: drawn} if drawn.tokens or drawn.logprobs else {},
        thinking=max(0, thinking - (len(whole) - len(text))),
    )


def _words(text: str) -> list[str]:
    """Return the words of a text in lower case, for comparisons."""
    return text.casefold().split()
