"""The format of parallel steps: their markers, and the instructions for the model.

PDOS (Yu et al., 2025), section 3 and appendix A: a step begins with a marker, a title and a colon. In a skeleton, an
ellipsis and the next marker follow at once. A terminator after a marker ends the block. The marks are a variant of the
paper's.
"""

from __future__ import annotations

from typing import Any

from tot.decoders.request import Message

MARKER = "####"
TERMINATOR = "%%%"
COLON = ":"
ELLIPSIS = "..."
END = f"{MARKER}{TERMINATOR}\n"
"""Text after the last step."""
_BLANK = " " + MARKER[-1]
_SKELETON = """\
Parts of your answer may not depend on one another: items to check one by one, documents to read, aspects to weigh, \
points of a plan. Write each part of that kind as a step:
- A step begins on a line of its own with ####, then a short title, then a colon.
- After the colon comes all that the step has to say, without relying on other steps. If ... stands there instead, \
that step is written elsewhere: give the title of the next step at once.
- Leave out no step that is needed.
- After the last step write ####%%%, and only then go on, for example with a conclusion.
- Nothing but such a step begins with ####.

Three examples of the form:

Asked which of two people is the taller, one may write:
I compare the two.
#### Ada Moss:...
#### Ben Ortiz:...
####%%%
So it is Ben Ortiz.

Asked what three letters say about a date, one may write:
#### Letter 1:...
#### Letter 2:...
#### Letter 3:...
####%%%
So the wedding was on the 4th of June.

Asked to weigh a town's traffic, schools and parks, one may write:
I look at one after another.
#### Traffic:...
#### Schools:...
#### Parks:...
####%%%
All in all the town is a good place for children.

The examples show only the form. Your steps must be about the task given here."""

_GIVEN = """\
Answer in separate steps. A step begins on a line of its own with ####, a title and a colon. After the colon say all \
that its title asks for and no more, without relying on other steps. After the last step write ####%%%, and only then \
the conclusion."""


def header(title: str) -> str:
    """Return the text that begins a step."""
    return f"{MARKER} {title}{COLON}"


def clean_title(written: str) -> str:
    """Return a title as the model wrote it, without repeated marker characters."""
    return written.strip().lstrip(MARKER[-1]).strip()


def is_blank(written: str) -> bool:
    """Return whether the text between marker and title has only blanks and marker characters."""
    return not written.strip(_BLANK)


def ends_block(written: str, mark: str | None) -> bool:
    """Return whether a title ended by `mark` is the end of the block instead.

    This is the terminator, or a part of it alone on the line, as small models write it.
    """
    if mark == TERMINATOR:
        return is_blank(written)
    part = written.strip(_BLANK)
    return mark == "\n" and bool(part) and part in TERMINATOR


def instructed(prompt: str | tuple[Message, ...] | tuple[int, ...], given: bool, words: str | None = None) -> Any:
    """Return a prompt with instructions for steps with given titles, or for a skeleton (appendix A).

    They are put before a text, since it may end in a begun answer, or after the last user message of a chat. A prompt
    of token ids is not changed. `words`: other instructions; "" adds none.
    """
    words = words if words is not None else _GIVEN if given else _SKELETON
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
