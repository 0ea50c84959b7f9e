"""The embedded model."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

TEXTS = ["hello  world", "a  5 and 12\n\n  3", "<|im_start|>user\nhe's 40 % <|im_end|>", "héllo ½ 東京 🙂", "", "   "]


@pytest.mark.real
def test_the_embedded_model_answers_a_question(smollm: Any) -> None:
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = smollm.tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    output = smollm.model.generate(**prompt, max_new_tokens=16, do_sample=False)
    reply = smollm.tokenizer.decode(output[0][prompt["input_ids"].shape[1] :])
    assert reply == "The capital of France is Paris.<|im_end|>"
    assert (smollm.name, smollm.model.num_parameters()) == ("smollm2-135m", 134_515_008)


@pytest.mark.real
def test_the_embedded_tokenizer_equals_smollm2s(smollm: Any) -> None:
    tokenizer = smollm.tokenizer
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    )
    assert (tokenizer.eos_token_id, tokenizer.unk_token_id, len(tokenizer)) == (2, 0, 49152)
    assert tokenizer.tokenize("x =  48 / 2") == ["x", "Ġ=", "ĠĠ", "4", "8", "Ġ/", "Ġ", "2"]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False).startswith(
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    )
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
