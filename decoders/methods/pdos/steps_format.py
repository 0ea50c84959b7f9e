"""The format of parallel steps: their markers, and the instructions for the model.

PDOS (Yu et al., 2025), section 3 and appendix A: a step begins with a marker, a title and a colon. In a skeleton, an
ellipsis and the next marker follow at once. A terminator after a marker ends the block. This file handles text and
tokens, not branches.
"""

from __future__ import annotations

from typing import Any

from tot.decoders.engine.text import TextCodec
from tot.decoders.methods.options import PDOSOptions
from tot.decoders.request import Message, Request, Sampling

_SKELETON = """\
Parts of your answer may not depend on one another: items to check one by one, documents to read, aspects to weigh, \
points of a plan. Write each part of that kind as a step:
- A step begins on a line of its own with {marker}, then a short title, then a colon.
- After the colon comes all that the step has to say, without relying on other steps. If {ellipsis} stands there \
instead, that step is written elsewhere: give the title of the next step at once.
- Leave out no step that is needed.
- After the last step write {marker}{terminator}, and only then go on, for example with a conclusion.
- Nothing but such a step begins with {marker}.

Three examples of the form:

Asked which of two people is the taller, one may write:
I compare the two.
{marker} Ada Moss{colon}{ellipsis}
{marker} Ben Ortiz{colon}{ellipsis}
{marker}{terminator}
So it is Ben Ortiz.

Asked what three letters say about a date, one may write:
{marker} Letter 1{colon}{ellipsis}
{marker} Letter 2{colon}{ellipsis}
{marker} Letter 3{colon}{ellipsis}
{marker}{terminator}
So the wedding was on the 4th of June.

Asked to weigh a town's traffic, schools and parks, one may write:
I look at one after another.
{marker} Traffic{colon}{ellipsis}
{marker} Schools{colon}{ellipsis}
{marker} Parks{colon}{ellipsis}
{marker}{terminator}
All in all the town is a good place for children.

The examples show only the form. Your steps must be about the task given here."""

_GIVEN = """\
Answer in separate steps. A step begins on a line of its own with {marker}, a title and a colon. After the colon say \
all that its title asks for and no more, without relying on other steps. After the last step write \
{marker}{terminator}, and only then the conclusion."""


class StepsFormat:
    """The text and tokens around steps, for one tokenizer."""

    def __init__(self, options: PDOSOptions, codec: TextCodec) -> None:
        self.options = options
        self.codec = codec
        self.terminator = options.terminator.removeprefix(options.marker)
        self.between = codec.encode("\n")
        """Tokens between the steps."""
        self.end_text = f"{options.marker}{self.terminator}\n"
        """Text after the last step."""
        self.end = codec.encode(self.end_text)

    def header(self, title: str) -> str:
        """Return the text that begins a step."""
        return f"{self.options.marker} {title}{self.options.colon}"

    def forced(self, rest: str) -> list[int]:
        """Return the tokens fed after a skeleton's title (section 3, stage 1): ellipsis and marker.

        `rest` is the end of the title that still has to be encoded.
        """
        return self.codec.encode(f"{rest}{self.options.ellipsis}\n{self.options.marker}")

    def title(self, written: str) -> str:
        """Return a title as the model wrote it, without repeated marker characters."""
        return written.strip().lstrip(self.options.marker[-1]).strip()

    def is_blank(self, written: str) -> bool:
        """Return whether the text between marker and title has only blanks and marker characters."""
        return not written.strip(" " + self.options.marker[-1])

    def ends_block(self, written: str, mark: str | None) -> bool:
        """Return whether a title ended by `mark` is the end of the block instead.

        This is the terminator, or a part of it alone on the line, as small models write it.
        """
        if mark == self.terminator:
            return self.is_blank(written)
        part = written.strip(" " + self.options.marker[-1])
        return mark == "\n" and bool(part) and part in self.terminator

    def title_sampling(self, sampling: Sampling) -> Sampling:
        """Return the sampling of a skeleton's title. A valid title ends at the colon."""
        return _stopped(sampling, self.options.colon, self.terminator, "\n")

    def step_sampling(self, sampling: Sampling) -> Sampling:
        """Return the sampling of a step. It ends where the next step or the end of the block begins."""
        return _stopped(sampling, self.options.marker, self.terminator)

    def instructions(self, given: bool = False) -> str:
        """Return the instructions for steps with given titles, or for a skeleton (appendix A)."""
        return (_GIVEN if given else _SKELETON).format(
            marker=self.options.marker,
            terminator=self.terminator,
            colon=self.options.colon,
            ellipsis=self.options.ellipsis,
        )

    def prepare(self, request: Request) -> Request:
        """Return the request with instructions in its prompt, or unchanged if it only scores choices."""
        if request.choices and request.answer_trigger is None:
            return request
        words = self.options.instructions
        if words is None:
            words = self.instructions(given=bool(request.steps))
        return request.model_copy(update={"prompt": _instructed(request.prompt, words)})


def _stopped(sampling: Sampling, *marks: str) -> Sampling:
    return sampling.model_copy(update={"stop": (*sampling.stop, *marks)})


def _instructed(prompt: str | tuple[Message, ...] | tuple[int, ...], words: str) -> Any:
    """Insert instructions before a text, since it may end in a begun answer, or after the last user message."""
    if not words:
        return prompt
    if isinstance(prompt, str):
        return f"{words}\n\n{prompt}"
    messages = [part for part in prompt if isinstance(part, Message)]
    if not messages:
        return prompt
    last = max((i for i, message in enumerate(messages) if message.role == "user"), default=None)
    if last is None:
        position = len(messages) - (messages[-1].role == "assistant")
        return (*messages[:position], Message(role="user", content=words), *messages[position:])
    extended = Message(role="user", content=f"{messages[last].content}\n\n{words}".strip())
    return (*messages[:last], extended, *messages[last + 1 :])
