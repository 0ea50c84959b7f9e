"""Tokens of every decoding method on a random float32 model of two layers."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tot.decoders import Completion, Message, Request, Sampling, load_decoder

GROUPS = ("decoders",)
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
DRAFTS = {"draft": "near"}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "ar": ("ar", {}),
    "auto": ("auto", {}),
    "lookup": ("sd", {"k": 4}),
    "sd": ("sd", {"k": 3, **DRAFTS}),
    "sd, leviathan": ("sd", {"k": 3, "rule": "leviathan", **DRAFTS}),
    "mcsd": ("mcsd", {"k_config": "3,2,1", **DRAFTS}),
    "mcsd, mcsd": ("mcsd", {"k_config": "3,2,1", "rule": "mcsd", **DRAFTS}),
    "seed, packed": ("seed", {"adapt": False, **DRAFTS}),
    "seed, rounds": ("seed", {"policy": "rounds", "adapt": False, **DRAFTS}),
    "jacobi": ("jacobi", {"n": 6, "adapt": False, "trajectory": True}),
    "lookahead": ("lookahead", {"window": 4, "ngram": 3, "guesses": 4, "adapt": False}),
    "fastcot": ("fastcot", {"cap": 4, "window": 3, "trajectory": True}),
    "fastcot, exact": ("fastcot", {}),
    "pdos": ("pdos", {"instructions": "Write steps."}),
}
ALL = ("ar", "auto", "fastcot", "jacobi", "lookahead", "mcsd", "pdos", "sd", "seed")


def model(seed: int, noise: float = 0.0) -> Any:
    """Return a model with weights from NumPy's generator, which draws the same numbers on every processor."""
    config = LlamaConfig(
        vocab_size=len(CONTROL) + 256,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        attn_implementation="sdpa",
        dtype="float32",
    )
    made = LlamaForCausalLM(config).eval().requires_grad_(False)
    weights, noises = np.random.default_rng(seed), np.random.default_rng(seed + 1)
    for name, weight in sorted(made.named_parameters()):
        if "norm" not in name:
            drawn = 0.3 * weights.standard_normal(weight.shape) + noise * noises.standard_normal(weight.shape)
            weight.data = torch.from_numpy(drawn.astype(np.float32))
    return made


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of single bytes with a ChatML template."""
    vocabulary = [*CONTROL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(vocabulary)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=CONTROL[2], additional_special_tokens=CONTROL[:2], chat_template=CHATML
    )


def requests() -> list[Request]:
    """Return greedy and sampled requests, with several samples, stops, a chat, choices, a trigger and steps."""
    text = "The sum of 10 and 11 is in the range on and on, and the other one"
    chat = (Message(role="user", content="What is 10 and 11?"), Message(role="assistant", content="The sum"))

    def one(prompt: Any, length: int, seed: int, temperature: float = 1.0, **other: Any) -> Request:
        fields = {name: other.pop(name) for name in ("n", "stop", "top_p", "top_k", "min_p") if name in other}
        sampling = Sampling(max_tokens=length, seed=seed, temperature=temperature, ignore_eos=True, **fields)
        return Request(prompt=prompt, sampling=sampling, **other)

    return [
        one(text, 24, 1, 0.0),
        one(text, 16, 2, n=3),
        one(text[:30], 16, 3, 0.7, top_p=0.9, top_k=40),
        one(text[:20], 16, 4, min_p=0.02, stop=("e", "a")),
        one(chat, 12, 5, 0.7),
        one((40, 50, 60, 70), 8, 6),
        one(text, 1, 7, choices=("one", "two", "10"), close_choices=True),
        one(text[:40], 14, 8, answer_trigger=" So it is", answer_tokens=4),
        one(text[:40], 14, 9, 0.0, answer_trigger=" So it is", choices=("1", "10")),
        one(text[:25], 60, 10, 0.8, steps=("First", "Second")),
    ]


def outcome(completion: Completion) -> str:
    """Return tokens, end and log-probabilities of a completion as text."""
    fields = [" ".join(map(str, completion.tokens)), completion.finish_reason]
    fields += [f"logprob {completion.logprob:.3f}"] if completion.tokens else []
    scores = [f"{choice.total:.3f}" for choice in completion.choice_logprobs]
    fields += [f"choices {' '.join(scores)}"] if scores else []
    fields += [f"text {digest(completion.text)} parts {digest([(p.kind, p.text, p.tokens) for p in completion.parts])}"]
    fields += [f"usage {completion.usage.prompt_tokens} {completion.usage.new_tokens}"]
    return " | ".join(fields)


def digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:8]


def record(group: str) -> dict[str, list[str]]:
    """Return the outcome of every completion by method, or that it is the one of `ar`."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found: dict[str, list[str]] = {}
    try:
        for name, (method, options) in METHODS.items():
            given = {**options, **({"draft": model(0, 0.03)} if "draft" in options else {})}
            with load_decoder(method, model(0), tokenizer=tokenizer(), kv_budget=4000, **given) as decoder:
                completions = decoder.generate(requests())
            found[name] = list(map(outcome, completions))
            if name != "ar":
                found[name] = [
                    "as ar" if one == two else one for one, two in zip(found[name], found["ar"], strict=True)
                ]
            if any(one.trajectory for one in completions):
                found[f"{name}: guesses"] = [digest(one.trajectory) for one in completions]
    finally:
        torch.set_num_threads(threads)
    return found
