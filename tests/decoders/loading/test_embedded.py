"""The embedded model."""

from __future__ import annotations

from typing import Any

import pytest
import torch


@pytest.mark.real
def test_the_embedded_model_answers_a_question(smollm: Any) -> None:
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = smollm.tokenizer.encode(smollm.tokenizer.apply_chat_template(chat, add_generation_prompt=True))
    output = smollm.model.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False)
    reply = smollm.tokenizer.decode(output[0][len(prompt) :].tolist())
    assert reply == "The capital of France is Paris.<|im_end|>"
    assert (smollm.name, smollm.model.num_parameters()) == ("smollm2-135m", 134_515_008)


@pytest.mark.real
def test_the_embedded_tokenizer_equals_smollm2s(smollm: Any) -> None:
    tokenizer = smollm.tokenizer
    named = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>"}
    assert tokenizer.special_tokens_map == {**named, "pad_token": "<|im_end|>"}
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, len(tokenizer)) == (1, 2, 2, 49152)
    pieces = [tokenizer.convert_ids_to_tokens(i) for i in tokenizer.encode("x =  48 / 2")]
    assert pieces == ["x", "Ġ=", "ĠĠ", "4", "8", "Ġ/", "Ġ", "2"]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], add_generation_prompt=False).startswith(
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    )


def test_the_native_path_imports_neither_torch_nor_transformers(python: Any, smollm2: str) -> None:
    code = (
        "import sys; from tot.decoders import load_decoder, Request, Sampling;"
        f"d = load_decoder('ar', {smollm2!r}, kv_budget=200);"
        "d.generate([Request(prompt='hi', sampling=Sampling(max_tokens=2))]);"
        "print(d.engine.runner.backend.name, [name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    out, err = python("-c", code).communicate(timeout=120)
    assert err == ""
    assert out.startswith("transformers, ") or out.strip().endswith("[]")
