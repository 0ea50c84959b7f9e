"""Text to token ids and back: prompts, chat templates, continuations, and which tokens end a text.

Text is data. A control token spelled out in it ("<|im_end|>" in a user's question) is encoded as plain characters.
Only the chat template's own control tokens are control tokens. Other added tokens ("<table>") are text. In the model's
own texts, control tokens that mark its thinking are text, too.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import groupby, pairwise, takewhile
from typing import Any

from tokenizers.decoders import DecodeStream

from tot.decoders.errors import ModelError, RequestError
from tot.decoders.models.chat_template import variables
from tot.decoders.models.model_names import warn_of_no_template
from tot.decoders.request import Message, Request, ThinkingOptions
from tot.decoders.thinking import (
    FINAL,
    HARMONY,
    MESSAGE_END,
    add_tags,
    begins_tag,
    closings,
    control_tags,
    end_of,
    find_thinking,
    has_tags,
    left_open,
    opening_tag,
    openings,
    switches,
)
from tot.decoders.tools import MARKERS, CallForm, as_dicts, as_json, as_plain, find_form

log = logging.getLogger(__name__)
_TAIL = 32
"""Characters or tokens at the end of a prompt without messages in which a tag may open the thinking."""

_USER = secrets.token_hex(8)
"""A user's message that no template contains."""
_NONE: Mapping[str, Any] = {}
_OFF = ThinkingOptions(budget=0)
Prompt = str | Sequence[Message] | Sequence[int]


class Encoded(tuple[int, ...]):
    """A prompt of token ids that are valid: a model may sample ids that its tokenizer lacks.

    `awaits` is the tag that closes the thinking at its end; empty if the text may begin with thinking, and None if
    thinking has ended.
    """

    awaits: str | None = ""


class TextCodec:
    """Encode prompts and decode outputs for one tokenizer, ours or a fast one of transformers. Thread-safe.

    `end_ids` are tokens that end a text, beside the tokenizer's own. `rows` is the number of rows in the model's
    embedding. Encoding a token without a row raises RequestError. `think_tags` open and close the model's thinking, if
    its chat template does not show them.
    """

    def __init__(
        self,
        tokenizer: Any,
        end_ids: Iterable[int] = (),
        rows: int | None = None,
        think_tags: tuple[str, str] | None = None,
    ) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ModelError(
                f"{type(tokenizer).__name__} has no fast backend: save the tokenizer with a tokenizer.json beside it"
            )
        self.tokenizer = tokenizer
        self.backend = backend
        self._size = len(tokenizer) if rows is None else min(len(tokenizer), rows)
        ends = list(end_ids)
        if tokenizer.eos_token_id is not None:
            ends.append(tokenizer.eos_token_id)
        added = tokenizer.added_tokens_decoder
        self._added: dict[int, str] = {i: token.content for i, token in added.items()}
        special = {i for i, token in added.items() if token.special or token.content in MARKERS}
        if think_tags is not None:
            add_tags(*think_tags)
        tags = control_tags(self._added.values())
        kept = tags | MARKERS
        self.tags = {i: content for i, content in self._added.items() if i in special and content in kept}
        """Control tokens that mark thinking or calls, with their text."""
        self.message_end = next((i for i, tag in self.tags.items() if tag == MESSAGE_END), None)
        """The token that ends a message of a reply that may have several, of which the last one is the answer."""
        self._turn_end = self._find_turn_end()
        every = (*ends, *([] if self._turn_end is None else [self._turn_end]))
        self.end_ids = frozenset(end for end in every if end != self.message_end)
        """Tokens that end a text."""
        self._opened = self._rendered(("user", _USER), opens=True)
        self.thinks = bool(tags or think_tags) or has_tags(self.tokenizer.chat_template or "")
        """Whether the model may think before it answers."""
        self._told: set[str] = set()
        self._variables = variables(self.tokenizer.chat_template or "")
        self.opening = think_tags[0] if think_tags else opening_tag(tags, self.tokenizer.chat_template or "")
        """The tag that opens thinking; empty if it is not known."""
        # Tokens that mark turns in the chat template are control tokens, even if the tokenizer does not say so.
        turns = {i for i, content in self._added.items() if content.strip() and content in self._opened}
        self.special = self.end_ids | special | turns
        """Control tokens."""
        # Longest first. Runs of blanks that some tokenizers add as control tokens are text.
        contents = (content for i, content in self._added.items() if i in self.special)
        written = sorted(filter(str.strip, contents), key=len, reverse=True)
        any_control = "|".join(map(re.escape, written)) or r"(?!)"
        self._spelled_out = re.compile(any_control)
        self._begins_control = re.compile(f"(?={any_control})")  # finds overlapping ones too
        # Tokenizers that drop leading blanks cannot tell which text their tokens spell inside another text.
        self._keeps_blanks = self.spelled(self._continuation(" x"), " x")[1] == 2

    @cached_property
    def calls(self) -> CallForm:
        """The form in which the model writes calls of functions."""
        render = lambda messages, tools: self._render(messages, tools=tools)  # noqa: E731
        return find_form(render, self.control)

    @property
    def control(self) -> dict[str, int]:
        """The ids of the control tokens that are part of texts."""
        return {content: i for i, content in self.tags.items()}

    def _rendered(self, *turns: tuple[str, str], opens: bool = False, **options: Any) -> str:
        """Render (role, content) turns with the chat template; "" if it is missing or refuses them."""
        return self._render([{"role": role, "content": content} for role, content in turns], opens, **options)

    def _render(self, messages: list[dict[str, Any]], opens: bool = False, **options: Any) -> str:
        try:
            text: str = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=opens, **options
            )
        except Exception:  # templates may raise any error; the request then raises it  # noqa: BLE001
            return ""
        return text

    def _find_turn_end(self) -> int | None:
        """Return the token that the chat template puts after an assistant's text, if it is one added token."""
        marker = secrets.token_hex(8)
        turns = (("user", "x"), ("assistant", marker))
        for text in (self._rendered(*turns), self._rendered(*turns, ("user", "x"))):
            after = text.rpartition(marker)[2].lstrip() if marker in text else ""
            ends = [i for i, content in self._added.items() if content.strip() and after.startswith(content)]
            if ends and (end := max(ends, key=lambda i: len(self._added[i]))) != self.message_end:
                return end
        return None

    def _begins(self, options: Mapping[str, Any]) -> str:
        """Return the beginning of a reply, as the chat template writes it."""
        opened = self._rendered(("user", _USER), opens=True, **options) if options else self._opened
        return opened.rpartition(_USER)[2]

    def awaits(self, prompt: Prompt, options: Mapping[str, Any] = _NONE) -> str | None:
        """Return the tag that closes the thinking in which a reply to this prompt begins.

        It is empty if the reply may begin with thinking, and None if the prompt has ended it.
        """
        if isinstance(prompt, Encoded):
            return prompt.awaits
        if isinstance(prompt, str):
            tail = prompt[-_TAIL:].rstrip()
        elif isinstance(last := prompt[-1], Message):
            opened = left_open(self._begins(options))
            if last.role != "assistant":
                return opened
            found = find_thinking(last.content, opened if last.written else "")
            return found.awaits or ("" if not found.end and begins_tag(last.content) else None)
        else:
            ids = [part for part in prompt[-_TAIL:] if isinstance(part, int) and 0 <= part < self._size]
            tail = self.backend.decode(ids, skip_special_tokens=False).rstrip()
        return left_open(tail) if tail.endswith(openings()) else ""

    def has_empty_thinking(self, options: Mapping[str, Any]) -> bool:
        """Return whether the chat template begins a reply with thinking that has ended."""
        return self._begins(options).rstrip().endswith(closings())

    def encode_prompt(self, prompt: Prompt, options: Mapping[str, Any] = _NONE) -> list[int]:
        """Return the token ids of a prompt; `options` are variables of the chat template.

        Raises RequestError for unknown ids, or if the template refuses.
        """
        if isinstance(prompt, str):
            return self._checked([*self._opening(), *self.encode(prompt, continues=False)])
        if isinstance(prompt, Encoded):
            return list(prompt)
        messages = [part for part in prompt if isinstance(part, Message)]
        if messages:
            return self._checked(self._encode_chat(messages, options))
        return self._checked([part for part in prompt if isinstance(part, int)])

    def encode(self, text: str, continues: bool = True) -> list[int]:
        """Return the token ids of plain text, by default as a continuation, without control tokens."""
        cuts = [0, *(match.start() + 1 for match in self._begins_control.finditer(text)), len(text)]
        pieces = [text[a:b] for a, b in pairwise(cuts)]
        ids = self._continuation(pieces[0]) if continues else self._ids(pieces[0])
        for piece in pieces[1:]:
            ids += self._continuation(piece)
        return self._checked(ids)

    def encode_control(self, text: str) -> list[int]:
        """Return the token ids of a text of ours, as a continuation, in which control tokens count."""
        return self._checked(self._continuation(text))

    def options_of(self, request: Request) -> dict[str, Any]:
        """Return the variables of the chat template for a request, with its switches of thinking."""
        if isinstance(request.prompt, Encoded):
            return {}
        scored = request.choices and request.answer_trigger is None
        thinking = request.sampling.thinking
        if not self.thinks and thinking.tokens and thinking.budget != "auto":
            self._tell("the model does not think, so thinking has no effect (think_tags names unusual tags)")
        for name in request.template_options.keys() - self._variables:
            self._tell(f"the chat template does not read {name!r}: it reads {', '.join(sorted(self._variables))}")
        options = {**switches(self._variables, _OFF if scored else thinking), **request.template_options}
        return options | ({"tools": [as_json(tool) for tool in request.tools]} if request.tools else {})

    def _tell(self, text: str) -> None:
        """Log a warning, once."""
        if text not in self._told:
            self._told.add(text)
            log.warning("%s", text)

    def encode_choices(self, request: Request) -> list[list[int]]:
        """Return the token ids of each choice, plus the end-of-turn token if `close_choices` is set."""
        closing: list[int] = []
        if request.close_choices:
            if (end := self.end_of(request)) is None:
                raise RequestError("close_choices needs an end-of-text token, and this tokenizer has none")
            closing = self._checked([end])
        return [self.encode(choice) + closing for choice in request.choices]

    def end_of(self, request: Request) -> int | None:
        """Return the token that ends a reply: the template's end of turn in a chat, else the end-of-text token."""
        chat = any(isinstance(part, Message) for part in request.prompt)
        end: int | None = self._turn_end if chat and self._turn_end is not None else self.tokenizer.eos_token_id
        return end

    def after_rationale(self, request: Request) -> int:
        """Return the maximum number of tokens after the rationale: trigger, and answer or choices."""
        choices = max(map(len, self.encode_choices(request)), default=0)
        if request.answer_trigger is None:
            return choices
        return len(self.encode(request.answer_trigger)) + (choices or request.answer_tokens)

    def decode(self, ids: Iterable[int]) -> str:
        runs = [(tag, list(run)) for tag, run in groupby(ids, self.tags.get)]
        return "".join(
            tag * len(run) if tag else self.backend.decode(run, skip_special_tokens=True) for tag, run in runs
        )

    def _ids(self, text: str) -> list[int]:
        try:
            # `encode` holds the GIL, for seconds on a long text; `encode_batch` releases it.
            ids: list[int] = self.backend.encode_batch([text], add_special_tokens=False)[0].ids
        except TypeError:  # half a surrogate pair, from a file read with the wrong error handler
            raise RequestError("the text is not valid Unicode: it holds a lone surrogate; read it as UTF-8") from None
        return ids

    def _checked(self, ids: list[int]) -> list[int]:
        """Return the ids if the model has an embedding for each. Raises RequestError."""
        for i in (min(ids, default=0), max(ids, default=0)):
            if not 0 <= i < self._size:
                known = len(self.tokenizer)
                if 0 <= i < known:
                    raise RequestError(
                        f"token id {i} ({self.tokenizer.convert_ids_to_tokens(i)}) has no row in the model's embedding "
                        f"of {self._size}, and the tokenizer has {known} tokens: load the model's own tokenizer"
                    )
                raise RequestError(f"token id {i} is outside the vocabulary of {known}: give ids below that")
        return ids

    def _continuation(self, text: str) -> list[int]:
        """Return the ids of text that follows other text, without the space that some tokenizers put first."""
        anchor = self._ids("\n")
        anchored = self._ids("\n" + text)
        return anchored[len(anchor) :] if anchored[: len(anchor)] == anchor else self._ids(text)

    def _opening(self) -> list[int]:
        """Return the ids that the tokenizer puts before any text (a begin-of-text token, or nothing)."""
        with_specials: list[int] = self.backend.encode("x", add_special_tokens=True).ids
        plain = self._ids("x")
        length = len(with_specials) - len(plain)
        for start in range(length + 1):
            if with_specials[start : start + len(plain)] == plain:
                return with_specials[:start]
        return []

    def _encode_chat(self, messages: Sequence[Message], options: Mapping[str, Any]) -> list[int]:
        """Encode messages with the chat template, using placeholders for control tokens that they spell out."""
        tools = options.get("tools")
        if messages[-1].tool_calls:
            raise RequestError("the last message has calls without results: add messages with the role tool")
        called = tools or any(message.tool_calls or message.role == "tool" for message in messages)
        if called and not self.calls.native:
            has_system = self._rendered(("system", _USER), ("user", "x")) or self.tokenizer.chat_template is None
            messages, tools = as_plain(messages, tools or (), "system" if has_system else "user"), None
        last = messages[-1]
        if self.tokenizer.chat_template is None:  # a base model: the messages are one text
            warn_of_no_template()
            text = "\n\n".join(message.content for message in messages)
            return [*self._opening(), *self._ids_with(last, text)] if last.written else self.encode_prompt(text)
        marker = secrets.token_hex(8)
        spelled: list[str] = []

        continues = last.role == "assistant"

        def placeholder(match: re.Match[str]) -> str:
            if continues and match.string is last.content and match[0] in self.tags.values():
                return match[0]  # the model's own thinking
            spelled.append(match[0])
            return f"{marker}{len(spelled) - 1}x"

        def fill(value: Any) -> Any:
            if isinstance(value, str):
                return self._spelled_out.sub(placeholder, value)
            if isinstance(value, list):
                return [fill(item) for item in value]
            return {fill(name): fill(item) for name, item in value.items()} if isinstance(value, dict) else value

        filled = [
            {name: value if name == "role" else fill(value) for name, value in turn.items()}
            for turn in as_dicts(messages)
        ]
        if continues and not last.content.strip():
            raise RequestError("the assistant's prefix is empty: leave the message out")
        # A template may change or refuse an unfinished message. So the prefix follows the rendered turns unchanged.
        turns, prefix = (filled[:-1], filled[-1]["content"]) if continues else (filled, "")
        try:
            about = {"tokenize": False, "add_generation_prompt": True, **options, "tools": fill(tools)}
            text = self.tokenizer.apply_chat_template(turns, **about)
        except Exception as error:  # templates may raise any error
            raise RequestError(f"the model's chat template refuses these messages: {error}") from error
        if continues and self.message_end is not None and not prefix.startswith(HARMONY):
            text += FINAL
        opened = left_open(self._begins(options)) if continues and not last.written else ""
        if opened and opened not in prefix:  # a prefix that the model did not write begins its answer
            text += end_of(opened, text)
        text += prefix
        if continues and last.written and not spelled:
            return self._ids_with(last, text)
        ids: list[int] = []
        for i, piece in enumerate(re.split(f"{marker}(\\d+)x", text)):
            ids += self.encode(spelled[int(piece)]) if i % 2 else self._continuation(piece) if i else self._ids(piece)
        return ids

    def _ids_with(self, last: Message, text: str) -> list[int]:
        """Return the ids of a text that ends with the content of `last`, reusing the tokens that the model drew."""
        ids: list[int] = []
        done, offset = 0, len(text) - len(last.content)
        if self._keeps_blanks and text.endswith(last.content):
            for start, tokens in last.written:
                begin = offset + start
                known = [*takewhile(self._is_text, tokens)]
                count, length = self.spelled(known, text[begin:]) if begin >= max(done, 1) else (0, 0)
                if count:
                    between = text[done:begin]
                    ids += self._continuation(between) if done else self._ids(between)
                    ids += tokens[:count]
                    done = begin + length
        return [*ids, *(self._continuation(text[done:]) if done else self._ids(text))]

    def _is_text(self, token: int) -> bool:
        return 0 <= token < self._size and (token not in self.special or token in self.tags)

    def spelled(self, tokens: Sequence[int], text: str) -> tuple[int, int]:
        """Return how many of the tokens spell a prefix of `text`, and the length of that prefix."""
        stream = TextStream(self)
        decoded, count, length = "", 0, 0
        for i, token in enumerate(tokens):
            decoded += (piece := stream.step(token)) or ""
            if not text.startswith(decoded):
                break
            if piece is not None:  # None: an unfinished character
                count, length = i + 1, len(decoded)
        return count, length

    def beginning(self, tokens: Sequence[int], text: str) -> list[int]:
        """Return the ids of a text with which the text of the tokens begins, as far as possible these tokens."""
        count, length = self.spelled(tokens, text)
        return [*tokens[:count], *(self.encode(text[length:]) if length < len(text) else [])]


class TextStream:
    """Decodes the tokens of one text as they arrive."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._stream: Any = DecodeStream(skip_special_tokens=True)

    def step(self, token: int) -> str | None:
        """Return the text that a token completes; None within a character."""
        if (tag := self._codec.tags.get(token)) is not None:
            self._stream = DecodeStream(skip_special_tokens=True)
            return tag
        piece: str | None = self._stream.step(self._codec.backend, token)
        return piece
