"""Messages that go on with what a model wrote: its texts stand in them in the tokens that it drew."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from tot.decoders.request import Message, Purpose, Request, Sampling
from tot.tree.thought import Thought


def tokens_of(thoughts: Sequence[Thought]) -> Hashable:
    """What tells a path by the tokens that were drawn for it; of one that was not drawn here, nothing does."""
    drawn = [
        (name, drawn.tokens)
        for thought in thoughts
        for name in thought.parts
        if (drawn := thought.drawn.get(name)) is not None and drawn.tokens
    ]
    whole = len(drawn) == sum(len(thought.parts) for thought in thoughts)
    names = tuple(dict.fromkeys(name for name, _ in drawn))
    return (names, tuple(token for _, tokens in drawn for token in tokens)) if whole else None


def drawn_for(thoughts: Sequence[Thought]) -> int:
    """Tokens drawn for them."""
    return sum(len(part.tokens) for thought in thoughts for part in thought.drawn.values())


def scoring(
    prompt: Sequence[Message],
    labels: Sequence[str],
    sampling: Sampling,
    purpose: Purpose = "evaluate",
    *,
    end: str = "",
    close: bool = True,
    trigger: str | None = None,
) -> Request:
    """What scores labels after a prompt, or after an explanation and `trigger`."""
    space = " " if trigger is not None or prompt[-1].role == "assistant" else ""
    return Request(
        prompt=tuple(prompt),
        sampling=sampling,
        purpose=purpose,
        answer_trigger=trigger,
        choices=tuple(f"{space}{label}{end}" for label in labels),
        close_choices=close,
    )


def with_said(prompt: Sequence[Any], text: str) -> tuple[Message, ...]:
    """The prompt with a text more at the end of what the assistant says."""
    last = prompt[-1]
    begun = last.content if last.role == "assistant" else ""
    return (*prompt[: -1 if begun else None], Message(role="assistant", content=begun + text))


def with_text(prompt: tuple[Message, ...], text: str) -> tuple[Message, ...]:
    """The prompt with a paragraph more at the end of what the user says last."""
    places = [i for i, message in enumerate(prompt) if message.role == "user"]
    if not text or not places:
        return prompt
    last = prompt[places[-1]]
    longer = last.model_copy(update={"content": f"{last.content}\n\n{text}"})
    return (*prompt[: places[-1]], longer, *prompt[places[-1] + 1 :])


def as_written(prompt: tuple[Message, ...], thoughts: Sequence[Thought]) -> tuple[Message, ...]:
    """The prompt, with the thoughts that its assistant's prefix holds, in their order, marked as they were drawn: cut
    into tokens anew, a text would be continued as somebody else's."""
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
            if (drawn := thought.drawn.get(name)) is None or not drawn.tokens:
                continue
            own = drawn.text.lstrip() if thought.observation is not None else text  # a result may stand behind it
            if own in drawn.text and text.startswith(own):
                begin = found - drawn.text.index(own)  # what was read from a text may begin inside of it
                if begin >= 0 and last.content.startswith(drawn.text[: found - begin], begin):
                    written.append((begin, drawn.tokens))
    return (*prompt[:-1], last.model_copy(update={"written": tuple(written)}))
