"""Messages that continue a model's text. They keep the tokens that the model sampled."""

from __future__ import annotations

from collections.abc import Sequence

from tot.decoders.request import Message, Purpose, Request, Sampling
from tot.tree.thought import Thought


def sampled_tokens(thoughts: Sequence[Thought]) -> int:
    """Return the number of sampled tokens of the thoughts."""
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
    """Return a request that scores labels after a prompt, or after an explanation and `trigger`."""
    space = " " if trigger is not None or prompt[-1].role == "assistant" else ""
    return Request(
        prompt=tuple(prompt),
        sampling=sampling,
        purpose=purpose,
        answer_trigger=trigger,
        choices=tuple(f"{space}{label}{end}" for label in labels),
        close_choices=close,
    )


def with_text(prompt: tuple[Message, ...], text: str) -> tuple[Message, ...]:
    """Append a paragraph to the last user message of a prompt."""
    user_indices = [i for i, message in enumerate(prompt) if message.role == "user"]
    if not text or not user_indices:
        return prompt
    last = prompt[user_indices[-1]]
    longer = last.model_copy(update={"content": f"{last.content}\n\n{text}"})
    return (*prompt[: user_indices[-1]], longer, *prompt[user_indices[-1] + 1 :])


def as_written(prompt: tuple[Message, ...], thoughts: Sequence[Thought]) -> tuple[Message, ...]:
    """Mark the sampled tokens of the thoughts in the assistant's prefix of a prompt.

    Tokenizing the text again could give other tokens than the model sampled.
    """
    last = prompt[-1]
    if last.role != "assistant":
        return prompt
    written = []
    at = 0
    for thought in thoughts:
        for name, text in thought.parts.items():
            start = last.content.find(text, at)
            if start < 0:
                continue
            at = start + len(text)
            if (drawn := thought.drawn.get(name)) is None or not drawn.tokens:
                continue
            own = drawn.text.lstrip() if thought.observation is not None else text  # text may end with an observation
            if own in drawn.text and text.startswith(own):
                begin = start - drawn.text.index(own)  # the parsed text may start inside the sampled text
                if begin >= 0 and last.content.startswith(drawn.text[: start - begin], begin):
                    written.append((begin, drawn.tokens))
    return (*prompt[:-1], last.model_copy(update={"written": tuple(written)}))
