"""PDOS with `reuse_keys`: what steps computed, moved to its place, is what it should be, and nobody else finds it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tot.decoders import LocalDecoder, ModelError, Request, Sampling, load_decoder
from tot.decoders.engine.radix_cache import RadixCache
from tot.decoders.kernels.rotary import turned

CITIES = ("Oslo", "Rome", "the other one", "10")
LONG = "The sum of 10 and 11 is in the range on and on, and the other one: " * 2
Make = Callable[..., LocalDecoder]


class Spliced:
    """Sees the branch that goes over several steps, and what its store holds once it is whole."""

    def __init__(self, decoder: LocalDecoder) -> None:
        engine = decoder.engine
        self.tokens: list[int] = []
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.spans: list[tuple[int, int, int]] = []
        """By step: where it begins, where what it computed ends, and where the next one begins."""
        self._cache, self._runner = engine.cache, engine.runner
        self._splice, self._forward = engine.cache.splice, engine.runner.forward
        self._branch: Any = None
        engine.cache.splice = self.splice  # type: ignore[method-assign]
        engine.runner.forward = self.forward  # type: ignore[method-assign]

    def splice(self, branches: Any, start: int) -> Any:
        self._branch = self._splice(branches, start)
        at = start
        for branch in branches:
            end = at + len(branch) - start
            self.spans.append((at, at + self._cache.computed_length(branch, start) - start, end))
            at = end
        return self._branch

    def forward(self, feeds: Any) -> Any:
        done = self._forward(feeds)
        if self._branch is not None and not self.tokens:
            slots = self._branch.slots.tolist()
            self.tokens = self._cache.tokens(self._branch)
            self.keys = [keys[:, slots].clone() for keys in self._runner._keys]
            self.values = [values[:, slots].clone() for values in self._runner._values]
        return done


def naive(model: Any, tokens: list[int], spans: list[tuple[int, int, int]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values by layer, each (kv_heads, tokens, head_dim), from one forward in which no step sees another and
    each has the positions where it was decoded. Keys are taken as they are before they are turned, and turned then."""
    start = spans[0][0]
    positions, sees = torch.arange(len(tokens)), torch.tril(torch.ones(len(tokens), len(tokens), dtype=torch.bool))
    for first, joint, _ in spans:
        sees[first:joint, start:first] = False
        positions[first:joint] = torch.arange(start, start + joint - first)
    taken: dict[int, list[torch.Tensor]] = {}
    hooks = []
    for number, layer in enumerate(model.model.layers):
        for projection in (layer.self_attn.k_proj, layer.self_attn.v_proj):
            hooks.append(
                projection.register_forward_hook(
                    lambda _module, _given, out, number=number: taken.setdefault(number, []).append(out[0])
                )
            )
    mask = torch.zeros(len(tokens), len(tokens)).masked_fill(~sees, float("-inf"))[None, None]
    with torch.inference_mode():
        model(torch.tensor([tokens]), attention_mask=mask, position_ids=positions[None], use_cache=False)
        cos, sin = model.model.rotary_emb(torch.zeros(1), torch.arange(len(tokens))[None])
    for hook in hooks:
        hook.remove()
    found = []
    for keys, values in taken.values():
        keys, values = (x.view(len(tokens), -1, cos.shape[-1]).transpose(0, 1) for x in (keys, values))
        first, second = keys.chunk(2, dim=-1)
        found.append((keys * cos[0] + torch.cat([-second, first], dim=-1) * sin[0], values))
    return found


def test_moved_keys_are_what_a_mask_between_steps_gives(make: Make, model: Any, ids: Any) -> None:
    decoder = make(reuse_keys=True, step_tokens=9)
    seen = Spliced(decoder)
    sampling = Sampling(max_tokens=160, ignore_eos=True)
    (got,) = decoder.generate([Request(prompt=ids(decoder, LONG + "|\n"), sampling=sampling, steps=CITIES)])
    assert len(seen.spans) == 4
    assert all(last - joint < 4 < joint - first for first, joint, last in seen.spans[:-1])
    assert decoder.engine.codec.decode(seen.tokens) == LONG + "|\n" + "".join(part.text for part in got.parts[:-1])
    expected = naive(model, seen.tokens, seen.spans)
    rows = torch.ones(len(seen.tokens), dtype=torch.bool)
    for layer, naive_ones in enumerate(expected):
        for ours, theirs in zip((seen.keys[layer], seen.values[layer]), naive_ones, strict=True):
            torch.testing.assert_close(ours[:, rows], theirs[:, rows], atol=1e-3, rtol=1e-3)
        for _, joint, last in seen.spans:  # from the second layer on these depend on keys that were moved
            rows[joint:last] = False


def test_the_text_goes_on_from_what_was_moved(make: Make, ids: Any) -> None:
    """Only what joins the steps is computed, and a single step, which is not moved, gives the text of recomputation."""
    texts = []
    for reuse in (False, True):
        decoder = make(reuse_keys=reuse, step_tokens=9)
        sampling = Sampling(max_tokens=100, temperature=1.0, seed=2, ignore_eos=True)
        (got,) = decoder.generate([Request(prompt=ids(decoder, LONG + "|\n"), sampling=sampling, steps=("Oslo",))])
        texts.append((got.text, got.tokens, got.usage.forwards))
    assert texts[0] == texts[1]


def test_what_joins_the_steps_is_all_that_is_computed(make: Make, ids: Any, watching: Any) -> None:
    rows = []
    for reuse in (False, True):
        decoder = make(reuse_keys=reuse, step_tokens=9)
        watch = watching(decoder)
        sampling = Sampling(max_tokens=160, ignore_eos=True)
        (got,) = decoder.generate([Request(prompt=ids(decoder, LONG + "|\n"), sampling=sampling, steps=CITIES)])
        rows.append(watch.rows[-got.parts[-1].tokens])
    assert rows[1] < 30 < 60 < rows[0]


def test_nobody_else_finds_keys_that_were_moved(make: Make, ids: Any) -> None:
    decoder, fresh = make(reuse_keys=True, step_tokens=9), make("ar")
    prompt = ids(decoder, LONG + "|\n")
    (got,) = decoder.generate([Request(prompt=prompt, sampling=Sampling(max_tokens=160), steps=CITIES)])
    again = ids(decoder, LONG + "|\n" + "".join(part.text for part in got.parts[:-1]))
    request = Request(prompt=again, sampling=Sampling(max_tokens=30, ignore_eos=True))
    with load_decoder("ar", engine=decoder.engine) as plain:
        (after,), (expected,) = plain.generate([request]), fresh.generate([request])
    assert after.usage.reused_prompt_tokens <= len(prompt)
    assert after.tokens == expected.tokens
    assert decoder.engine.cache.live == 0


@pytest.mark.parametrize("options", [{"width": 2}, {"chunk": 5}, {"kv_budget": 1400}])
def test_company_and_waves_change_nothing(make: Make, loose: Any, mixed: Any, shown: Any, options: Any) -> None:
    decoder = loose(make, reuse_keys=True)
    requests = mixed(decoder)
    alone = [one for request in requests for one in shown(decoder.generate([request]))]
    assert sum(any(part.kind == "step" for part in parts) for *_, parts, _ in alone) > 3
    assert shown(loose(make, reuse_keys=True, **options).generate(requests)) == alone


def test_a_text_whose_keys_were_moved_takes_no_more_slots(make: Make, ids: Any) -> None:
    peaks = []
    for reuse in (False, True):
        decoder = make(reuse_keys=reuse)
        sampling = Sampling(max_tokens=200, temperature=1.0, ignore_eos=True)
        decoder.generate([Request(prompt=ids(decoder, LONG), sampling=sampling, steps=CITIES)])
        peaks.append(decoder.engine.cache.peak_live)
    assert peaks[1] <= peaks[0]
    prompt = ids(make(), LONG)
    tight = make(reuse_keys=True, kv_budget=len(prompt) + 120)
    (got,) = tight.generate([Request(prompt=prompt, sampling=Sampling(max_tokens=120, ignore_eos=True), steps=CITIES)])
    assert got.finish_reason == "length"


def test_a_stop_string_in_a_step_is_followed_by_an_answer(make: Make, ask: Any, scripted: Any) -> None:
    decoder = make(reuse_keys=True)
    steps = ("#### Oslo: is cold\n####", "#### Rome: warm\n####")
    scripted(decoder, *steps, "#### Oslo: is  Answer: 10")
    more = {"answer_trigger": " Answer:", "steps": ("Oslo", "Rome"), "sampling": {"stop": ("cold",)}}
    (got,) = decoder.generate([ask(decoder, **more)])
    assert (got.text, got.answer) == ("#### Oslo: is  Answer: 10", " 10")


def test_keys_turn_by_pairs_of_halves() -> None:
    angles = torch.tensor([torch.pi / 2, 0.0])
    assert turned(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]), angles).tolist() == pytest.approx([-3, 2, 1, 4, 5], abs=1e-6)


def test_a_model_whose_positions_depend_on_length_is_refused(make_model: Callable[..., Any], tokenizer: Any) -> None:
    rotary = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    model = make_model("llama", rope_parameters=rotary)
    with load_decoder("pdos", model, tokenizer=tokenizer, kv_budget=500) as plain:
        assert plain.name == "pdos"
        with pytest.raises(ModelError, match="with dynamic rotary positions can't be moved: leave reuse_keys off"):
            load_decoder("pdos", engine=plain.engine, reuse_keys=True)


def test_private_nodes_are_their_branchs_alone() -> None:
    cache = RadixCache(10)
    one = cache.open([1, 2])
    two = cache.fork(one)
    cache.extend(one, [3, 4], private=True)
    cache.extend(two, [3, 4])
    assert set(one.slots[2:]).isdisjoint(two.slots[2:])
    assert cache.new_slots([1, 2, 3, 4, 5]) == 1  # beyond the second's
    cache.mark_computed([*one.slots, *two.slots])
    spliced = cache.splice([two, one], 2)
    assert cache.tokens(spliced) == [1, 2, 3, 4, 3, 4]
    for branch in (one, two):
        cache.release(branch)
    assert cache.live == 4  # the second is no longer held
    cache.release(spliced)
    assert cache.live == 0
    assert cache.stored == 4  # what is private is not kept as a cache
    assert len(set(cache.open([1, 2, 3, 4]).slots) & set(two.slots)) == 0 < cache.live
