"""Opening and closing drafts: refused drafts, and the restored state after closing."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from tot.decoders import Engine, ModelError, OptionError, Request, Sampling, load_decoder, load_model
from tot.decoders.drafting.draft_model import check_vocabulary, make_drafter


def renamed(tokenizer: Any, old: str, new: str) -> PreTrainedTokenizerFast:
    spelled = tokenizer.backend_tokenizer.to_str().replace(f'"{old}":', f'"{new}":')
    return PreTrainedTokenizerFast(tokenizer_object=type(tokenizer.backend_tokenizer).from_str(spelled))


def test_different_tokens_are_named(tokenizer: Any) -> None:
    check_vocabulary(tokenizer, copy.deepcopy(tokenizer))
    ident = tokenizer.get_vocab()["7"]
    expected = (
        rf"differs from the target's in 2 of 279 tokens, such as '7' \(None and {ident}\), '€' \({ident} and None\)"
    )
    with pytest.raises(ModelError, match=expected + ": choose a draft of the same family, or draft=None for lookup"):
        check_vocabulary(renamed(tokenizer, "7", "€"), tokenizer)


def test_a_draft_with_other_tokens_is_refused_and_the_target_is_released(
    make_model: Callable[..., Any], tokenizer: Any, tmp_path: Any
) -> None:
    make_model(seed=1).save_pretrained(tmp_path)
    renamed(tokenizer, "7", "€").save_pretrained(tmp_path)
    target = make_model()
    with pytest.raises(ModelError, match=r"differs .* 2 of 279 tokens"):
        load_decoder("sd", target, tokenizer=tokenizer, kv_budget=100, draft=tmp_path)
    assert target.config._attn_implementation == "sdpa"


def test_removed_and_invalid_drafts_are_refused(make_model: Callable[..., Any], tokenizer: Any) -> None:
    with Engine(load_model(make_model(), tokenizer=tokenizer), 100) as engine, ExitStack() as stack:
        with pytest.raises(OptionError, match="draft 'early-exit:4' was removed: give a small model"):
            make_drafter("early-exit:4", engine, stack)
        with pytest.raises(OptionError, match="draft=3 is not a model: give a name, a path, a model object"):
            make_drafter(3, engine, stack)
        lookup = make_drafter(None, engine, stack)
        assert make_drafter(lookup, engine, stack) is lookup


OPENS = """
import sys
from tot.decoders import load_decoder

decoder = load_decoder("sd", sys.argv[1], draft=sys.argv[1], kv_budget=100)
print(decoder.name)
"""


@pytest.mark.processes
def test_a_program_that_ends_without_closing_its_decoder_exits_cleanly(
    make_model: Callable[..., Any], tokenizer: Any, tmp_path: Any
) -> None:
    make_model().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    done = subprocess.run([sys.executable, "-c", OPENS, tmp_path], capture_output=True, text=True, check=True)
    assert done.stdout == "sd\n"
    assert "Exception" not in done.stderr


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("sd", {"k": 0}, r"decoder sd, option k: .*greater than or equal to 1 \(its options: draft, .*k"),
        ("sd", {"k": 17}, "decoder sd, option k: .*less than or equal to 16"),
        ("sd", {"k_config": (1,)}, r"decoder sd, option k_config: .* \(its options: draft, .*k"),
        ("mcsd", {"k_config": (2, 0)}, "decoder mcsd, option k_config: .*greater than or equal to 1"),
        ("mcsd", {"k_config": (-1,)}, "decoder mcsd, option k_config: .*greater than or equal to 1"),
        ("mcsd", {"k_config": ()}, "decoder mcsd, option k_config: .*at least 1 item"),
        ("mcsd", {"k": 2}, r"decoder mcsd, option k: .* \(its options: draft, .*k_config"),
    ],
)
def test_bad_options_are_refused(
    make_model: Callable[..., Any], tokenizer: Any, name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        load_decoder(name, make_model(), tokenizer=tokenizer, **options)


@pytest.mark.parametrize("shared", [False, True])
def test_closing_a_decoder_restores_the_drafts_own_attention(
    make_model: Callable[..., Any], tokenizer: Any, shared: bool
) -> None:
    target, draft, tokens = make_model(), make_model(seed=1), torch.tensor([[5, 6, 7]])
    before = draft(tokens).logits
    engine = Engine(load_model(target, tokenizer=tokenizer), 500)
    if shared:
        decoder = load_decoder("sd", engine=engine, draft=draft)
    else:
        engine.close()
        decoder = load_decoder("sd", target, tokenizer=tokenizer, kv_budget=500, draft=draft)
    with pytest.raises(ModelError, match="held by another Engine"):
        make_drafter(draft, decoder.engine, ExitStack())
    decoder.generate([Request(prompt="abc", sampling=Sampling(max_tokens=5))])
    decoder.close()
    assert draft.config._attn_implementation == "sdpa"
    assert torch.equal(draft(tokens).logits, before)
    assert (target.config._attn_implementation == "sdpa") != shared
    engine.close()


def test_a_kv_budget_that_leaves_no_room_for_the_draft_is_refused(
    make_model: Callable[..., Any], tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = make_model(), make_model(seed=1)
    with Engine(load_model(target, tokenizer=tokenizer), 1000) as engine:
        small = 999 * engine.runner.slot_bytes
        monkeypatch.setattr("tot.decoders.engine.runner.free_memory", lambda device: small)
        with pytest.raises(OptionError, match=r"no room for the draft's keys and values beside the target's: .* 1000"):
            load_decoder("sd", engine=engine, draft=draft)
