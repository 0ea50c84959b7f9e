"""Tiny models with random weights in float32 and a tiny tokenizer, created locally without downloads.

pytest imports with `importlib`, so tests share fixtures. Most are factories, because an Engine changes its model.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from tot.decoders import Engine, LocalDecoder, Request, Sampling, load_decoder, load_model
from tot.decoders.drafting.draft_model import ModelDrafter, make_drafter
from tot.decoders.drafting.drafters import Drafter
from tot.decoders.drafting.latency_model import LatencyModel
from tot.decoders.engine import engine as engine_module
from tot.decoders.engine.text import TextCodec

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MERGES = [
    *("t h", "th e", "i n", "e r", "a n", "Ġ t", "Ġ the", "Ġ a", "o n", "r e"),
    *("an d", "Ġ 1", "1 0", "Ċ Ċ", "in g", "a b", "ab c", "o u", "Ġ s", "e n"),
]
_EAGER = {"attn_implementation": "eager"}  # torch's scaled dot-product attention has no logit cap
_ALTERNATING = ["sliding_attention", "full_attention"]
_EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"head_dim": 16, "sliding_window": None},
    "gemma": {"head_dim": 16},
    "gemma2": {
        "head_dim": 16,
        "query_pre_attn_scalar": 12,
        "sliding_window": 9,
        "attn_logit_softcapping": 3.0,
        **_EAGER,
    },
    "gemma3_text": {"head_dim": 16, "query_pre_attn_scalar": 12, "sliding_window": 9, "layer_types": _ALTERNATING},
    "phi3": {"pad_token_id": 0},
    "granite": {
        "embedding_multiplier": 3.0,
        "logits_scaling": 0.5,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.2,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "smollm3": {
        "pad_token_id": 0,
        "no_rope_layer_interval": 2,
        "use_sliding_window": True,
        "sliding_window": 9,
    },
    "seed_oss": {"head_dim": 16, "pad_token_id": 0, "attention_out_bias": True},
    "qwen3_moe": {**_EXPERTS, "head_dim": 16, "moe_intermediate_size": 32},
    "gpt_oss": {**_EXPERTS, "head_dim": 16, "sliding_window": 9, **_EAGER},
}
VOCAB = 300


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with a few merges, three control tokens and a ChatML template."""
    merges = [tuple(merge.split(" ")) for merge in MERGES]
    spelled = [*CONTROL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(merge) for merge in merges)]
    backend = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(spelled)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        additional_special_tokens=["<|endoftext|>", "<|im_start|>"],
        chat_template=CHATML,
    )


@pytest.fixture(scope="session")
def codec(tokenizer: PreTrainedTokenizerFast) -> TextCodec:
    return TextCodec(tokenizer)


@pytest.fixture(scope="session")
def codec_with(tokenizer: PreTrainedTokenizerFast) -> Callable[..., TextCodec]:
    """Create codecs on the tokenizer with other attributes, and with added tokens that are not control tokens."""

    def make(*added: str, **attributes: Any) -> TextCodec:
        other = copy.deepcopy(tokenizer)
        other.add_tokens([AddedToken(text, normalized=False, special=False) for text in added])
        for name, value in attributes.items():
            setattr(other, name, value)
        return TextCodec(other)

    return make


@pytest.fixture(scope="session")
def make_model(tokenizer: PreTrainedTokenizerFast) -> Callable[..., Any]:
    """Map a family and a seed to a tiny model with large weights, so that logits are peaky and no two texts are equal.

    With `readable`, the model only writes printable ASCII, newlines and the end token.
    """

    def make(family: str = "llama", seed: int = 0, readable: bool = False, **changes: Any) -> Any:
        settings = {
            "vocab_size": VOCAB,
            "hidden_size": 48,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 1024,
            "initializer_range": 0.3,
            "bos_token_id": None,
            "eos_token_id": None,
            "attn_implementation": "sdpa",
        }
        config = AutoConfig.for_model(family, **{**settings, **FAMILIES[family], **changes})
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        if readable:
            head = torch.nn.Linear(config.hidden_size, config.vocab_size)
            head.weight = model.lm_head.weight
            texts = [tokenizer.decode([i]) for i in range(config.vocab_size)]
            plain = [text.isascii() and text.replace("\n", " ").isprintable() for text in texts]
            head.bias.data = torch.tensor(
                [0.0 if text and fine else -50.0 for text, fine in zip(texts, plain, strict=True)]
            )
            head.bias.data[[*tokenizer.all_special_ids]] = -50.0
            head.bias.data[tokenizer.eos_token_id] = 0.0
            model.lm_head = head
        return model.eval().requires_grad_(False)

    return make


@pytest.fixture
def save_model(
    make_model: Callable[..., Any], tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> Callable[..., Path]:
    """Save a tiny model and its tokenizer in a folder, and return the folder."""

    def save(model: Any = "llama", name: str = "model", **changes: Any) -> Path:
        shards = {"max_shard_size": changes.pop("max_shard_size")} if "max_shard_size" in changes else {}
        made = make_model(model, **changes) if isinstance(model, str) else model
        made.save_pretrained(tmp_path / name, **shards)
        tokenizer.save_pretrained(tmp_path / name)
        return tmp_path / name

    return save


@pytest.fixture(scope="session")
def logits_alone() -> Callable[..., Tensor]:
    """Return an unmodified model's logits for a text run alone: (tokens, vocab)."""

    def run(model: Any, tokens: list[int]) -> Tensor:
        with torch.inference_mode():
            logits: Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0].float()
        return logits

    return run


@pytest.fixture
def script_latency(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Script the cost of rows of all targets and draft models, because measured times depend on the machine."""

    def script(target: LatencyModel, draft: LatencyModel | None = None) -> None:
        def scripted(runner: Any) -> LatencyModel:
            is_target = any(one.runner is runner for one in engine_module._open)
            return target if is_target else draft or LatencyModel((1, 64), (0.001, 0.002))

        for module in ("methods.speculative", "drafting.drafters"):
            monkeypatch.setattr(f"tot.decoders.{module}.latency_model", scripted)

    return script


@pytest.fixture(params=["llama", pytest.param("qwen2", marks=pytest.mark.families)])
def make(request: pytest.FixtureRequest, make_model: Callable[..., Any], tokenizer: Any) -> Iterator[Any]:
    """Create decoders by name, each on a copy of one model. Their slots must all be free at the end."""
    model = make_model(request.param, readable=True)
    made: list[LocalDecoder] = []

    def load(name: str, **options: Any) -> LocalDecoder:
        kv_budget = options.pop("kv_budget", 6000)
        made.append(load_decoder(name, copy.deepcopy(model), tokenizer=tokenizer, kv_budget=kv_budget, **options))
        return made[-1]

    yield load
    for decoder, cache in [(decoder, decoder.engine.cache) for decoder in made]:
        decoder.close()
        assert cache.live == 0


@dataclass
class Bench:
    """One target with decoders by method and draft, each on a separate copy. All slots must be free at the end."""

    target: Any
    tokenizer: Any
    kv_budget: int
    """Tokens, the default for engines."""
    engines: list[Engine] = field(default_factory=list)
    drafters: list[Drafter] = field(default_factory=list)
    decoders: list[LocalDecoder] = field(default_factory=list)
    stack: ExitStack = field(default_factory=ExitStack)

    def engine(self, kv_budget: int | None = None, chunk: int = 512) -> Engine:
        loaded = load_model(copy.deepcopy(self.target), tokenizer=self.tokenizer)
        self.engines.append(Engine(loaded, kv_budget or self.kv_budget, chunk))
        return self.engines[-1]

    def ar(self, engine: Engine | None = None) -> LocalDecoder:
        return load_decoder("ar", engine=engine or self.engine())

    def expected(self, requests: Sequence[Request]) -> list[tuple[int, ...]]:
        """Return the tokens of plain decoding."""
        return [completion.tokens for completion in self.ar().generate(requests)]

    def seed(self, draft: Any = None, engine: Engine | None = None, **options: Any) -> LocalDecoder:
        self.decoders.append(load_decoder("seed", engine=engine or self.engine(), draft=draft, **options))
        return self.decoders[-1]

    def speculative(
        self, name: str, draft: Any, engine: Engine | None = None, kv_budget: int | None = None, **options: Any
    ) -> LocalDecoder:
        """Create a speculative decoder. `draft` is lookup, same, near, far or a model; `kv_budget` is the
        draft's."""
        engine = engine or self.engine()
        drafter = self.drafter(draft, engine, kv_budget)
        self.decoders.append(load_decoder(name, engine=engine, draft=drafter, **options))
        return self.decoders[-1]

    def drafter(self, draft: Any, engine: Engine, kv_budget: int | None) -> Drafter:
        model = self.model(draft) if isinstance(draft, str) else draft
        if model is not None and kv_budget is not None:
            return self._drafting(model, kv_budget)
        self.drafters.append(make_drafter(model, engine, self.stack))
        return self.drafters[-1]

    def model_drafter(self, noise: float = 0.0) -> ModelDrafter:
        """Create a drafter from the target with optional noise on its weights."""
        return self._drafting(self.noisy(noise), 4000)

    def _drafting(self, model: Any, kv_budget: int) -> ModelDrafter:
        drafter = ModelDrafter(load_model(model, tokenizer=self.tokenizer), kv_budget, self.target.config.vocab_size)
        self.drafters.append(drafter)
        return drafter

    def model(self, draft: str) -> Any:
        """Return a draft model: a copy of the target, one that is often right, or one unrelated to it."""
        if draft == "lookup":
            return None
        noise, scale = {"same": (0.0, 1.0), "near": (0.02, 1.0), "far": (0.3, 0.0)}[draft]
        return self.noisy(noise, scale)

    def noisy(self, noise: float, scale: float = 1.0) -> Any:
        """Return a copy of the target whose weights are scaled by `scale`, plus noise of the given deviation."""
        model = copy.deepcopy(self.target)
        generator = torch.Generator().manual_seed(5)
        for weight in model.parameters():
            weight.data = weight * scale + torch.randn(weight.shape, generator=generator) * noise
        return model

    def close(self) -> None:
        for engine in self.engines:
            engine.close()
            assert engine.cache.live == 0
        for decoder in self.decoders:
            decoder.close()
        self.stack.close()
        for drafter in self.drafters:
            if isinstance(drafter, ModelDrafter):
                assert drafter.runner.cache.live == 0


@pytest.fixture
def make_bench(make_model: Callable[..., Any], tokenizer: Any) -> Iterator[Callable[..., Bench]]:
    """Create benches on readable models: make_bench("qwen2", kv_budget=3000)."""
    made: list[Bench] = []

    def make(family: str = "llama", kv_budget: int = 4000) -> Bench:
        made.append(Bench(make_model(family, readable=True), tokenizer, kv_budget))
        return made[-1]

    yield make
    for bench in made:
        bench.close()


@pytest.fixture(scope="session")
def mixed_requests() -> Callable[..., list[Request]]:
    """Create requests of all kinds: prompts with and without shared prefixes, of many lengths, greedy or sampled, with
    stop strings, several samples, triggers and choices."""
    text = "The sum of 10 and 11 is in the range on and on, and the other one: " * 2

    def make(count: int, seed: int) -> list[Request]:
        rng = random.Random(seed)
        requests = []
        for i in range(count):
            start = rng.choice(["", text[: rng.randint(1, len(text))], text, "10 "])
            prompt = start + rng.choice(["and", " 10", "abc"])
            heat = rng.choice([0.0, 0.6, 1.0])
            kind = rng.choice(["plain", "plain", "plain", "trigger", "choices", "both"])
            sampling = Sampling(
                max_tokens=rng.choice([1, 2, rng.randint(3, 24), 40]),
                temperature=heat,
                top_p=rng.choice([0.9, 1.0]),
                top_k=rng.choice([0, 0, 5]),
                stop=rng.choice([(), (), (" t", "on"), ("a", "10", "e")]),
                seed=rng.choice([7, i]),
                n=1 if kind == "choices" else rng.choice([1, 1, 2, 3]),
                ignore_eos=rng.random() < 0.4,
            )
            more: dict[str, Any] = {}
            if kind in ("trigger", "both"):
                more |= {"answer_trigger": " So the answer is", "answer_tokens": rng.randint(1, 9)}
            if kind in ("choices", "both"):
                more |= {"choices": ("1", "10", " the"), "close_choices": rng.random() < 0.5}
            requests.append(Request(prompt=prompt, sampling=sampling, **more))
        return requests

    return make


@pytest.fixture
def mixed(mixed_requests: Callable[..., list[Request]]) -> list[Request]:
    return mixed_requests(14, seed=4)
