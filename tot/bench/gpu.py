"""`tot bench gpu`: what packing brings on a GPU, on a model of 7B's sizes with random weights, in minutes.

Samples of one prompt at T = 1, packed, against `generate` of as many sequences, as it comes: sdpa attention, and a
cache that grows with every token. Beside it, what the device can do at most.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from tot.bench.engines import generate, replay
from tot.bench.harness import RATE, Bench, Results, Side, by_column
from tot.bench.options import GPUOptions
from tot.bench.workloads import Waves, branches, rows
from tot.decoders.decoder import load_decoder
from tot.decoders.engine.engine import Engine
from tot.decoders.errors import OptionError
from tot.decoders.models.loading import LoadedModel, quiet_transformers, resolve_device
from tot.machine import describe, limit, matrix_rate, read_bandwidth

PROMPT = 400
"""Tokens."""
WARM_UP = 8
"""New tokens of warm-ups, which are all rounds' shapes but for the length."""
_SPARE = 16
"""Slots that a branch may take beyond its new tokens."""
_HELD = 1.25
"""Keys and values that transformers holds at most, over those of all branches: it copies a layer's to add to them."""


def _sizes(hidden: int, between: int, layers: int, heads: int, context: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": between,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": context,
        **more,
    }


SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-2-7b": ("llama", _sizes(4096, 11008, 32, 32, 4096, vocab_size=32000, rms_norm_eps=1e-5)),
    "qwen2.5-7b": (
        "qwen2",
        _sizes(3584, 18944, 28, 28, 32768, vocab_size=152064, num_key_value_heads=4, rope_theta=1e6),
    ),
    # Heads so small that no kernel in C takes them: a CPU goes the way that a GPU goes.
    "tiny": ("llama", _sizes(128, 64, 2, 8, 512, vocab_size=512)),
}
"""Families, and sizes as in config.json."""


def build(name: str, device: torch.device) -> Any:
    """A model in bfloat16 whose weights never were anywhere but on `device`. No token ends a text."""
    family, sizes = SHAPES[name]
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "tie_word_embeddings": False}
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes, **ends), dtype=torch.bfloat16)
    return model.eval().requires_grad_(False)


def make_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Every byte a token, and as many made-up words as the vocabulary has room for. Nothing merges."""
    spelled = [*sorted(pre_tokenizers.ByteLevel.alphabet())]
    spelled += [f"Ġw{i}" for i in range(vocabulary - len(spelled))]
    backend = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(spelled)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def twin(model: Any) -> Any:
    """The same weights in modules of their own, for transformers: an engine changes a model's attention."""
    return copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})


def run(asked: GPUOptions, console: Console) -> None:
    """Measure, write and print. Raises OptionError without a GPU, but for the tiny model on a CPU."""
    if asked.device != "cpu" and not torch.cuda.is_available():
        raise OptionError("torch finds no CUDA device here: try it on a CPU with --model tiny --device cpu")
    if asked.device == "cpu" and asked.model != "tiny":
        raise OptionError(f"{asked.model} would take hours on a CPU: give --model tiny, or a GPU")
    device = resolve_device(asked.device)
    with Bench(asked, console, describe(device, torch.bfloat16)) as bench, quiet_transformers():
        model = build(asked.model, device)
        theirs, tokenizer = twin(model), make_tokenizer(model.config.vocab_size)
        _limits(model, bench)
        _packed(asked, bench, LoadedModel(model, tokenizer, asked.model, model.dtype, model.device), theirs)


def _limits(model: Any, bench: Bench) -> None:
    """What this device can do at most, and how long a step of one row takes at least."""
    size, side = (2**30, 8192) if model.device.type == "cuda" else (2**24, 256)
    bandwidth, rate = read_bandwidth(model.device, size), matrix_rate(model.dtype, model.device, side)
    embeddings = model.get_input_embeddings().weight  # of which a forward reads a few rows
    read = sum(int(weight.nbytes) for weight in model.parameters() if weight is not embeddings)
    least = limit(read, read, bandwidth, rate)  # two bytes and two operations a weight
    bench.keep(limits={"weight_bytes": read, "read_bandwidth": bandwidth, "matrix_rate": rate, "seconds_a_step": least})
    bench.show(
        f"{read / 1e9:.1f} GB of weights, read at {bandwidth / 1e9:.0f} GB/s; {rate / 1e12:.1f} TFLOP/s: "
        f"{1000 * least:.2f} ms a step at least"
    )


def _packed(asked: GPUOptions, bench: Bench, ours: LoadedModel, theirs: Any) -> None:
    """What takes too long is done once or left out, and so are sides that fail."""
    title = f"{asked.model}: new tokens/s, samples of one prompt at T = 1"
    generator = torch.Generator().manual_seed(0)

    def asking(count: int, new: int) -> Waves:
        """A prompt of random tokens that no one has seen."""
        prompt = torch.randint(ours.model.config.vocab_size, (PROMPT,), generator=generator)
        return branches(prompt.tolist(), count, new)

    def table(results: Results) -> Table:
        return by_column(results, RATE, title, head="branches: ", ratios=[("tot", "generate")])

    # Room for the most branches, and no more: transformers needs the rest.
    slots = 2 * PROMPT + max(asked.branches) * (asked.new_tokens + _SPARE)
    with Engine(ours, kv_budget=slots) as engine:
        most = _fitting(theirs, engine.runner.slot_bytes, asked.new_tokens)
        bench.compare(
            title,
            [
                Side("tot", partial(replay, load_decoder("ar", engine=engine))),
                Side("generate", partial(generate, theirs), most=most),
            ],
            lambda count, _: asking(count, asked.new_tokens),
            columns=asked.branches,
            rounds=asked.rounds,
            warm_up=lambda count: asking(count, min(WARM_UP, asked.new_tokens)),
            size=rows,
            patience=asked.patience,
            failing=True,
            table=table,
        )


def _fitting(model: Any, slot_bytes: int, new: int) -> int | None:
    """The most branches whose keys and values, and their prompts' activations, have room beside what is held."""
    if model.device.type != "cuda":
        return None
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(model.device)
    kept = _HELD * slot_bytes * (PROMPT + new)
    passing = 4 * PROMPT * model.dtype.itemsize * model.config.intermediate_size
    return max(1, int(0.95 * free / (kept + passing)))
