"""Convert completions to OpenAI's JSON: complete replies, stream chunks, usage and logprobs.

Additional fields: `tot` (decoder, seed), `parts` and `answer` of rationales, and, on request, `choice_logprobs`,
`token_ids`, `token_logprobs` and `finish`. `usage` also has the forward passes, the drafted, accepted, approximate and
undecoded tokens, and the reached draft positions.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import cache
from itertools import chain
from typing import Any

from tokenizers.decoders import DecodeStream

from tot.decoders.engine.sequence import ThinkingPiece
from tot.decoders.engine.text import TextCodec
from tot.decoders.request import Completion, Request, Usage
from tot.decoders.serving.protocol import ChatBody, TextBody
from tot.decoders.serving.scoring import Scored


class CompletionReply:
    """The reply to one HTTP request, with one id and one creation time for all of its chunks."""

    def __init__(self, body: ChatBody | TextBody, method: str, requests: Sequence[Request], codec: TextCodec) -> None:
        self._body = body
        self._requests = requests
        self._codec = codec
        self._chats = isinstance(body, ChatBody)
        self._opened: set[int] = set()
        self._object = "chat.completion" if self._chats else "text_completion"
        self._head = {
            "id": f"{'chatcmpl' if self._chats else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": body.model,
            "tot": {"decoder": method, "seed": requests[0].sampling.seed},
        }

    def whole(
        self,
        completions: Sequence[Sequence[Completion]],
        forwards: int,
        prompts: Sequence[Sequence[int]],
        scored: Sequence[Sequence[Scored]],
    ) -> dict[str, Any]:
        """Return the complete reply. `prompts` has the tokens of prompts that are echoed, `scored` the logprobs."""
        choices: list[dict[str, Any]] = []
        for i, samples in enumerate(completions):
            for sample, completion in enumerate(samples):
                choice = {"index": len(choices), **self._text(completion, i, prompts), **_finish(completion)}
                choice["logprobs"] = self._logprobs(scored[i][sample]) if scored else None
                choices.append(choice | self._extra_fields(completion))
        head = {**self._head, "object": self._object}
        return {**head, "choices": choices, "usage": usage(completions, forwards)}

    def piece(self, index: int, text: str) -> Iterator[dict[str, Any]]:
        """Yield the chunks of a piece of a choice's text. The first one opens a choice of a chat."""
        if self._chats and index not in self._opened:
            self._opened.add(index)
            yield self._chunk({"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None})
        thinks = isinstance(text, ThinkingPiece)
        if text and (self._chats or not thinks):
            content = {"delta": {"reasoning_content" if thinks else "content": text}} if self._chats else {"text": text}
            yield self._chunk({"index": index, **content, "finish_reason": None})

    def ending(self, index: int, completion: Completion) -> Iterator[dict[str, Any]]:
        """Yield the last chunks of a choice's stream: the finish reason and the additional fields."""
        yield from self.piece(index, "")  # opens an empty completion
        content: dict[str, Any] = {"delta": {}} if self._chats else {"text": ""}
        yield self._chunk({"index": index, **content, **_finish(completion), **self._extra_fields(completion)})

    def usage(self, completions: Sequence[Sequence[Completion]], forwards: int) -> dict[str, Any]:
        """Return the usage chunk, the last one if requested."""
        return {**self._chunk(None), "usage": usage(completions, forwards)}

    def _chunk(self, choice: dict[str, Any] | None) -> dict[str, Any]:
        kind = f"{self._object}.chunk" if self._chats else self._object
        return {**self._head, "object": kind, "choices": [] if choice is None else [{**choice, "logprobs": None}]}

    def _text(self, completion: Completion, i: int, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
        if not isinstance(self._body, TextBody):
            message = {"role": "assistant", "content": completion.text, "refusal": None}
            return {"message": message | ({"reasoning_content": completion.thinking} if completion.thinking else {})}
        if not self._body.echo:
            return {"text": completion.text}
        prompt = self._requests[i].prompt
        return {"text": (prompt if isinstance(prompt, str) else self._codec.decode(prompts[i])) + completion.text}

    def _extra_fields(self, completion: Completion) -> dict[str, Any]:
        """Return the fields of a choice that OpenAI's format does not have."""
        fields: dict[str, Any] = {}
        if self._body.return_token_ids:
            fields |= {"token_ids": completion.tokens, "token_logprobs": completion.logprobs}
            fields["finish"] = completion.finish_reason
        if completion.choice_logprobs:
            fields["choice_logprobs"] = [asdict(choice) for choice in completion.choice_logprobs]
        if len(completion.parts) > 1:
            fields |= {"parts": [asdict(part) for part in completion.parts], "answer": completion.answer}
        return fields

    def _logprobs(self, scored: Scored) -> dict[str, Any]:
        tops = scored.top or [[] for _ in scored.logprobs]
        if self._chats:
            rows = zip(scored.tokens, scored.logprobs, tops, strict=True)
            content = [
                {**self._entry(token, logprob), "top_logprobs": [self._entry(*one) for one in top]}
                for token, logprob, top in rows
            ]
            return {"content": content, "refusal": None}
        none = [None] * scored.unscored
        top = [{self._token_text(token): logprob for token, logprob in reversed(pairs)} for pairs in tops]
        return {
            "tokens": [self._token_text(token) for token in scored.tokens],
            "token_logprobs": [*none, *scored.logprobs],
            "top_logprobs": [*none, *top] if scored.top else None,
            "text_offset": list(self._offsets(scored.tokens)),
        }

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self._token_text(token), "logprob": logprob, "bytes": self._bytes_of(token)}

    def _bytes_of(self, token: int) -> list[int] | None:
        """Return a token's bytes, which may be a part of a character; None if they are unknown."""
        if (text := self._whole_text(token)) is not None:
            return list(text.encode())
        token_text = self._token_text(token)
        if byte := re.fullmatch("<0x([0-9A-Fa-f]{2})>", token_text):
            return [int(byte[1], 16)]
        known = _byte_of()
        return [known[character] for character in token_text] if known.keys() >= set(token_text) else None

    def _token_text(self, token: int) -> str:
        """Return a token as text, or its vocabulary entry if it is a part of a character."""
        text = self._whole_text(token)
        return str(self._codec.backend.id_to_token(token)) if text is None else text

    def _whole_text(self, token: int) -> str | None:
        """Return a token as text; None if it is a part of a character."""
        text: str = self._codec.backend.decode([token], skip_special_tokens=False)
        return None if "\ufffd" in text else text

    def _offsets(self, tokens: Sequence[int]) -> Iterator[int]:
        """Yield the number of characters before each token. Tokens that share a character share its offset."""
        stream: Any = DecodeStream(skip_special_tokens=True)
        length = 0
        for token in tokens:
            yield length
            length += len(stream.step(self._codec.backend, token) or "")


@cache
def _byte_of() -> dict[str, int]:
    """Return the byte for each character of a byte-level vocabulary: itself if it is printable, else the next free."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


def _finish(completion: Completion) -> dict[str, Any]:
    return {"finish_reason": "stop" if completion.finish_reason in ("eos", "stop") else "length"}


def usage(completions: Sequence[Sequence[Completion]], forwards: int) -> dict[str, Any]:
    """Return the usage of all completions of a reply; `forwards` counts shared forward passes once."""
    return usage_of(replace(sum((completion.usage for completion in chain(*completions)), Usage()), forwards=forwards))


def usage_of(total: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": total.prompt_tokens,
        "completion_tokens": total.new_tokens,
        "total_tokens": total.prompt_tokens + total.new_tokens,
        "prompt_tokens_details": {"cached_tokens": total.reused_prompt_tokens},
        "forwards": total.forwards,
        "drafted_tokens": total.drafted,
        "accepted_tokens": total.accepted,
        "reached_positions": total.reached,
        "approximate_tokens": total.approximate_tokens,
        "undecoded_tokens": total.undecoded_tokens,
    }
