"""What tests of SEED share: engines on copies of one target, and a drafter that keeps who asked for what.

Import mode is importlib, so these are fixtures: functions and classes.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tot.decoders import Completion, Engine, LocalDecoder, Request, Sampling, load_decoder, load_model
from tot.decoders.drafters import Context, Draft, LookupDrafter, ModelDrafter

LONG = "The sum of 10 and 11 is in the range on and on, and the other one: "


class Watched(LookupDrafter):
    """Looks up, and keeps who asked for what in which thread. Fails or waits where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[int, list[int]]] = []
        """(key, text), draft by draft."""
        self.ended: list[int] = []
        self.threads: set[str] = set()
        self.fails = False
        self.go_on = threading.Event()
        self.go_on.set()
        self.closed = False

    def draft(self, contexts: Sequence[Context], outlook: Any = None) -> list[Draft]:
        self.threads.add(threading.current_thread().name)
        self.asked += [(context.key, list(context.tokens)) for context in contexts]
        self.go_on.wait(30)
        if self.fails:
            raise ZeroDivisionError("no draft today")
        return super().draft(contexts, outlook)

    def end(self, key: int) -> None:
        self.threads.add(threading.current_thread().name)
        self.ended.append(key)
        super().end(key)

    def close(self) -> None:
        self.closed = True


@dataclass
class Bench:
    """One target; engines on copies of it. All slots must be free at the end, a draft's too."""

    target: Any
    tokenizer: Any
    engines: list[Engine] = field(default_factory=list)
    drafters: list[ModelDrafter] = field(default_factory=list)
    decoders: list[LocalDecoder] = field(default_factory=list)

    def engine(self, kv_budget: int = 4000) -> Engine:
        self.engines.append(Engine(load_model(copy.deepcopy(self.target), tokenizer=self.tokenizer), kv_budget))
        return self.engines[-1]

    def model_drafter(self, noise: float = 0.0) -> ModelDrafter:
        """Drafts with the target itself, or with what some noise leaves of it."""
        model = copy.deepcopy(self.target)
        generator = torch.Generator().manual_seed(5)
        for weight in model.parameters():
            weight.data = weight + torch.randn(weight.shape, generator=generator) * noise
        self.drafters.append(ModelDrafter(load_model(model, tokenizer=self.tokenizer), 4000))
        return self.drafters[-1]

    def seed(self, draft: Any = None, engine: Engine | None = None, **options: Any) -> LocalDecoder:
        decoder = load_decoder("seed", engine=engine or self.engine(), draft=draft, **options)
        self.decoders.append(decoder)
        return decoder

    def expected(self, requests: Sequence[Request]) -> list[tuple[int, ...]]:
        return [completion.tokens for completion in load_decoder(engine=self.engine()).generate(requests)]

    def close(self) -> None:
        for engine in self.engines:
            engine.close()
            assert engine.tree.live == 0
        for decoder in self.decoders:
            decoder.close()
        for drafter in self.drafters:
            assert drafter.runner.tree.live == 0


@pytest.fixture
def bench(make_model: Callable[..., Any], tokenizer: Any) -> Iterator[Bench]:
    made = Bench(make_model(readable=True), tokenizer)
    yield made
    made.close()


def plain(prompt: str = "abc", **settings: Any) -> Request:
    return Request(prompt=prompt, sampling=Sampling(**{"ignore_eos": True, **settings}))


def branches(count: int, tokens: int = 20) -> list[Request]:
    return [plain(LONG + str(i), max_tokens=tokens, temperature=0.6, seed=i) for i in range(count)]


def results(handles: Sequence[Any]) -> list[Completion]:
    return [completion for handle in handles for completion in handle.result(30)]


@pytest.fixture(name="watching")
def _watching() -> type[Watched]:
    return Watched


@pytest.fixture(name="plain")
def _plain() -> Callable[..., Request]:
    return plain


@pytest.fixture(name="branches")
def _branches() -> Callable[..., list[Request]]:
    return branches


@pytest.fixture(name="results")
def _results() -> Callable[..., list[Completion]]:
    return results
