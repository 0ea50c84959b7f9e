"""The model used last stays open for the next call, in one place, until it is closed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tot import close_models, solve
from tot.decoders import Engine, ModelError, Request, Sampling, load_decoder, open_models
from tot.decoders.open_models import shared_engine

ASKED = [Request(prompt="on and on", sampling=Sampling(max_tokens=6, temperature=1.0, ignore_eos=True))]


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    close_models()


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the models that were loaded."""
    seen: list[str] = []
    load = open_models.load_model

    def counted(model: Any, **options: Any) -> Any:
        seen.append(Path(str(model)).name)
        return load(model, **options)

    monkeypatch.setattr(open_models, "load_model", counted)
    return seen


@pytest.fixture
def saved(make_model: Callable[..., Any], tokenizer: Any, tmp_path: Path) -> Callable[..., str]:
    def save(name: str, seed: int = 0) -> str:
        make_model(seed=seed, max_position_embeddings=4096).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
        return str(tmp_path / name)

    return save


def ask(model: str, **options: Any) -> str:
    found = solve("gsm8k", "What is 1 + 1?", model=model, search="cot", max_tokens=8, kv_budget=9000, **options)
    assert found.usage.reused_prompt_tokens == 0  # as if the model had just been loaded
    return "\n".join(found.tree.state(node).text for node in found.tree)


def test_the_second_call_loads_nothing_and_finds_the_same(saved: Callable[..., str], loads: list[str]) -> None:
    model = saved("one")
    assert ask(model) == ask(model) == ask(model, decoder="sd")
    assert loads == ["one"]


def test_another_model_or_dtype_takes_the_place_of_the_one_before(saved: Callable[..., str], loads: list[str]) -> None:
    one, two = saved("one"), saved("two", seed=1)
    for model, options in ((one, {}), (two, {}), (two, {"dtype": "bf16"}), (two, {"dtype": "bf16"}), (one, {})):
        ask(model, **options)
    assert loads == ["one", "two", "two", "one"]


def test_a_model_that_was_saved_anew_is_loaded_anew(saved: Callable[..., str], loads: list[str]) -> None:
    first = ask(saved("one"))
    assert ask(saved("one", seed=7)) != first
    assert loads == ["one", "one"]


def test_closing_lets_go_of_it(saved: Callable[..., str], loads: list[str]) -> None:
    model = saved("one")
    with shared_engine(model, kv_budget=500) as engine:
        held = weakref.ref(engine.loaded.model)
    close_models()
    del engine
    gc.collect()
    assert held() is None
    ask(model)
    assert loads == ["one", "one"]


def test_loading_a_decoder_of_ones_own_closes_it(saved: Callable[..., str]) -> None:
    model = saved("one")
    with shared_engine(model, kv_budget=500) as engine:
        pass
    with load_decoder("ar", model, kv_budget=500):
        assert engine._closed


def test_calls_at_once_share_it(saved: Callable[..., str], loads: list[str]) -> None:
    model = saved("one")
    with shared_engine(model, kv_budget=500) as first, shared_engine(model, kv_budget=500) as second:
        assert first is second
    assert loads == ["one"]


def test_an_engine_that_failed_is_not_kept(saved: Callable[..., str], loads: list[str]) -> None:
    model = saved("one")
    with shared_engine(model, kv_budget=500) as engine:
        engine._broken = ModelError("the engine has failed")
    with shared_engine(model, kv_budget=500) as again:
        assert again is not engine


def test_model_objects_are_the_callers(make_model: Callable[..., Any], tokenizer: Any) -> None:
    model = make_model()
    with shared_engine(model, tokenizer=tokenizer, kv_budget=500) as engine:
        assert isinstance(engine, Engine)
    assert model.config._attn_implementation == "sdpa"


def test_decoders_of_one_engine_share_the_draft_that_they_name(
    saved: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, draft = saved("one"), saved("two")
    with load_decoder("ar", model, kv_budget=3000) as plain:
        wanted = [one.tokens for one in plain.generate(ASKED)]
        first = load_decoder("sd", engine=plain.engine, draft=draft)
        second = load_decoder("mcsd", engine=plain.engine, draft=draft)
        assert first.drafter is second.drafter
        first.close()
        completions = second.generate(ASKED)
        assert [one.tokens for one in completions] == wanted
        assert completions[0].usage.drafted > 0
        drafter: Any = second.drafter
        second.close()
        with load_decoder("sd", engine=plain.engine, draft=draft) as third:
            assert third.drafter is drafter
    assert drafter.runner._closed
