"""Decoding methods by name: each is found, and a policy can be added under a new name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from types import SimpleNamespace
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, ConfigDict, Field

from tot.decoders import METHODS, Autoregressive, Method, OpenedMethod, OptionError, Request, Sampling, load_decoder
from tot.decoders.decoder import find_method, method_names
from tot.decoders.engine.sequence import DecodingSequence
from tot.decoders.registry import declared


class FewAtOnce(Autoregressive):
    """A policy that decodes like `ar`, with at most `width` samples of a request at a time."""

    width = 1

    def turn(self) -> list[DecodingSequence]:
        return super().turn()[: self.width]


class Options(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    width: Annotated[int, Field(ge=1)] = 1


def open_few(engine: Any, options: Options, stack: Any) -> OpenedMethod:
    return OpenedMethod(type("Few", (FewAtOnce,), {"width": options.width}))


def test_every_decoding_method_is_found_by_its_name() -> None:
    for name in METHODS:
        assert find_method(name).options().model_config["extra"] == "forbid"


@pytest.mark.parametrize(
    ("method", "options", "forwards"),
    [(Method(lambda *_: OpenedMethod(FewAtOnce)), {}, 15), (Method(open_few, Options), {"width": 2}, 10)],
    ids=["no options", "options"],
)
def test_a_policy_can_be_added_under_a_new_name(
    make_model: Callable[..., Any],
    tokenizer: Any,
    monkeypatch: pytest.MonkeyPatch,
    method: Method,
    options: dict[str, Any],
    forwards: int,
) -> None:
    monkeypatch.setitem(METHODS, "few", method)
    request = Request(prompt="the rain", sampling=Sampling(max_tokens=5, n=3, temperature=1.0, ignore_eos=True))
    with load_decoder("ar", make_model(), tokenizer=tokenizer, kv_budget=200) as plain:
        with load_decoder("few", engine=plain.engine, **options) as few:
            found = [completion.tokens for completion in few.generate([request])]
            assert plain.engine.forwards == forwards
        assert found == [completion.tokens for completion in plain.generate([request])]


def test_another_distribution_can_declare_a_method(monkeypatch: pytest.MonkeyPatch, tiny: Any) -> None:
    group = {**declared("tot.decoders"), "few": EntryPoint("few", "few_methods:FEW", "tot.decoders")}
    monkeypatch.setattr("tot.decoders.registry.declared", lambda group_name: group)
    few = Method(lambda *_: OpenedMethod(FewAtOnce), few_shot=True)
    monkeypatch.setitem(sys.modules, "few_methods", SimpleNamespace(FEW=few))
    assert "few" in METHODS
    assert find_method("few") is few
    with tiny() as plain, load_decoder("few", engine=plain.engine) as decoder:
        assert (plain.few_shot, decoder.few_shot) == (False, True)


def test_a_decoder_is_refused_as_a_method(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "mine", object())
    with pytest.raises(OptionError, match="mine is a decoder, not a decoding method"):
        load_decoder("mine")


def test_a_bad_option_of_an_added_method_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "few", Method(open_few, Options))
    with pytest.raises(OptionError, match=r"decoder few.*width"):
        load_decoder("few", width=0)


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        *[("jacobi", "n", 0), ("jacobi", "n", 500), ("jacobi", "k", 3)],
        *[("lookahead", "window", 0), ("lookahead", "ngram", 1), ("lookahead", "guesses", 0), ("lookahead", "k", 3)],
        *[("fastcot", "cap", -1), ("fastcot", "window", 129), ("auto", "k", 3)],
    ],
)
def test_an_invalid_option_is_named(name: str, option: str, value: int) -> None:
    with pytest.raises(OptionError, match=f"decoder {name}, option {option}: .* \\(its options: "):
        load_decoder(name, "absent.gguf", **{option: value})


def test_a_users_own_decoder_is_not_served_as_a_method(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "mine", object)
    assert "mine" in METHODS
    assert method_names() == [name for name in METHODS if name != "mine"]
