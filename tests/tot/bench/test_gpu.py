"""`tot bench gpu`: what it writes and what it refuses, and random models of published sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tot.bench.gpu import build, make_tokenizer, twin
from tot.cli.app import main
from tot.decoders import Engine
from tot.decoders.models.loading import LoadedModel

pytestmark = pytest.mark.benches


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def test_every_part_is_measured_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "numbers.json"
    options = ["--new-tokens", "8", "--branches", "4,1", "--rounds", "1"]
    assert main(["bench", "gpu", "--model", "tiny", "--device", "cpu", *options, "--out", str(out)]) == 0
    numbers = json.loads(out.read_text())
    printed = capsys.readouterr().out
    assert numbers["finished"]
    assert numbers["limits"]["weight_bytes"] < 10**6 < numbers["limits"]["read_bandwidth"]
    packed = numbers["tiny: new tokens/s, samples of one prompt at T = 1"]["cells"]
    assert [(cell["side"], cell["column"], cell["tokens"]) for cell in packed] == [
        ("tot", 1, 8),
        ("generate", 1, 8),
        ("tot", 4, 32),
        ("generate", 4, 32),
    ]
    assert "tot / generate" in printed


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--device", "cuda"], "torch finds no CUDA device here"),
        (["--device", "cpu"], "llama-2-7b would take hours on a CPU"),
        (["--model", "tinny", "--device", "cpu"], "'tinny' is not one of"),
        (["--branches", "0,4"], "option branches: Input should be greater than 0"),
    ],
)
def test_bad_options_are_refused_before_anything_is_made(
    options: list[str],
    said: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    out = tmp_path / "numbers.json"
    assert main(["bench", "gpu", *options, "--out", str(out)]) == 2
    assert said in " ".join(capfd.readouterr().err.split())
    assert not out.exists()


@pytest.mark.parametrize(
    ("name", "family", "parameters"), [("llama-2-7b", "llama", 6_738_415_616), ("qwen2.5-7b", "qwen2", 7_615_616_512)]
)
def test_shapes_have_the_published_numbers_of_parameters(name: str, family: str, parameters: int) -> None:
    model = build(name, torch.device("meta"))
    assert sum(weight.numel() for weight in model.parameters()) == parameters
    assert model.config.model_type == family
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    assert {weight.device.type for weight in model.parameters()} == {"meta"}


def test_a_twin_has_the_same_weights_and_keeps_its_own_attention() -> None:
    target = build("tiny", torch.device("cpu"))
    other = twin(target)
    ids = torch.arange(20)[None]
    before = other(input_ids=ids).logits
    with Engine(LoadedModel(target, make_tokenizer(512), "tiny", target.dtype, target.device), kv_budget=100):
        assert torch.equal(other(input_ids=ids).logits, before)
    places = [weight.data_ptr() for weight in target.parameters()]
    assert [weight.data_ptr() for weight in other.parameters()] == places


def test_every_token_has_a_text_of_its_own() -> None:
    tokenizer = make_tokenizer(512)
    assert len(tokenizer) == 512
    assert len({tokenizer.convert_ids_to_tokens(i) for i in range(512)}) == 512
    assert tokenizer("a b")["input_ids"] == [tokenizer.convert_tokens_to_ids(text) for text in ("a", "Ġ", "b")]
