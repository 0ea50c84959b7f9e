"""Helpers for the engine's tests: decoders on engines of any size, and the reference output of the unmodified model.

pytest imports with `importlib`, so tests get these functions and classes as fixtures.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from tot.decoders import Completion, Engine, LocalDecoder, Request, Sampling, load_decoder, load_model
from tot.decoders.engine.sampling import Draw, read
from tot.decoders.engine.sequence import Call, Handle

Serve = Callable[..., LocalDecoder]


@pytest.fixture
def model(make_model: Callable[..., Any]) -> Any:
    """A tiny Llama that writes readable text."""
    return make_model(readable=True)


@pytest.fixture
def serve(model: Any, tokenizer: Any) -> Iterator[Serve]:
    """Create decoders on engines of any size. After the test, every slot must be free again."""
    engines: list[Engine] = []

    def start(model: Any = model, kv_budget: int = 3000, chunk: int = 512) -> LocalDecoder:
        loaded = load_model(copy.deepcopy(model), tokenizer=tokenizer)
        engines.append(Engine(loaded, kv_budget, chunk))
        return load_decoder("ar", engine=engines[-1])

    yield start
    for engine in engines:
        engine.close()
        assert engine.cache.live == 0


@pytest.fixture
def decoder(serve: Serve) -> LocalDecoder:
    return serve()


class Alone:
    """The expected result of a request: each token from the unmodified model, run over the whole text so far."""

    def __init__(self, model: Any, decoder: LocalDecoder, logits_alone: Callable[..., Tensor]) -> None:
        self._model = copy.deepcopy(model)
        self._codec = decoder.engine.codec
        self._run = logits_alone

    def logprobs(self, ids: Sequence[int]) -> Tensor:
        return self._run(self._model, list(ids)).log_softmax(-1)

    def total(self, context: Sequence[int], ids: Sequence[int]) -> float:
        """Return the log-probability of ids after the context."""
        rows = self.logprobs([*context, *ids])[len(context) - 1 : -1]
        return float(rows[range(len(ids)), list(ids)].sum())

    def tokens(
        self, context: Sequence[int], sampling: Sampling, count: int, sample: int = 0, first: int = 0
    ) -> list[int]:
        """Return up to `count` tokens after the context, up to an end token, ignoring stop strings."""
        s, drawn = sampling, list[int]()
        for position in range(first, first + count):
            how = (s.temperature, s.top_k, s.top_p, s.min_p, s.seed, sample, position)
            drawn.append(read(self._run(self._model, [*context, *drawn])[-1:], [Draw(*how)])[0].token)
            if drawn[-1] in self._codec.end_ids and not s.ignore_eos:
                break
        return drawn


@pytest.fixture
def alone(model: Any, decoder: LocalDecoder, logits_alone: Callable[..., Tensor]) -> Alone:
    return Alone(model, decoder, logits_alone)


class Score(float):
    """A sum of log-probabilities, compared with a tolerance for float32 differences between forward shapes."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, float) and abs(float(self) - float(other)) < 1e-3

    __hash__ = float.__hash__


def outcome(completion: Completion) -> tuple[Any, ...]:
    """Return everything that must not depend on the other requests of a batch."""
    scores = [(Score(choice.total), choice.tokens) for choice in completion.choice_logprobs]
    drawn = (completion.tokens, Score(completion.logprob))
    return completion.text, drawn, completion.finish_reason, completion.parts, scores


def by_request(requests: Sequence[Request], completions: Sequence[Completion]) -> list[list[tuple[Any, ...]]]:
    rest = iter(completions)
    return [[outcome(next(rest)) for _ in range(request.sampling.n)] for request in requests]


def greedy(decoder: LocalDecoder, prompt: str = "abc", **settings: Any) -> Completion:
    return decoder.generate([Request(prompt=prompt, sampling=Sampling(**settings))])[0]


def submit(engine: Engine, requests: Sequence[Request], *policies: Any, stream: bool = False) -> list[Handle]:
    """Queue requests together. The last policy is for all further requests."""
    given = [*policies, *[policies[-1]] * (len(requests) - len(policies))]
    calls = [Call(*pair, Handle(engine.wake, stream)) for pair in zip(requests, given, strict=True)]
    engine.submit(calls)
    return [call.handle for call in calls]


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.fixture
def helpers(mixed_requests: Callable[..., list[Request]]) -> Any:
    """The functions above."""
    return SimpleNamespace(
        outcome=outcome,
        by_request=by_request,
        mixed_requests=mixed_requests,
        greedy=greedy,
        submit=submit,
        wait_until=wait_until,
    )
