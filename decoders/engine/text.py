"""Text to token ids and back: prompts, chat templates, continuations, and which tokens end a text.

Text is data. A control token written out in it ("<|im_end|>" in a user's question) is encoded as the characters it
consists of; only the chat template's own control tokens are control tokens. Other added tokens ("<table>") are text.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from tokenizers.decoders import DecodeStream

from tot.decoders.errors import ModelError, RequestError
from tot.decoders.models.model_names import warn_of_no_template
from tot.decoders.request import Message, Request


class TextCodec:
    """Encodes prompts and decodes outputs for one tokenizer, and a model of so many embedding `rows`; safe to share
    between threads. No token without a row is ever encoded: RequestError says which."""

    def __init__(self, tokenizer: Any, generation_config: Any = None, rows: int | None = None) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ModelError(
                f"{type(tokenizer).__name__} has no fast backend: save the tokenizer with a tokenizer.json beside it"
            )
        self.tokenizer = tokenizer
        self.backend = backend
        self._size = len(tokenizer) if rows is None else min(len(tokenizer), rows)
        listed = getattr(generation_config, "eos_token_id", None)
        ends = [listed] if isinstance(listed, int) else list(listed or ())
        if tokenizer.eos_token_id is not None:
            ends.append(tokenizer.eos_token_id)
        self._added: dict[int, str] = {i: token.content for i, token in tokenizer.added_tokens_decoder.items()}
        self._turn_end = self._find_turn_end()
        self.end_ids = frozenset(ends if self._turn_end is None else [*ends, self._turn_end])
        """Tokens that end a text."""
        special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._special = self.end_ids | special | self._markers()
        # Longest first. Some tokenizers add runs of blanks as control tokens: those are text.
        contents = (content for i, content in self._added.items() if i in self._special)
        written = sorted(filter(str.strip, contents), key=len, reverse=True)
        any_control = "|".join(map(re.escape, written)) or r"(?!)"
        self._spelled_out = re.compile(any_control)
        self._begins_control = re.compile(f"(?={any_control})")  # finds overlapping ones too
        # Other tokenizers drop the blank that a text begins with: what their tokens spell inside of one can't be told.
        self._spells = self._spelled(self._continuation(" x"), " x")[1] == 2

    def _rendered(self, *turns: tuple[str, str], opens: bool = False) -> str:
        """What the chat template makes of (role, content) turns; "" if there is none, or it refuses them."""
        messages = [{"role": role, "content": content} for role, content in turns]
        try:
            text: str = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=opens)
        except Exception:  # templates raise whatever they like; a request that meets it gets an error  # noqa: BLE001
            return ""
        return text

    def _find_turn_end(self) -> int | None:
        """The token that the chat template puts after an assistant's text, if it is one token of the vocabulary."""
        said = secrets.token_hex(8)
        turns = (("user", "x"), ("assistant", said))
        for text in (self._rendered(*turns), self._rendered(*turns, ("user", "x"))):
            after = text.rpartition(said)[2].lstrip() if said in text else ""
            ends = [i for i, content in self._added.items() if content.strip() and after.startswith(content)]
            if ends:
                return max(ends, key=lambda i: len(self._added[i]))
        return None

    def _markers(self) -> set[int]:
        """Tokens by which the chat template marks turns, also those that the tokenizer does not call special."""
        text = self._rendered(("user", "x"), opens=True)
        return {i for i, content in self._added.items() if content.strip() and content in text}

    def encode_prompt(self, prompt: str | Sequence[Message] | Sequence[int]) -> list[int]:
        """Token ids of a prompt. Raises RequestError for ids outside the vocabulary, or if the template refuses."""
        if isinstance(prompt, str):
            return self._checked([*self._opening(), *self.encode(prompt, continues=False)])
        messages = [part for part in prompt if isinstance(part, Message)]
        if messages:
            return self._checked(self._encode_chat(messages))
        return self._checked([part for part in prompt if isinstance(part, int)])

    def encode(self, text: str, continues: bool = True) -> list[int]:
        """Token ids of plain text, by default as a continuation; no control tokens, whatever it says."""
        cuts = [0, *(match.start() + 1 for match in self._begins_control.finditer(text)), len(text)]
        pieces = [text[a:b] for a, b in pairwise(cuts)]
        ids = self._continuation(pieces[0]) if continues else self._ids(pieces[0])
        for piece in pieces[1:]:
            ids += self._continuation(piece)
        return self._checked(ids)

    def encode_choices(self, request: Request) -> list[list[int]]:
        """The continuations a request wants scored, closed by the end-of-turn token if it says so."""
        closing: list[int] = []
        if request.close_choices:
            if (end := self.end_of(request)) is None:
                raise RequestError("close_choices needs an end-of-text token, and this tokenizer has none")
            closing = self._checked([end])
        return [self.encode(choice) + closing for choice in request.choices]

    def end_of(self, request: Request) -> int | None:
        """The token that ends a reply: in a chat as the template ends it, else the tokenizer's end of text, if any."""
        chat = any(isinstance(part, Message) for part in request.prompt)
        end: int | None = self._turn_end if chat and self._turn_end is not None else self.tokenizer.eos_token_id
        return end

    def after_rationale(self, request: Request) -> int:
        """The most tokens that come after the text decoded first: trigger, answer or choices."""
        choices = max(map(len, self.encode_choices(request)), default=0)
        if request.answer_trigger is None:
            return choices
        return len(self.encode(request.answer_trigger)) + (choices or request.answer_tokens)

    def decode(self, ids: Iterable[int]) -> str:
        text: str = self.backend.decode(list(ids), skip_special_tokens=True)
        return text

    def _ids(self, text: str) -> list[int]:
        try:
            # `encode` holds the interpreter's lock, for seconds of a long text; a batch does not.
            ids: list[int] = self.backend.encode_batch([text], add_special_tokens=False)[0].ids
        except TypeError:  # half a surrogate pair, from a file read with the wrong error handler
            raise RequestError("the text is not valid Unicode: it holds a lone surrogate; read it as UTF-8") from None
        return ids

    def _checked(self, ids: list[int]) -> list[int]:
        """The same, if the model has an embedding for each."""
        for i in (min(ids, default=0), max(ids, default=0)):
            if not 0 <= i < self._size:
                known = len(self.tokenizer)
                if 0 <= i < known:
                    raise RequestError(
                        f"token id {i} ({self.tokenizer.convert_ids_to_tokens(i)}) has no row in the model's embedding "
                        f"of {self._size}, and its tokenizer has {known} tokens: load the tokenizer that belongs to it"
                    )
                raise RequestError(f"token id {i} is outside the vocabulary of {known}: give ids below that")
        return ids

    def _continuation(self, text: str) -> list[int]:
        """Ids of text that follows other text: tokenizers that begin every text with a space must not do so here."""
        anchor = self._ids("\n")
        anchored = self._ids("\n" + text)
        return anchored[len(anchor) :] if anchored[: len(anchor)] == anchor else self._ids(text)

    def _opening(self) -> list[int]:
        """What the tokenizer puts before any text (a begin-of-text token, or nothing)."""
        with_specials: list[int] = self.backend.encode("x", add_special_tokens=True).ids
        plain = self._ids("x")
        length = len(with_specials) - len(plain)
        for at in range(length + 1):
            if with_specials[at : at + len(plain)] == plain:
                return with_specials[:at]
        return []

    def _encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """The chat template, filled in with stand-ins for every control token that a message spells out."""
        last = messages[-1]
        if self.tokenizer.chat_template is None:  # a base model: the messages are one text
            warn_of_no_template()
            text = "\n\n".join(message.content for message in messages)
            return [*self._opening(), *self._ids_with(last, text)] if last.written else self.encode_prompt(text)
        mark = secrets.token_hex(8)
        spelled: list[str] = []

        def stand_in(match: re.Match[str]) -> str:
            spelled.append(match[0])
            return f"{mark}{len(spelled) - 1}x"

        filled = [{"role": m.role, "content": self._spelled_out.sub(stand_in, m.content)} for m in messages]
        goes_on = last.role == "assistant"
        if goes_on and not last.content.strip():
            raise RequestError("the assistant's prefix is empty: leave the message out")
        # A template would change a message that is not done, or refuse it: it comes as the model writes it, after what
        # the template says before.
        before, begun = (filled[:-1], filled[-1]["content"]) if goes_on else (filled, "")
        try:
            text = self.tokenizer.apply_chat_template(before, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates raise whatever they like
            raise RequestError(f"the model's chat template refuses these messages: {error}") from error
        text += begun
        if goes_on and last.written and not spelled:
            return self._ids_with(last, text)
        ids: list[int] = []
        for i, piece in enumerate(re.split(f"{mark}(\\d+)x", text)):
            ids += self.encode(spelled[int(piece)]) if i % 2 else self._continuation(piece) if i else self._ids(piece)
        return ids

    def _ids_with(self, last: Message, text: str) -> list[int]:
        """Ids of a text that ends with the content of `last`, of which the tokens that the model drew are kept."""
        ids: list[int] = []
        done, offset = 0, len(text) - len(last.content)
        if self._spells and text.endswith(last.content):
            for start, tokens in last.written:
                begin = offset + start
                kept, length = self._spelled(tokens, text[begin:]) if begin >= max(done, 1) else (0, 0)
                if kept:
                    between = text[done:begin]
                    ids += self._continuation(between) if done else self._ids(between)
                    ids += tokens[:kept]
                    done = begin + length
        return [*ids, *(self._continuation(text[done:]) if done else self._ids(text))]

    def _spelled(self, tokens: Sequence[int], text: str) -> tuple[int, int]:
        """How many of the tokens spell a beginning of `text`, and how many characters of it."""
        stream: Any = DecodeStream(skip_special_tokens=True)
        said, kept, length = "", 0, 0
        for i, token in enumerate(tokens):
            if token in self._special or not 0 <= token < self._size:
                break
            said += (piece := stream.step(self.backend, token)) or ""
            if not text.startswith(said):
                break
            if piece is not None:  # else it is the beginning of a character
                kept, length = i + 1, len(said)
        return kept, length
