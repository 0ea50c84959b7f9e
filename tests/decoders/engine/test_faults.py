"""The engine: a failure affects only its own request."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from tot.decoders import Engine, LocalDecoder, ModelError, Request, Sampling, load_model
from tot.decoders.engine.runner import Chunk
from tot.decoders.engine.sampling import Sampled
from tot.decoders.engine.sequence import Job
from tot.decoders.methods.autoregressive import Autoregressive

LONG = "The sum of 10 and 11 is in the range on and on, and the other one: " * 4


class Faulty(Autoregressive):
    """A policy that decodes, and fails in its third step."""

    def __init__(self, job: Job, where: str) -> None:
        super().__init__(job)
        self._where = where
        self._steps = 0

    def propose(self) -> list[Chunk]:
        self._steps += 1
        chunks = super().propose()
        if self._where == "propose" and self._steps == 3:
            raise ZeroDivisionError("a fault of mine")
        return chunks

    def commit(self, reads: list[list[Sampled]]) -> None:
        super().commit(reads)
        if self._where == "commit" and self._steps == 3:
            raise ZeroDivisionError("a fault of mine")


@pytest.mark.parametrize("where", ["propose", "commit"])
def test_a_fault_in_a_policy_fails_its_request_only(helpers: Any, decoder: LocalDecoder, where: str) -> None:
    engine = decoder.engine
    request = Request(prompt=LONG, sampling=Sampling(max_tokens=12, temperature=1.0, n=2))
    expected = [helpers.outcome(one) for one in decoder.generate([request])]
    policies = [Autoregressive, partial(Faulty, where=where), Autoregressive]
    sound, faulty, also_sound = helpers.submit(engine, [request] * 3, *policies, stream=True)
    with pytest.raises(ModelError, match="decoding failed: ZeroDivisionError: a fault of mine"):
        faulty.result(30)
    with pytest.raises(ModelError, match="a fault of mine"):
        list(faulty)
    assert [helpers.outcome(one) for one in sound.result(30)] == expected
    assert [helpers.outcome(one) for one in also_sound.result(30)] == expected
    helpers.wait_until(lambda: engine.cache.live == 0)
    assert [helpers.outcome(one) for one in decoder.generate([request])] == expected


def test_a_failed_forward_fails_its_step_and_not_the_engine(
    helpers: Any, decoder: LocalDecoder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    request = Request(prompt="abc", sampling=Sampling(max_tokens=5))
    expected = helpers.outcome(decoder.generate([request])[0])

    def no_memory(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no memory left")

    with monkeypatch.context() as patch:
        patch.setattr(decoder.engine.runner.backend, "forward", no_memory)
        for handle in decoder.submit([request, request]):
            with pytest.raises(ModelError, match="OutOfMemoryError: no memory left"):
                handle.result(30)
    assert "a forward pass failed" in caplog.text
    assert helpers.outcome(decoder.generate([request])[0]) == expected


class Mismatched(Autoregressive):
    """A policy whose output cannot become a completion: a log-probability is missing."""

    def commit(self, reads: list[list[Sampled]]) -> None:
        super().commit(reads)
        output = self._job.outputs[0]
        if len(output.tokens) > 1:
            output.logprobs[-1] = None  # type: ignore[call-overload]


class Exiting(Autoregressive):
    def commit(self, reads: list[list[Sampled]]) -> None:
        raise SystemExit(1)


@pytest.mark.parametrize("end", ["length", "cancelled"])
def test_a_fault_in_the_completions_reaches_the_caller(helpers: Any, decoder: LocalDecoder, end: str) -> None:
    request = Request(prompt="abc", sampling=Sampling(max_tokens=5 if end == "length" else 700, ignore_eos=True))
    expected = [helpers.outcome(one) for one in decoder.generate([Request(prompt=LONG)])]
    (handle,) = helpers.submit(decoder.engine, [request], Mismatched, stream=True)
    pieces = iter(handle)
    next(pieces), next(pieces)
    if end == "cancelled":
        handle.cancel()
    with pytest.raises(ModelError, match="decoding failed: TypeError: must be real number, not NoneType"):
        handle.result(30)
    with pytest.raises(ModelError, match="decoding failed"):
        list(pieces)
    assert decoder.engine.cache.live == 0
    assert [helpers.outcome(one) for one in decoder.generate([Request(prompt=LONG)])] == expected


def test_a_call_that_exits_raises_at_the_caller(decoder: LocalDecoder) -> None:
    def leave() -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        decoder.engine.call(leave)
    assert decoder.generate([Request(prompt="abc")])[0].tokens


class Ruinous(Autoregressive):
    """A policy that fails at the point where the engine loses track of who owns which slots."""

    def release(self) -> None:
        raise ZeroDivisionError("slots lost")


@pytest.mark.parametrize(("policy", "reason"), [(Exiting, "SystemExit: 1"), (Ruinous, "ZeroDivisionError: slots lost")])
def test_a_failed_engine_fails_its_waiting_requests(
    helpers: Any, model: Any, tokenizer: Any, policy: Any, reason: str
) -> None:
    tokens = torch.tensor([[5, 6, 7]])
    before = model(tokens).logits
    engine = Engine(load_model(model, tokenizer=tokenizer), 1000)
    requests = [Request(prompt=p, sampling=Sampling(max_tokens=n, ignore_eos=True)) for p, n in (("a", 3), ("b", 700))]
    waiting = Request(prompt="c", sampling=Sampling(max_tokens=700))
    handles = helpers.submit(engine, [*requests, waiting], policy, Autoregressive, stream=True)
    for handle in handles:
        with pytest.raises(ModelError, match=rf"engine has failed \({reason}\): make a new one"):
            handle.result(30)
    with pytest.raises(ModelError, match="engine has failed"):
        helpers.submit(engine, requests[:1], Autoregressive)
    engine.close()
    assert torch.equal(model(tokens).logits, before)
