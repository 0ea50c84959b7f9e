"""A model of lm-eval: `python -m tot.evaluation.lm_eval_model --model tot --tasks gsm8k --apply_chat_template`."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import wait
from contextlib import ExitStack
from functools import partial
from typing import Any

from lm_eval.__main__ import cli_evaluate
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs

from tot.decoders.decoder import LocalDecoder
from tot.decoders.engine.engine import Engine
from tot.decoders.engine.sequence import Call, Handle
from tot.decoders.engine.text import TextCodec
from tot.decoders.errors import ContextError, OptionError, TotError
from tot.decoders.remote.loop import together
from tot.decoders.request import Message, Request, before_stop
from tot.decoders.serving.logprobs import Scored, TextScoring
from tot.evaluation.harness import answer, search_of
from tot.llm.decoders import open_decoders
from tot.running import run_to_end
from tot.task.task import answer_text

_SEARCHES, _TEXTS = 16, 128
"""How many searches run at the same time, and how many continuations are scored."""


class _Chat(str):
    """Messages as JSON: lm-eval passes each context on as text."""

    @property
    def messages(self) -> tuple[Message, ...]:
        return tuple(Message(role=one["role"], content=one["content"]) for one in json.loads(self))


@register_model("tot")
class TotLM(LM):  # type: ignore[misc]
    """Generates with searches, and scores with the model alone.

    Without `apply_chat_template`, the context of a generation is a question. A request sets the temperature if it
    samples; otherwise it is the model's own, and 0 for search=cot.
    """

    tokenizer_name = "tot"  # the contexts do not depend on the tokenizer

    def __init__(
        self, task: str = "ask", device: str | None = None, batch_size: Any = 1, max_batch_size: Any = 1, **options: Any
    ) -> None:
        """`options` are fields of `SearchConfig`. The sizes of batches are ignored. Raises TotError."""
        super().__init__()
        on = {} if device in (None, "cuda:0") else {"device": device}  # lm-eval's default, also without a GPU
        self._task, self._config = search_of(task, {**options, **on})
        self._temperature = options.get("temperature", 0.0 if options.get("search") == "cot" else None)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return _Chat(json.dumps(chat_history))

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the answer of one search per request, up to its first stop string. Repeats have different seeds."""
        repeats, free = Counter[str](), asyncio.Semaphore(_SEARCHES)

        async def respond(context: str, given: dict[str, Any], repeat: int) -> str:
            until, sampled, limit = (given.pop(name) for name in ("until", "do_sample", "max_gen_toks"))
            temperature = given.pop("temperature", None) if sampled else self._temperature
            own = {"seed": self._config.seed + repeat, "max_tokens": limit, "temperature": temperature}
            messages = getattr(context, "messages", None) or (Message(role="user", content=context),)
            async with free:
                solution = await answer(self._task, self._config, messages, {**given, **own})
            return before_stop("" if solution.answer is None else answer_text(solution.answer), filter(None, until))

        works = []
        for context, given in (request.args for request in requests):
            works.append(partial(respond, context, normalize_gen_kwargs(given), repeats[context]))
            repeats[context] += 1
        return run_to_end(together(works))

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return the logprob (nats) of each continuation, and whether all its tokens are the most likely ones."""
        return self._scores([request.args for request in requests])

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the logprob (nats) of each text. Raises ContextError for a text longer than the model's context."""
        return [score for score, _ in self._scores([("", *request.args) for request in requests])]

    def _scores(self, texts: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        with ExitStack() as stack:
            decoder = open_decoders(self._config.model, stack).get("evaluate")
            if not isinstance(decoder, LocalDecoder):
                raise OptionError(f"{type(decoder).__name__} scores no continuations: give model=NAME of a local model")
            batches = [texts[start : start + _TEXTS] for start in range(0, len(texts), _TEXTS)]
            return [score for batch in batches for score in _score(decoder.engine, batch)]


def _score(engine: Engine, texts: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
    scored, calls = list[Scored](), list[Call]()
    for context, continuation in texts:
        head, ids = _encode(engine.codec, context, continuation)
        if len(ids) > engine.runner.context:
            raise ContextError(f"a text has {len(ids)} tokens, the context holds {engine.runner.context}: shorten it")
        scored.append(Scored(ids, len(head)))
        if len(ids) > len(head):
            request, policy = Request(prompt=tuple(head)), partial(TextScoring, text=scored[-1], top=1)
            calls.append(Call(request, policy, Handle(engine.wake, stream=False)))
    engine.submit(calls)
    try:
        for call in calls:
            call.handle.result()
    finally:  # Ctrl-C
        for call in calls:
            call.handle.cancel()
        wait([call.handle.future for call in calls])
    best = [[top[0][0] for top in one.top] for one in scored]
    return [(sum(one.logprobs), one.tokens[one.unscored :] == top) for one, top in zip(scored, best, strict=True)]


def _encode(codec: TextCodec, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Return the tokens of the context, and of both. As in lm-eval, blanks between them belong to the continuation."""
    if messages := getattr(context, "messages", None):
        head = codec.encode_prompt(messages, codec.options_of(Request(prompt=messages, choices=("?",))))
        return head, [*head, *codec.encode(continuation)]
    if body := context.rstrip():
        head = codec.encode_prompt(body)
        return head, [*head, *codec.encode_prompt(context + continuation)[len(head) :]]
    start = codec.tokenizer.eos_token_id if codec.tokenizer.bos_token_id is None else codec.tokenizer.bos_token_id
    return [start], [start, *codec.encode(context + continuation, continues=False)]


if __name__ == "__main__":
    try:
        cli_evaluate()
    except (TotError, KeyboardInterrupt) as error:
        sys.exit(f"tot: {error}" if isinstance(error, TotError) else 130)
