"""Consistency training of a tiny model: more tokens per forward with the same text.

A stopped run resumes to the same result, and a diverging run stops before it damages its checkpoint.
"""

from __future__ import annotations

import copy
import json
import math
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tot.decoders import Engine, ModelError, OptionError, Request, Sampling, load_decoder, load_model
from tot.decoders.training.cllm.settings import CollectOptions, TrainOptions
from tot.decoders.training.cllm.train import CHECKPOINT, CURVE, train
from tot.decoders.training.cllm.trajectories import collect

pytestmark = pytest.mark.training

LONG = "The sum of 10 and 11 is in the range on and on, and the other one: "
WORDS = ("alpha", "bravo", "delta", "gamma", "omega", "sigma", "theta", "kappa")
SMALL = TrainOptions(epochs=3, learning_rate=3e-3, accumulate=3)
"""For the ten texts of `data`: twelve steps."""


@pytest.fixture(autouse=True)
def _checkpoint_after_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tot.decoders.training.cllm.train._MOST_LOST", 0.0)


class Folders(NamedTuple):
    base: Path
    data: Path
    trained: Path


# -- a grammar -------------------------------------------------------------------------------------


def spelled(chance: random.Random) -> tuple[str, str]:
    """Return a key of four letters, and the words that the letters stand for."""
    key = [chance.randrange(8) for _ in range(4)]
    return "".join("abcdefgh"[i] for i in key) + "=", " ".join(WORDS[i] for i in key) + "."


def ask(prompt: str) -> Request:
    return Request(prompt=prompt, sampling=Sampling(max_tokens=40))


@pytest.fixture(scope="module")
def spelling(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Train a Llama of 0.6M weights on the grammar from scratch, then with consistency training."""
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocabulary = [*control, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(vocabulary)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", additional_special_tokens=control[:2]
    )
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=2,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model, chance, steps = LlamaForCausalLM(config), random.Random(0), 130
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    for step in range(steps):
        texts = [tokenizer("".join(spelled(chance)) + "<|im_end|>")["input_ids"] for _ in range(32)]
        longest = max(map(len, texts))
        rows = torch.tensor([text + [2] * (longest - len(text)) for text in texts])
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1, (step + 1) / 20) * (1 - step / steps)
        model(input_ids=rows, labels=rows).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    root = tmp_path_factory.mktemp("spelling")
    model.eval().save_pretrained(root / "base")
    tokenizer.save_pretrained(root / "base")

    chance = random.Random(1)
    with Engine(load_model(root / "base", dtype="fp32"), 4000) as engine:
        collect(engine, (ask(spelled(chance)[0]) for _ in range(128)), root / "data", CollectOptions())
    options = TrainOptions(epochs=4, learning_rate=1e-3)
    train(load_model(root / "base", dtype="fp32"), root / "data", root / "trained", options)
    return Folders(root / "base", root / "data", root / "trained")


def measured(folder: Path) -> tuple[float, float]:
    """Return tokens per forward and accuracy on prompts that were not trained on."""
    pairs = [spelled(random.Random(1000 + i)) for i in range(40)]
    with load_decoder("jacobi", folder, dtype="fp32", n=16, adapt=False, kv_budget=4000) as decoder:
        got = decoder.generate([ask(prompt) for prompt, _ in pairs])
    forwards = sum(one.usage.forwards for one in got)
    right = [one.text == answer for one, (_, answer) in zip(got, pairs, strict=True)]
    return sum(len(one.tokens) for one in got) / forwards, sum(right) / len(right)


def test_consistency_training_saves_forwards_and_keeps_the_answers(spelling: Folders) -> None:
    before, right = measured(spelling.base)
    assert right >= 0.95
    after, still_right = measured(spelling.trained)
    assert after >= 1.5 * before
    assert still_right >= 0.9


@pytest.mark.parametrize("n", [5, 16])
def test_the_saved_model_writes_the_same_by_jacobi_and_ar(spelling: Folders, n: int) -> None:
    requests = [ask(spelled(random.Random(2000 + i))[0]) for i in range(12)]
    with load_decoder("ar", spelling.trained, dtype="fp32", kv_budget=4000) as decoder:
        expected = decoder.generate(requests)
    with load_decoder("jacobi", spelling.trained, dtype="fp32", n=n, kv_budget=4000) as decoder:
        got = decoder.generate(requests)
    assert [(one.tokens, one.text) for one in got] == [(one.tokens, one.text) for one in expected]


def test_a_run_leaves_a_model_its_tokenizer_and_the_losses(spelling: Folders) -> None:
    names = {path.name for path in spelling.trained.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", CURVE} <= names
    assert not any("checkpoint" in name or "partial" in name for name in names)
    lines = curve(spelling.trained)
    assert [line["step"] for line in lines] == list(range(1, 129))  # 128 texts, four per step, four epochs
    for line in lines:
        assert line["loss"] == pytest.approx(line["consistency"] + 10 * line["ar"])
    assert mean(lines[-8:], "consistency") < 0.5 * mean(lines[:8], "consistency")
    assert mean(lines[-8:], "ar") < 0.1


# -- training on a random model --------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _any_seed() -> None:
    """Randomize torch's seed, because no test may depend on it."""
    torch.seed()


@pytest.fixture(scope="module")
def model(make_model: Callable[..., Any]) -> Any:
    return make_model()


@pytest.fixture
def fresh(model: Any, tokenizer: Any) -> Callable[[], Any]:
    """Return a function that loads the untrained model."""
    return lambda: load_model(copy.deepcopy(model), tokenizer=tokenizer)


@pytest.fixture(scope="module")
def data(model: Any, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with trajectories of ten texts."""
    folder = tmp_path_factory.mktemp("data")
    requests = [
        Request(prompt=LONG[i:], sampling=Sampling(max_tokens=30, temperature=1.0, seed=i, ignore_eos=True))
        for i in range(10)
    ]
    reports = []
    with Engine(load_model(copy.deepcopy(model), tokenizer=tokenizer), 4000) as engine:
        collect(engine, requests, folder, CollectOptions(n=6), lambda *counts: reports.append(counts))
    assert reports[-1][::2] == (10, 0)
    return folder


def curve(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / CURVE).read_text().splitlines()]


def mean(lines: list[dict[str, float]], name: str) -> float:
    return sum(line[name] for line in lines) / len(lines)


def weights(path: Path) -> dict[str, Tensor]:
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping


def assert_same_run(one: Path, other: Path) -> None:
    ours, theirs = weights(one / "model.safetensors"), weights(other / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert (one / CURVE).read_text() == (other / CURVE).read_text()


def stop_at(last: int) -> Callable[..., None]:
    def tell(step: int, *_: float) -> None:
        if step == last:
            raise KeyboardInterrupt

    return tell


@pytest.fixture
def stopped(fresh: Any, data: Path, tmp_path: Path) -> Callable[..., Path]:
    """Return a function that runs training and stops it at the given steps, one after another."""

    def run(*steps: int, **change: Any) -> Path:
        for last in steps:
            with pytest.raises(KeyboardInterrupt):
                train(fresh(), data, tmp_path / "stopped", SMALL.model_copy(update=change), stop_at(last))
        return tmp_path / "stopped"

    return run


@pytest.mark.parametrize("change", [{}, {"lora": 4}], ids=str)
def test_a_stopped_run_ends_like_an_uninterrupted_one(
    fresh: Any, data: Path, tmp_path: Path, stopped: Any, change: dict[str, Any]
) -> None:
    options = SMALL.model_copy(update=change)
    heard: list[int] = []
    train(fresh(), data, tmp_path / "whole", options)
    out = stopped(1, 4, 9, **change)
    assert not (out / "model.safetensors").exists()
    train(fresh(), data, out, options, lambda step, *_: heard.append(step))
    assert heard == [9, 10, 11, 12]  # resumes from the checkpoint after eight steps, in mid-epoch
    assert_same_run(tmp_path / "whole", out)
    assert len(curve(out)) == 12
    assert not list(out.glob("*.tmp"))
    assert not (out / CHECKPOINT).exists()


def test_resuming_with_other_weights_is_refused(fresh: Any, data: Path, stopped: Any) -> None:
    out = stopped(4)
    for lora in (4, 2):
        with pytest.raises(OptionError, match=f"{out} was started with other options: resume with the same"):
            train(fresh(), data, out, SMALL.model_copy(update={"lora": lora}))


def test_lora_saves_a_plain_model(fresh: Any, data: Path, tmp_path: Path, model: Any) -> None:
    train(fresh(), data, tmp_path / "out", SMALL.model_copy(update={"lora": 4}))
    lines = curve(tmp_path / "out")
    assert mean(lines[-4:], "loss") < mean(lines[:4], "loss")
    saved, before = weights(tmp_path / "out" / "model.safetensors"), model.state_dict()
    assert saved.keys() <= before.keys()
    assert not (tmp_path / "out" / "adapter_config.json").exists()
    changed = {name for name in saved if not torch.equal(saved[name], before[name])}
    assert changed
    assert all(name.endswith("_proj.weight") for name in changed)
    for name in changed:
        assert torch.linalg.matrix_rank(saved[name] - before[name], rtol=1e-4) <= 4
    with load_decoder("jacobi", tmp_path / "out", dtype="fp32", kv_budget=1000) as decoder:
        (got,) = decoder.generate([Request(prompt="abc", sampling=Sampling(max_tokens=8, ignore_eos=True))])
    assert len(got.tokens) == 8


# -- failures --------------------------------------------------------------------------------------


def test_a_poisoned_run_stops_and_keeps_the_last_good_checkpoint(fresh: Any, data: Path, tmp_path: Path) -> None:
    loaded = fresh()

    def poison(step: int, *_: float) -> None:
        if step == 6:
            loaded.model.lm_head.weight.data[0, 0] = math.nan

    with pytest.raises(ModelError, match=rf"the loss is nan .* at step 7: the last good checkpoint is in {tmp_path}"):
        train(loaded, data, tmp_path, SMALL, poison)
    checkpoint = torch.load(tmp_path / CHECKPOINT, weights_only=True)
    assert all(value.isfinite().all() for value in checkpoint["weights"].values())
    assert checkpoint["step"] == 5
    assert not (tmp_path / "model.safetensors").exists()
    train(fresh(), data, tmp_path / "whole", SMALL)
    train(fresh(), data, tmp_path, SMALL)
    assert_same_run(tmp_path, tmp_path / "whole")


def test_without_peft_the_extra_is_named(
    fresh: Any, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "peft", None)
        with pytest.raises(OptionError, match="lora needs peft: pip install peft"):
            train(fresh(), data, tmp_path, SMALL.model_copy(update={"lora": 4}))
