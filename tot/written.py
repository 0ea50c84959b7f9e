"""What the model wrote itself, found again in a prompt that it goes on with: there it gets the tokens that it drew.

A text can be cut into tokens in many ways, and its author's is not always the tokenizer's: cut anew, it would be
continued as somebody else's. Knows no tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence

from tot.decoders.request import Message
from tot.state import Thought


def as_written(prompt: tuple[Message, ...], thoughts: Sequence[Thought]) -> tuple[Message, ...]:
    """The prompt, with the thoughts that its assistant's prefix holds, in their order, marked as they were drawn."""
    last = prompt[-1]
    if last.role != "assistant":
        return prompt
    written = []
    at = 0
    for thought in thoughts:
        for name, text in thought.parts.items():
            found = last.content.find(text, at)
            if found < 0:
                continue
            at = found + len(text)
            if (drawn := thought.drawn.get(name)) is not None and text in drawn.text:
                begin = found - drawn.text.index(text)  # what was read from a text may begin inside of it
                if begin >= 0 and last.content.startswith(drawn.text[: found - begin], begin):
                    written.append((begin, drawn.tokens))
    return (*prompt[:-1], last.model_copy(update={"written": tuple(written)}))
