"""SEED: adaptive drafting keeps the target's distribution under rejection rules."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tot.decoders import Request, Sampling, load_decoder
from tot.decoders.drafting.latency_model import LatencyModel

LENGTH = 2
HEAT = 0.7


@pytest.fixture(scope="module")
def words() -> Any:
    """A tokenizer of 16 words."""
    backend = Tokenizer(models.WordLevel({**{f"w{i}": i for i in range(15)}, "<end>": 15}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", unk_token="w0")


@pytest.fixture(scope="module")
def llama() -> Callable[[int], Any]:
    """Create a tiny random model, with optional noise on its weights."""

    def make(noise: float = 0.0) -> Any:
        torch.manual_seed(0)
        shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = LlamaConfig(vocab_size=16, max_position_embeddings=32, initializer_range=0.6, **shape)
        model = LlamaForCausalLM(config).eval().requires_grad_(False)
        for weight in model.parameters():
            weight += torch.randn(weight.shape) * noise
        return model

    return make


@pytest.fixture(scope="module")
def exact(llama: Any) -> dict[tuple[int, ...], float]:
    """The target's probability of each pair of tokens after "w1 w2"."""
    model, pairs = llama(), list(itertools.product(range(16), repeat=LENGTH))
    ids = torch.tensor([[1, 2, *pair] for pair in pairs])
    with torch.inference_mode():
        logprobs = (model(ids).logits[:, 1:-1].double() / HEAT).log_softmax(-1)
    return dict(zip(pairs, logprobs.gather(2, ids[:, 2:, None])[..., 0].sum(1).exp().tolist(), strict=True))


def max_distance(exact: dict[tuple[int, ...], float], draws: int) -> float:
    """Return the largest plausible distance of an exact sampler: mean and four standard deviations of total
    variation."""
    p = np.array(list(exact.values()))
    runs = np.random.default_rng(0).multinomial(draws, p / p.sum(), size=200)
    distances = np.abs(runs / draws - p).sum(1) / 2
    return float(distances.mean() + 4 * distances.std())


@pytest.mark.statistics
@pytest.mark.parametrize(
    ("policy", "rule", "k_config", "draws"),
    [
        pytest.param("packed", "leviathan", (1, 1), 4000, marks=pytest.mark.slow),
        ("packed", "mcsd", (3, 2), 4000),
        ("rounds", "leviathan", (1, 1), 960),
        pytest.param("rounds", "mcsd", (3, 2), 960, marks=pytest.mark.slow),
    ],
)
def test_adaptive_drafting_keeps_the_distribution(
    policy: str,
    rule: str,
    k_config: tuple[int, ...],
    draws: int,
    llama: Any,
    words: Any,
    exact: dict[tuple[int, ...], float],
    script_latency: Callable[..., None],
) -> None:
    """The sizes of drafts depend on earlier acceptance. The distribution of tokens does not."""
    script_latency(LatencyModel((1, 64), (0.01, 0.013)), LatencyModel((1,), (0.001,)))
    counts: Counter[tuple[int, ...]] = Counter()
    options = {"policy": policy, "rule": rule, "k_config": k_config, "draft": llama(0.3)}
    sampling = Sampling(max_tokens=3, temperature=HEAT, n=16, ignore_eos=True)
    sizes = set()
    with load_decoder("seed", llama(), tokenizer=words, kv_budget=40_000, **options) as decoder:
        for seed in range(draws // sampling.n):
            request = Request(prompt="w1 w2", sampling=sampling.model_copy(update={"seed": seed}))
            got = decoder.generate([request])
            counts.update(completion.tokens[:LENGTH] for completion in got)
            sizes |= {completion.usage.drafted for completion in got}
    assert sum(abs(counts[pair] / draws - p) for pair, p in exact.items()) / 2 < max_distance(exact, draws)
    assert len(sizes) > 1
