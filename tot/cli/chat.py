"""`tot chat`: a conversation with a model, whose answers are printed as they are decoded or elected by a vote."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from tot.decoders.errors import OptionError, TotError, unknown
from tot.report.terminal import complain, console, print_tree

if TYPE_CHECKING:
    from tot.decoders.decoder import LocalDecoder
    from tot.decoders.request import Message
    from tot.solution import Solution

_COMMANDS = {
    "/vote": "answer the last question by a vote of samples",
    "/tree": "show the samples of the last vote",
    "/model NAME": "change the model",
    "/clear": "begin a new conversation",
    "/quit": "end, as Ctrl-D does",
}


def chat_command(
    model: Annotated[str, typer.Option(help="A name (tot models), a hub id, a folder or a .gguf file.")] = (
        "smollm2-135m"
    ),
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of new tokens per answer.")] = 1024,
    thinking: Annotated[str, typer.Option(help="As for tot solve.")] = "auto",
) -> None:
    """Talk with a model. Lines that begin with / are commands, which /help lists."""
    if find_spec("readline"):
        __import__("readline")  # lets the user edit lines
    chat = _Chat(model, {"max_tokens": max_tokens, "thinking": thinking})
    if sys.stdin.isatty():
        complain(f"{model}: type a question, or /help")
    try:
        while True:
            try:
                line = input("> " if sys.stdin.isatty() else "").strip()
            except EOFError:
                return
            if line == "/quit":
                return
            try:
                chat.take(line)
            except TotError as error:
                complain(f"tot: {' '.join(str(error).split())}")
    finally:
        chat.decoder.close()


class _Chat:
    """A conversation with one model."""

    def __init__(self, model: str, sampling: dict[str, Any]) -> None:
        """Raises OptionError if an option of the sampling is invalid."""
        from tot.decoders.errors import validated
        from tot.decoders.request import Sampling

        self._sampling = validated(Sampling, sampling, "chat")
        self._page = console()
        self._messages: list[Message] = []
        self._voted: Solution | None = None
        self.decoder = _opened(model)

    def take(self, line: str) -> None:
        """Answer a question, or execute a command. Raises OptionError for an unknown one."""
        command, _, argument = line.partition(" ")
        if command == "/model" and argument.strip():
            decoder = _opened(argument.strip())
            self.decoder.close()
            self.decoder = decoder
        elif line == "/vote":
            self._vote()
        elif line == "/tree" and self._voted is not None:
            print_tree(self._page, self._voted.tree)
        elif line == "/tree":
            raise OptionError("no vote has run: type /vote after a question")
        elif line == "/clear":
            self._messages, self._voted = [], None
        elif line == "/help":
            for name, text in _COMMANDS.items():
                self._page.print(f"{name:12} {text}")
        elif line.startswith("/"):
            raise OptionError(unknown("command", command, [name.split()[0] for name in _COMMANDS]))
        elif line:
            self._answer(line)

    def _answer(self, question: str) -> None:
        """Print an answer as it is decoded. Ctrl-C ends it, and keeps the text so far."""
        from tot.decoders.engine.sequence import ThinkingPiece
        from tot.decoders.request import Message, Request

        asked = (*self._messages, Message(role="user", content=question))
        request = Request(prompt=asked, sampling=self._sampling)
        (handle,) = self.decoder.submit([request], stream=True)
        try:
            for _, piece in handle:
                self._page.print(Text(piece, style="dim" if isinstance(piece, ThinkingPiece) else ""), end="")
        except KeyboardInterrupt:
            handle.cancel()
        self._page.print()
        self._messages = [*asked, Message(role="assistant", content=handle.result()[0].text)]

    def _vote(self) -> None:
        """Answer the last question again by the vote of `tot serve`."""
        from tot.api import run_search
        from tot.cli.live_view import watched
        from tot.cli.output import answer_line
        from tot.decoders.request import Message
        from tot.running import run_to_end
        from tot.serving.searches import load_searches
        from tot.task.task import answer_text

        if not self._messages:
            raise OptionError("there is no question to vote on: type one first")
        *history, question, _ = self._messages
        task, config = load_searches(None, self.decoder)["vote"]
        with watched(question.content, "vote") as view:
            search = task.with_prompts(history=history)
            found = run_to_end(run_search(search, question.content, config, watch=view.watch, keep_best=True))
        self._voted = found
        self._page.print(Text(answer_line(found), style="bold"))
        if found.answer is not None:
            reply = Message(role="assistant", content=answer_text(found.answer))
            self._messages = [*history, question, reply]


def _opened(model: str) -> LocalDecoder:
    from tot.decoders.decoder import load_decoder

    return load_decoder("auto", model)
