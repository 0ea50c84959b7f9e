"""The forward in C against the model itself, for each family it knows; weights in eight bits."""

from __future__ import annotations

import copy
import ctypes
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn

from tot.decoders import OptionError, Request, Sampling, load_decoder
from tot.decoders.engine.runner import Chunk, Runner
from tot.decoders.kernels import forward, native, tiles
from tot.decoders.kernels.backend import TransformersForward, open_backend
from tot.decoders.kernels.forward import NativeForward, native_forward
from tot.decoders.kernels.packing import quantized
from tot.decoders.kernels.tiles import kernel_options

VOCAB = 300
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}


@pytest.fixture(autouse=True)
def _there_is_one(request: pytest.FixtureRequest) -> None:
    able = kernel_options(16, 1, torch.float32, torch.device("cpu")) is not None
    if not (able and native.library("draw", "-O3", "-fopenmp")):
        pytest.skip("needs a C compiler, and a processor with AVX-512")


@pytest.fixture
def known(make_model: Callable[..., Any]) -> Callable[..., Any]:
    """A family -> a tiny model whose forward there is in C; its norms and biases matter."""

    def make(family: str = "llama", **changes: Any) -> Any:
        model = make_model(family, **{**WIDE, "num_attention_heads": 4, **changes})
        torch.manual_seed(1)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.data = 1 + 0.3 * torch.randn_like(parameter)
            elif name.endswith("bias"):
                parameter.data = torch.randn_like(parameter)
        return model

    return make


def text(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


def computed(runner: Runner, texts: list[list[int]], reads: int = 1) -> list[Tensor]:
    """The logits of the last `reads` tokens of texts computed in one forward."""
    with torch.inference_mode():
        branches = [runner.cache.open(tokens) for tokens in texts]
        result = runner.forward([Chunk(branch, 0, len(branch), [0] * reads) for branch in branches])
        for branch in branches:
            runner.cache.rollback(branch, 0)
        runner.cache.clear()
    return [result.logits[rows] for rows in result.rows]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rounded", [False, True])
def test_it_gives_the_logits_of_the_model(
    known: Callable[..., Any], logits_alone: Callable[..., Tensor], family: str, rounded: bool
) -> None:
    model = known(family)
    if rounded:
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16().float()
    reference, runner = copy.deepcopy(model), Runner(model, 6000)
    assert isinstance(runner.backend, NativeForward)
    assert runner.backend.weights == ("bfloat16" if rounded else "float32")
    for count in (1, 2, 3, 4, 5, 7, 12, 13, 26):
        texts = [text(20 + 9 * i, seed=count + i) for i in range(count)]
        for tokens, logits in zip(texts, computed(runner, texts), strict=True):
            expected = logits_alone(reference, tokens)[-1]
            torch.testing.assert_close(logits[0], expected, atol=1e-3, rtol=1e-4)
    runner.close()


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
        {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
        },
    ],
)  # fmt: skip
def test_positions_are_turned_as_the_model_turns_them_however_far(
    known: Callable[..., Any], logits_alone: Callable[..., Tensor], rope: dict[str, Any]
) -> None:
    model = known(rope_parameters={"rope_theta": 10_000.0, **rope}, max_position_embeddings=4096)
    reference, runner = copy.deepcopy(model), Runner(model, 4000)
    assert isinstance(runner.backend, NativeForward)
    for length in (30, 1100, 700, 2300):  # more than are computed at once, and less again
        tokens = text(length, seed=length)
        torch.testing.assert_close(
            computed(runner, [tokens])[0][0], logits_alone(reference, tokens)[-1], atol=2e-3, rtol=1e-4
        )
    runner.close()


@pytest.fixture
def halved(known: Callable[..., Any]) -> Callable[..., Any]:
    """The same in bfloat16."""
    if kernel_options(32, 1, torch.bfloat16, torch.device("cpu")) is None:
        pytest.skip("needs a processor with bfloat16 products")

    def make(family: str = "llama") -> Any:
        return known(family, head_dim=32).bfloat16()

    return make


@pytest.mark.parametrize("family", FAMILIES)
def test_in_bfloat16_it_is_no_further_from_the_truth_than_the_model(
    halved: Callable[..., Any], logits_alone: Callable[..., Tensor], family: str
) -> None:
    model = halved(family)
    truth, plain = copy.deepcopy(model).float(), copy.deepcopy(model)
    runner = Runner(model, 6000)
    assert isinstance(runner.backend, NativeForward)
    assert runner.backend.weights == "bfloat16"
    ours, theirs = [], []
    for count in (1, 2, 5, 12, 13, 26):
        texts = [text(20 + 9 * i, seed=count + i) for i in range(count)]
        for tokens, logits in zip(texts, computed(runner, texts), strict=True):
            expected = logits_alone(truth, tokens)[-1]
            ours.append(logits[0] - expected)
            theirs.append(logits_alone(plain, tokens)[-1] - expected)
            assert torch.corrcoef(torch.stack([logits[0], expected]))[0, 1] > 0.99
    assert torch.stack(ours).square().mean() < torch.stack(theirs).square().mean()
    runner.close()


@pytest.mark.parametrize("quantize", ["int8", "int8-dynamic"])
def test_in_bfloat16_many_rows_meet_the_rounded_weights_as_bfloat16(halved: Callable[..., Any], quantize: Any) -> None:
    """Up to 16 rows are rounded to be multiplied by whole numbers; more are multiplied as bfloat16."""
    rounded = halved()
    for layer in rounded.modules():
        if isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(unpacked(*quantized(layer.weight.data)).bfloat16())
    texts = [[i] for i in range(33)]
    exact, runner, plain = Runner(rounded, 1000), Runner(halved(), 1000, quantize), Runner(halved(), 1000)
    for many in (17, 33):
        expected = torch.cat(computed(exact, texts[:many]))
        # A product may be rounded to the other of two bfloat16 numbers where it is in the middle between them.
        torch.testing.assert_close(torch.cat(computed(runner, texts[:many])), expected, atol=0.02, rtol=0)
        assert (expected - torch.cat(computed(plain, texts[:many]))).abs().max() > 0.1
    assert isinstance(exact.backend, NativeForward)
    assert isinstance(runner.backend, NativeForward)
    few, bits = torch.cat(computed(runner, texts[:16])), torch.cat(computed(exact, texts[:16]))
    assert not torch.equal(few, bits)
    assert (few - bits).std() < 0.1 * bits.std()


def test_it_is_the_model_that_is_asked_again_once_the_runner_is_closed(known: Callable[..., Any]) -> None:
    model = known()
    tokens = torch.tensor([text(12)])
    before = model(tokens).logits
    runner = Runner(model, 100)
    computed(runner, [text(12)])
    runner.close()
    assert torch.equal(model(tokens).logits, before)


@pytest.mark.parametrize("quantize", [None, "int8", "int8-dynamic"])
def test_a_row_does_not_depend_on_how_many_there_are(known: Callable[..., Any], quantize: Any) -> None:
    """Bit for bit: 26 rows are cut into blocks otherwise than one."""
    runner = Runner(known(), 3000, quantize)
    texts = [[i] for i in range(26)]  # nothing before them, so that attention is no sum
    together = computed(runner, texts)
    for tokens, logits in zip(texts, together, strict=True):
        for company in (0, 1, 4, 6):
            beside = [[100 + i] for i in range(company)]
            assert torch.equal(computed(runner, [tokens, *beside])[0], logits)


@pytest.mark.parametrize("quantize", [None, "int8", "int8-dynamic"])
def test_threads_change_no_bit(known: Callable[..., Any], quantize: Any) -> None:
    runner = Runner(known(), 3000, quantize)
    texts = [text(40, seed=i) for i in range(7)]
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(torch.cat(computed(runner, texts, reads=3)))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_nothing_may_be_read(known: Callable[..., Any]) -> None:
    """A chunk of a prompt: its keys and values are wanted, no logits."""
    runner = Runner(known(), 200)
    tokens = text(30)
    whole = computed(runner, [tokens])[0]
    with torch.inference_mode():
        branch = runner.cache.open(tokens)
        assert len(runner.forward([Chunk(branch, 0, 20)]).logits) == 0
        logits = runner.forward([Chunk(branch, 20, 30, [0])]).logits
    torch.testing.assert_close(logits, whole, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_long_run_of_forks_rollbacks_and_evictions(
    known: Callable[..., Any], logits_alone: Callable[..., Tensor], family: str
) -> None:
    model = known(family)
    reference, runner, rng = copy.deepcopy(model), Runner(model, 400), random.Random(7)
    cache, branches = runner.cache, []
    closed: list[list[int]] = []
    kept = evicted = 0
    for step in range(120):
        if len(branches) < 2 or (len(branches) < 5 and rng.random() < 0.3):
            again = bool(closed) and rng.random() < 0.5
            branches.append(cache.open(rng.choice(closed) if again else text(rng.randint(5, 60), seed=step)))
            kept += again and cache.computed_length(branches[-1]) > 0
            evicted += again and cache.computed_length(branches[-1]) == 0
        chosen = rng.choice(branches)
        match rng.choice(["fork", "extend", "extend", "rollback", "close"]):
            case "fork" if len(branches) < 6:
                branches.append(cache.fork(chosen))
                cache.extend(branches[-1], text(rng.randint(1, 4), seed=-step))
            case "rollback":
                cache.rollback(chosen, rng.randint(1, len(chosen)))
            case "close" if len(branches) > 2:
                closed.append(cache.tokens(chosen))
                cache.rollback(chosen, 0)
                branches.remove(chosen)
            case _ if len(chosen) < 65:
                cache.extend(chosen, text(rng.randint(1, 5), seed=1000 + step))
        with torch.inference_mode():
            starts = [min(cache.computed_length(branch), len(branch) - 1) for branch in branches]
            feeds = [Chunk(branch, start, len(branch), [0]) for branch, start in zip(branches, starts, strict=True)]
            result = runner.forward(feeds)
        i = rng.randrange(len(branches))
        expected = logits_alone(reference, cache.tokens(branches[i]))[-1]
        torch.testing.assert_close(result.logits[result.rows[i][0]], expected, atol=1e-3, rtol=1e-4)
    assert kept
    assert evicted
    runner.close()


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gemma", {}),
        ("phi3", {}),
        ("llama", {"hidden_act": "gelu"}),
        ("llama", {"head_dim": 12}),
        ("llama", {"hidden_size": 40}),
        ("llama", {"intermediate_size": 50}),
        ("llama", {"num_attention_heads": 32, "num_key_value_heads": 1}),
    ],
)
def test_what_it_does_not_know_the_model_does(
    known: Callable[..., Any], logits_alone: Callable[..., Tensor], family: str, changes: dict[str, Any]
) -> None:
    model = known(family, **changes)
    reference, runner = copy.deepcopy(model), Runner(model, 300)
    assert isinstance(runner.backend, TransformersForward)
    torch.testing.assert_close(
        computed(runner, [text(20)])[0][0], logits_alone(reference, text(20))[-1], atol=1e-3, rtol=1e-4
    )
    runner.close()


def test_layers_that_do_more_than_multiply_are_the_models_own(known: Callable[..., Any]) -> None:
    class Adapted(nn.Linear):
        def forward(self, rows: Tensor) -> Tensor:
            return super().forward(rows) + 1

    model = known()
    layer = model.model.layers[0].mlp.down_proj
    model.model.layers[0].mlp.down_proj = Adapted(layer.in_features, layer.out_features, bias=False)
    runner = Runner(model, 100)
    assert isinstance(runner.backend, TransformersForward)
    runner.close()


def test_where_memory_is_short_the_weights_stay_as_they_are_and_that_is_told_once(
    known: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    native.log_once.cache_clear()
    model = known()
    numbers = sum(layer.weight.numel() for layer in model.modules() if isinstance(layer, nn.Linear))
    for spare, packed in ((2 * 4 * numbers, True), (2 * 4 * numbers - 1, False), (1000, False), (1000, False)):
        monkeypatch.setattr(psutil, "virtual_memory", lambda free=spare: SimpleNamespace(available=free))
        keys = [torch.zeros(2, 10, 16) for _ in range(2)]
        assert (native_forward(model, keys, keys) is not None) == packed
    assert caplog.messages == [
        "decoding is slower, as to pack the weights for the forward in C takes 0.0 GiB free, and there are 0.0: free "
        "some to decode faster"
    ]
    with pytest.raises(OptionError, match="memory for the packed weights"):
        open_backend(model, keys, keys, "int8")


# -- eight bits ---------------------------------------------------------------------------------------------------


def unpacked(whole: Tensor, scales: Tensor) -> Tensor:
    """What `quantized` stands for: (outputs, inputs)."""
    step, least = scales.unbind(-1)
    groups = whole.float().unflatten(1, (-1, 32))
    return (least[..., None] + groups * step[..., None]).flatten(1)


def test_weights_are_rounded_to_the_nearest_of_256_steps() -> None:
    weight = torch.randn(40, 96, generator=torch.Generator().manual_seed(0))
    whole, scales = quantized(weight)
    assert scales.shape == (40, 3, 2)
    groups = weight.unflatten(1, (-1, 32))
    step = (groups.amax(-1) - groups.amin(-1)) / 255
    error = (unpacked(whole, scales) - weight).abs().unflatten(1, (-1, 32))
    assert bool((error <= 0.501 * step[..., None]).all())
    assert int(whole.max()) == 255
    assert int(whole.min()) == 0


def test_weights_of_four_bits_are_met_exactly() -> None:
    """A least and 15 steps a group of 32, as in Q4_1: 255 is 17 times 15."""
    random = torch.Generator().manual_seed(0)
    levels = torch.randint(16, (32, 2, 32), generator=random).float()
    levels[..., 0], levels[..., 1] = 0, 15
    least, step = -torch.rand(32, 2, 1, generator=random), torch.rand(32, 2, 1, generator=random)
    weight = (least + step * levels).flatten(1)
    torch.testing.assert_close(unpacked(*quantized(weight)), weight, atol=1e-6, rtol=1e-6)


def test_a_group_of_equal_weights_is_met() -> None:
    weight = torch.full((32, 64), -0.25)
    assert torch.equal(unpacked(*quantized(weight)), weight)


@pytest.mark.parametrize(("quantize", "off"), [("int8", 2e-3), ("int8-dynamic", 0.3)])
@pytest.mark.parametrize("family", FAMILIES)
def test_eight_bits_give_what_the_rounded_weights_give(
    known: Callable[..., Any], logits_alone: Callable[..., Tensor], family: str, quantize: Any, off: float
) -> None:
    """Rounding what layers are given to 16 bits hardly shows, to 8 bits a little."""
    model = known(family)
    reference, runner = copy.deepcopy(model), Runner(model, 3000, quantize)
    assert isinstance(runner.backend, NativeForward)
    for layer in reference.modules():
        if isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(unpacked(*quantized(layer.weight.data)))
    for count in (1, 3, 8, 13):
        texts = [text(20 + 9 * i, seed=count + i) for i in range(count)]
        for tokens, logits in zip(texts, computed(runner, texts), strict=True):
            expected = logits_alone(reference, tokens)[-1]
            assert (logits[0] - expected).pow(2).mean().sqrt() < off * expected.std()
            assert expected.std() > 0.5
    runner.close()


def test_a_decoder_says_how_its_weights_are_kept_and_decodes(known: Callable[..., Any], tokenizer: Any) -> None:
    with load_decoder("ar", known(), tokenizer=tokenizer, kv_budget=100, quantize="int8") as decoder:
        assert decoder.engine.runner.backend.name == "C, weights kept in int8"
        (done,) = decoder.generate([Request(prompt="the rain", sampling=Sampling(max_tokens=5, ignore_eos=True))])
        assert len(done.tokens) == 5


def test_a_shared_engine_is_quantized_by_who_made_it(known: Callable[..., Any], tokenizer: Any) -> None:
    decoder = load_decoder("ar", known(), tokenizer=tokenizer, kv_budget=100)
    with decoder, pytest.raises(OptionError, match="quantize=int8 is for the engine that is shared"):
        load_decoder("ar", engine=decoder.engine, quantize="int8")


@pytest.mark.parametrize(
    ("quantize", "family", "said"),
    [
        ("int4", "llama", "quantization 'int4'"),
        ("int8", "gemma", "quantize=int8 needs a model of the families llama, mistral, qwen2, qwen3"),
    ],
)
def test_what_can_not_be_packed_is_refused(
    known: Callable[..., Any], tokenizer: Any, quantize: Any, family: str, said: str
) -> None:
    with pytest.raises(OptionError, match=said):
        load_decoder("ar", known(family), tokenizer=tokenizer, kv_budget=100, quantize=quantize)


@pytest.mark.parametrize("where", ["kernel", "forward"])
def test_where_python_and_c_disagree_on_a_structure_torch_computes(
    known: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    native.log_once.cache_clear()
    structure = tiles._Attention if where == "kernel" else forward._Batch
    longer = type("Longer", (ctypes.Structure,), {"_fields_": [*structure._fields_, ("more", ctypes.c_int64)]})
    if where == "kernel":
        monkeypatch.setattr(tiles, "SIZES", (*tiles.SIZES[:2], ctypes.sizeof(longer)))
        monkeypatch.setattr(forward, "SIZES", tiles.SIZES)
    else:
        monkeypatch.setattr(forward, "_Batch", longer)
    runner = Runner(known(), 100)
    assert isinstance(runner.backend, TransformersForward)
    assert runner.backend.name == f"transformers, attention in {'torch' if where == 'kernel' else 'C'}"
    assert f"{'attention' if where == 'kernel' else 'forward'}_sizes are" in caplog.text
    runner.close()
