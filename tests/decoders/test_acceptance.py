"""Rejection rules give the target's distribution: whole decoders against exact probabilities, and the rule alone."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tot.decoders import Request, Sampling, load_decoder
from tot.decoders.drafting.acceptance import reject
from tot.decoders.drafting.latency_model import LatencyModel

WORDS = [f"w{i}" for i in range(15)] + ["<end>"]
LENGTH = 3
DRAWS = 10_000
MANY_DRAWS = 50_000
TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def words() -> Any:
    """A tokenizer of 16 words."""
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", unk_token="w0")


@pytest.fixture(scope="module")
def llama() -> Callable[[int], Any]:
    """Create tiny random models that differ by seed."""

    def make(seed: int) -> Any:
        config = LlamaConfig(
            vocab_size=16,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=32,
            initializer_range=0.6,
        )
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval().requires_grad_(False)

    return make


@pytest.fixture(scope="module")
def exact(llama: Any) -> dict[tuple[int, ...], float]:
    """The target's probability of each sequence of three tokens after "w1 w2"."""
    model = llama(0)
    sequences = list(itertools.product(range(16), repeat=LENGTH))
    ids = torch.tensor([[1, 2, *sequence] for sequence in sequences])
    with torch.inference_mode():
        logprobs = (model(ids).logits[:, 1:-1].double() / TEMPERATURE).log_softmax(-1)
    joint = logprobs.gather(2, ids[:, 2:, None])[..., 0].sum(1).exp()
    return dict(zip(sequences, joint.tolist(), strict=True))


def distance(counts: Counter[tuple[int, ...]], exact: dict[tuple[int, ...], float]) -> float:
    """Return the total variation between sampled and exact distribution."""
    total = sum(counts.values())
    return sum(abs(counts[sequence] / total - p) for sequence, p in exact.items()) / 2


def max_distance(exact: dict[tuple[int, ...], float], draws: int) -> float:
    """Return the largest plausible distance of an exact sampler: mean and four standard deviations of total
    variation."""
    p = np.array(list(exact.values()))
    runs = np.random.default_rng(0).multinomial(draws, p / p.sum(), size=200)
    distances = np.abs(runs / draws - p).sum(1) / 2
    return float(distances.mean() + 4 * distances.std())


def sampled(llama: Any, words: Any, method: str, draws: int, **options: Any) -> Counter[tuple[int, ...]]:
    """Count the first three tokens of samples that are at least as long as a draft."""
    longest = max(LENGTH, options.get("k", 0) + 1)
    n = 16 if draws < DRAWS else 2_500  # in few samples, the sizes of later drafts depend on earlier acceptance
    sampling = Sampling(max_tokens=longest, temperature=TEMPERATURE, n=n, ignore_eos=True)
    counts: Counter[tuple[int, ...]] = Counter()
    with load_decoder(method, llama(0), tokenizer=words, kv_budget=300_000, draft=llama(1), **options) as decoder:
        for seed in range(draws // sampling.n):
            request = Request(prompt="w1 w2", sampling=sampling.model_copy(update={"seed": seed}))
            counts.update(completion.tokens[:LENGTH] for completion in decoder.generate([request]))
    return counts


SETTINGS = [
    ("sd", {"k": 1}),
    ("sd", {"k": 2}),
    ("sd", {"k": 4}),
    ("mcsd", {"k_config": (4, 2)}),
    ("mcsd", {"k_config": (3, 1)}),
]


@pytest.mark.statistics
@pytest.mark.parametrize(
    ("method", "options", "draws"),
    [
        ("sd", {"k": 2}, DRAWS),
        ("mcsd", {"k_config": (4, 2)}, DRAWS),
        ("seed", {"rule": "mcsd", "k_config": (3, 2)}, 4_000),
        ("seed", {"rule": "leviathan", "k_config": (1, 1), "policy": "rounds"}, 960),
        *(pytest.param(*setting, MANY_DRAWS, marks=pytest.mark.slow) for setting in SETTINGS),
    ],
)
def test_a_rejection_rule_gives_the_targets_distribution(
    method: str,
    options: dict[str, Any],
    draws: int,
    llama: Any,
    words: Any,
    exact: dict[tuple[int, ...], float],
    script_latency: Callable[..., None],
) -> None:
    script_latency(LatencyModel((1, 64), (0.01, 0.013)), LatencyModel((1,), (0.001,)))
    options = {"rule": "leviathan" if method == "sd" else "mcsd", **options}
    assert distance(sampled(llama, words, method, draws, **options), exact) < max_distance(exact, draws)


@pytest.mark.statistics
def test_a_wrong_rule_is_detected(
    llama: Any, words: Any, exact: dict[tuple[int, ...], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A common mistake is sampling from p instead of the residual distribution after rejected candidates."""

    def wrong(target: Any, *arguments: Any) -> Any:
        return reject(target, *arguments)[0], target

    monkeypatch.setattr("tot.decoders.drafting.acceptance.reject", wrong)
    assert distance(sampled(llama, words, "sd", DRAWS, rule="leviathan", k=1), exact) > 1.5 * max_distance(exact, DRAWS)


@pytest.mark.statistics
@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.smoke), 4])
def test_the_rule_alone_gives_p_for_any_q(count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    p, q = (torch.rand(6, generator=generator, dtype=torch.float64).numpy() ** 3 for _ in range(2))
    p, q = p / p.sum(), q / q.sum()
    rng = random.Random(0)
    counts = np.zeros(6)
    rounds = 40_000
    for _ in range(rounds):
        weights = q.tolist()
        candidates: list[int] = []
        for _ in range(count):
            (x,) = rng.choices(range(6), weights)
            candidates.append(x)
            weights[x] = 0.0
        taken, left = reject(p, candidates, q, rng.random)
        x = candidates[taken] if taken is not None else rng.choices(range(6), left.tolist())[0]
        counts[x] += 1
    spread = np.sqrt(p * (1 - p) / rounds)
    assert bool((np.abs(counts / rounds - p) < 4 * spread + 1e-9).all())
