"""Grammars of constraints: compile them for a tokenizer with llguidance, and follow them along a text."""

from __future__ import annotations

import json
import re
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from tot.decoders.constraint import Constraint
from tot.decoders.engine.text import TextCodec
from tot.decoders.errors import RequestError
from tot.decoders.models.shapes import Array

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions  # exists in the stubs only

_CACHED = 64
"""Compiled grammars that are kept."""
_MAX_SIZE = 2**20
"""Maximum number of characters of a constraint; compiling takes up to 0.4 seconds for it."""
_LIMITS = LLParserLimits(step_max_items=2000, verbose_errors=False)
"""An ambiguous grammar takes more items in each step, up to this number, instead of delaying all requests."""
_FORM: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Grammars:
    """Compiles constraints for the tokens of a codec, and keeps the last ones. Thread-safe."""

    def __init__(self, codec: TextCodec, vocabulary: int) -> None:
        """`vocabulary`: number of logits of a row."""
        self._codec = codec
        self._vocabulary = max(vocabulary, len(codec.tokenizer))
        self._compiled = lru_cache(_CACHED)(self._compile)

    def matcher(self, constraint: Constraint) -> Matcher:
        """Return the state at the beginning of a text. Raises RequestError if no text can meet the constraint."""
        given = constraint.model_dump_json(exclude_none=True)
        if len(given) > _MAX_SIZE:
            raise RequestError(
                f"{_short(given)} has {len(given):,} characters, and the limit is {_MAX_SIZE:,}: simplify it"
            )
        return self._compiled(given).fork()

    def _compile(self, given: str) -> Matcher:
        constraint = Constraint.model_validate_json(given)
        state = LLMatcher(self._tokenizer, _grammar(constraint), log_level=0, limits=_LIMITS)
        matcher = Matcher(state, self._ends, given)
        matcher.mask  # noqa: B018  # raises if no text meets it
        return matcher

    @cached_property
    def _ends(self) -> Array:
        """The mask of the end tokens."""
        bits = np.zeros((self._vocabulary + 31) // 32 * 32, np.uint8)
        bits[list(self._codec.end_ids)] = 1
        ends: Array = np.packbits(bits, bitorder="little").view("<u4")
        return ends

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        if not self._codec.end_ids:
            raise RequestError("a constraint needs an end-of-text token, and this tokenizer has none")
        content = json.loads(self._codec.backend.to_str())
        content |= {"padding": None, "truncation": None, "post_processor": None}
        # Control tokens get names that no text has, so that the text "<|im_end|>" is never one of them. To llguidance,
        # all added tokens in angle brackets are control tokens.
        names = {}
        for token in content["added_tokens"]:
            if token["id"] in self._codec.special or re.fullmatch(r"<.*>", token["content"], re.DOTALL):
                names[token["content"]] = token["content"] = f"\N{NULL}{token['id']}"
                token["special"] = True
        vocabulary = content["model"].get("vocab")
        if isinstance(vocabulary, dict):
            content["model"]["vocab"] = {names.get(name, name): i for name, i in vocabulary.items()}
        elif vocabulary is not None:
            content["model"]["vocab"] = [[names.get(name, name), score] for name, score in vocabulary]
        if (unknown := content["model"].get("unk_token")) in names:
            content["model"]["unk_token"] = names[unknown]
        try:
            return LLTokenizer(json.dumps(content), self._vocabulary, sorted(self._codec.end_ids))
        except ValueError as error:
            raise RequestError(f"llguidance can't read this tokenizer ({error}): leave the constraint out") from None


def _grammar(constraint: Constraint) -> str:
    if constraint.choices is not None:
        return LLMatcher.grammar_from_regex("|".join(map(re.escape, constraint.choices)))
    if constraint.regex is not None:
        return LLMatcher.grammar_from_regex(constraint.regex)
    if constraint.lark is not None:
        return LLMatcher.grammar_from_lark(constraint.lark)
    return LLMatcher.grammar_from_json_schema(dict(constraint.json_schema or {}), defaults=_FORM)


def _short(given: str) -> str:
    return f"the constraint {given if len(given) <= 100 else f'{given[:97]}...'}"


def _reason(error: str) -> str:
    """Return an error of llguidance on one line, with a remedy."""
    error = " ".join(error.removesuffix("<non-verbose/>").split())
    if error == "NoExtensionBias":
        return "no text meets it: correct it"
    return f"{error[:200]}: {'simplify' if 'too' in error.lower() else 'correct'} it"


class Matcher:
    """The state of a constraint after the tokens of a text."""

    def __init__(self, state: LLMatcher, ends: Array, given: str) -> None:
        self._state, self._ends, self._given = state, ends, given
        self._mask: Array | None = None

    def fork(self) -> Matcher:
        fork = Matcher(self._state.deep_copy(), self._ends, self._given)
        fork._mask = self._mask
        return fork

    def advance(self, token: int) -> None:
        """Append a token, which the mask allows."""
        self._state.consume_token(token)
        self._mask = None

    @property
    def mask(self) -> Array:
        """The tokens that may follow, as in `Draw`. Raises RequestError if that takes too long, or none may."""
        if self._mask is None:
            mask = np.empty(len(self._ends), np.uint32)
            self._state.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if self._state.is_error():
                raise RequestError(f"{_short(self._given)} cannot be used: {_reason(self._state.get_error())}")
            self._mask = mask
        return self._mask

    def allows(self, token: int) -> bool:
        """Return whether a token may follow."""
        return bool(self.mask[token >> 5] >> (token & 31) & 1)

    @property
    def complete(self) -> bool:
        """Whether the text can only end."""
        return not (self.mask & ~self._ends).any()

    @property
    def forced(self) -> int | None:
        """The only token that may follow, if there is one."""
        (words,) = self.mask.nonzero()
        if len(words) != 1 or (word := int(self.mask[words[0]])).bit_count() != 1:
            return None
        return int(words[0]) * 32 + word.bit_length() - 1
