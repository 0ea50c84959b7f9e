"""Distillation: the target's logprobs are recorded exactly, and a draft trains on them, also after an interruption."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from tot.decoders import Completion, Engine, Request, Sampling, load_decoder, load_model
from tot.decoders.decoder import LocalDecoder
from tot.decoders.methods.method import OpenedMethod
from tot.decoders.training.distill.record import TOP, Record, Recorder, load, save
from tot.decoders.training.distill.train import agreement, student, train
from tot.decoders.training.options import DraftOptions

pytestmark = pytest.mark.training

LONG = "The sum of 10 and 11 is in the range on and on, and the other one: "


@pytest.fixture
def target(make_model: Callable[..., Any]) -> Any:
    return make_model(readable=True)


@pytest.fixture
def engine(target: Any, tokenizer: Any) -> Iterator[Engine]:
    """An engine on a copy of the target, so that the target stays unmodified. All slots must be free at the end."""
    made = Engine(load_model(copy.deepcopy(target), tokenizer=tokenizer), 4000)
    yield made
    made.close()
    assert made.cache.live == 0


def recorded(engine: Engine, requests: Sequence[Request], window: int = 500) -> tuple[list[Record], list[Completion]]:
    recorder = Recorder(window)
    decoder = LocalDecoder("ar", engine, OpenedMethod(recorder.policy), ExitStack(), owns_engine=False)
    return recorder.records, decoder.generate(requests)


def requests(count: int = 4, tokens: int = 30, **settings: Any) -> list[Request]:
    heats = [0.0, 0.6, 1.0]
    sampling = {"max_tokens": tokens, "n": 2, **settings}
    return [
        Request(prompt=LONG[5 * i :], sampling=Sampling(seed=i, temperature=heats[i % 3], **sampling))
        for i in range(count)
    ]


@pytest.fixture
def assert_recorded(target: Any, logits_alone: Callable[..., Tensor]) -> Callable[[Record, Sequence[int], int], None]:
    """Check that a record is the end of a text, with the unmodified target's logprobs of its last tokens."""

    def check(record: Record, text: Sequence[int], count: int) -> None:
        tokens = record.tokens.tolist()
        assert tokens == list(text)[-len(tokens) :]
        assert len(tokens) - record.first == len(record.top) == len(record.logprobs) == count
        logprobs = logits_alone(target, list(text))[-1 - count : -1].log_softmax(
            -1
        )  # for each position except the last
        assert record.top.shape == record.logprobs.shape == (count, TOP)
        assert torch.allclose(record.logprobs.float(), logprobs.topk(TOP).values, atol=0.02, rtol=2e-3)  # float16
        assert torch.allclose(record.logprobs.float(), logprobs.gather(1, record.top.long()), atol=0.02, rtol=2e-3)
        assert (record.tokens.dtype, record.top.dtype, record.logprobs.dtype) == (
            torch.int32,
            torch.int32,
            torch.float16,
        )

    return check


# -- recording -------------------------------------------------------------------------------------


def test_recording_changes_no_token(engine: Engine) -> None:
    submitted = [*requests(), *requests(2, ignore_eos=True, stop=(" t", "e"))]
    expected = load_decoder(engine=engine).generate(submitted)
    records, got = recorded(engine, submitted)
    assert [(one.tokens, one.text) for one in got] == [(one.tokens, one.text) for one in expected]
    assert [one.logprob for one in got] == pytest.approx([one.logprob for one in expected], abs=1e-4)
    assert len(records) == len(got)


def texts_of(engine: Engine, submitted: Sequence[Request], got: Sequence[Completion]) -> dict[tuple[int, ...], int]:
    """Map all tokens of each prompt and completion to the number of sampled ones."""
    prompts = [engine.codec.encode_prompt(request.prompt) for request in submitted for _ in range(request.sampling.n)]
    return {(*prompt, *one.tokens): len(one.tokens) for prompt, one in zip(prompts, got, strict=True)}


def test_records_hold_the_models_own_logprobs(engine: Engine, assert_recorded: Any) -> None:
    submitted = requests(ignore_eos=True)
    records, got = recorded(engine, submitted)
    texts = texts_of(engine, submitted, got)
    for record in records:
        text = tuple(record.tokens.tolist())
        assert_recorded(record, text, texts[text])
    assert len(records) == len(got) == 8


@pytest.mark.parametrize("window", [2, 20, 31, 40])
def test_texts_are_cut_to_their_last_tokens(engine: Engine, assert_recorded: Any, window: int) -> None:
    submitted = requests(tokens=30, ignore_eos=True)
    records, got = recorded(engine, submitted, window)
    texts = texts_of(engine, submitted, got)
    for record in records:
        (whole,) = {text for text in texts if text[-window:] == tuple(record.tokens.tolist())}
        assert_recorded(record, whole, min(30, window - 1))
        assert len(record.tokens) == min(window, len(whole))
        assert record.first >= 1  # at least one token precedes the sampled ones


def test_an_answer_is_recorded_separately_from_its_rationale(engine: Engine, assert_recorded: Any) -> None:
    plain = {"ignore_eos": True, "temperature": 1.0}
    request = Request(
        prompt=LONG, sampling=Sampling(max_tokens=12, **plain), answer_trigger=" So the answer is", answer_tokens=7
    )
    records, (got,) = recorded(engine, [request])
    prompt = engine.codec.encode_prompt(LONG)
    trigger = engine.codec.encode(" So the answer is")
    rationale, answer = records
    assert_recorded(rationale, [*prompt, *got.tokens[:12]], 12)
    assert_recorded(answer, [*prompt, *got.tokens[:12], *trigger, *got.tokens[12:]], 7)


def test_a_rationale_cut_by_a_stop_string_is_recorded_whole(engine: Engine, assert_recorded: Any) -> None:
    sampling = Sampling(max_tokens=40, ignore_eos=True, temperature=1.0, seed=3)
    (free,) = load_decoder(engine=engine).generate([Request(prompt=LONG, sampling=sampling)])
    stop = free.text[12]
    request = Request(
        prompt=LONG,
        sampling=sampling.model_copy(update={"stop": (stop,)}),
        answer_trigger=" So",
        answer_tokens=5,
    )
    records, (got,) = recorded(engine, [request])
    drawn = len(got.tokens) - 5
    prompt = engine.codec.encode_prompt(LONG)
    assert_recorded(records[0], [*prompt, *got.tokens[:drawn]], drawn)
    assert_recorded(records[1], records[1].tokens.tolist(), 5)
    assert engine.codec.decode(records[1].tokens.tolist()[len(prompt) :]) == got.text


def test_choices_are_not_recorded(engine: Engine) -> None:
    records, got = recorded(engine, [Request(prompt="abc", choices=("1", "10"))])
    assert records == []
    assert len(got[0].choice_logprobs) == 2


def test_a_cancelled_text_is_not_recorded(engine: Engine) -> None:
    recorder = Recorder(100)
    sampling = Sampling(max_tokens=900, ignore_eos=True)
    handle = engine.submit(Request(prompt="abc", sampling=sampling), recorder.policy, stream=True)
    next(iter(handle))
    handle.cancel()
    handle.result(30)
    assert recorder.records == []


def test_given_texts_are_recorded_unchanged(engine: Engine, assert_recorded: Any) -> None:
    texts = [[5, 6, 7, 8, 9], [5, 6, 7], [4, 4], list(range(10, 60)), [5, 6, 7, 8, 9], [3], []]
    recorder = Recorder(100)
    recorder.read(engine, texts)
    read = sorted(record.tokens.tolist() for record in recorder.records)
    assert read == sorted(text for text in texts if len(text) > 1)
    for record in recorder.records:
        assert record.first == 1
        assert_recorded(record, record.tokens.tolist(), len(record.tokens) - 1)


def test_saved_records_are_loaded_unchanged(engine: Engine, tmp_path: Path) -> None:
    records, _ = recorded(engine, requests(), window=40)
    path = tmp_path / "texts.safetensors"
    save(records, path)
    again = load(path)
    assert [file.name for file in tmp_path.iterdir()] == ["texts.safetensors"]
    assert len(again) == len(records)
    for one, other in zip(records, again, strict=True):
        assert one.first == other.first
        for name in ("tokens", "top", "logprobs"):
            assert torch.equal(getattr(one, name), getattr(other, name))
            assert getattr(one, name).dtype == getattr(other, name).dtype


# -- training --------------------------------------------------------------------------------------

SMALL = DraftOptions(layers=1, width=64, window=48, batch=8, epochs=6.0, learning_rate=1e-2)


@pytest.fixture
def records(engine: Engine) -> list[Record]:
    return recorded(engine, requests(12, tokens=30, ignore_eos=True, n=4), window=48)[0]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"width": 100}, "width"),
        ({"width": 0}, "width"),
        ({"layers": 0}, "layers"),
        ({"tokens": 0}, "tokens"),
        ({"window": 8}, "window"),
        ({"epochs": 0}, "epochs"),
        ({"batch": 0}, "batch"),
        ({"depth": 2}, "depth"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], field: str) -> None:
    with pytest.raises(ValidationError, match=field):
        DraftOptions(**options)


def test_a_student_is_a_small_llama_with_the_targets_vocabulary(engine: Engine) -> None:
    made = student(engine.loaded, DraftOptions(layers=3, width=128, window=32))
    config = made.config
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers) == (300, 128, 3)
    assert (config.num_attention_heads, config.max_position_embeddings) == (2, 32)
    assert made.get_input_embeddings().weight is made.get_output_embeddings().weight
    assert made(torch.tensor([[5, 6]])).logits.shape == (1, 2, 300)


@pytest.mark.parametrize("width", [64, 192])
def test_a_students_embeddings_keep_the_targets_dot_products(engine: Engine, make_model: Any, width: int) -> None:
    """The student's embeddings start as the target's, rotated. If it is wide enough, all dot products are equal."""
    made = student(engine.loaded, DraftOptions(width=width, layers=1))
    theirs = engine.loaded.model.get_input_embeddings().weight
    ours = made.get_input_embeddings().weight[:, : theirs.shape[1]]
    assert torch.allclose(ours @ ours.T, theirs @ theirs.T, atol=1e-3)
    wide = load_model(make_model(hidden_size=96), tokenizer=engine.loaded.tokenizer)
    ours, theirs = (model.get_input_embeddings().weight for model in (student(wide, SMALL), wide.model))
    largest = torch.linalg.svdvals(theirs)[:64].square().sum()  # the most that 64 columns can hold
    assert ours.square().sum().item() == pytest.approx(float(largest), rel=1e-3)


def test_the_same_seed_gives_the_same_student(engine: Engine) -> None:
    one, same, other = (student(engine.loaded, DraftOptions(width=64, layers=1, seed=seed)) for seed in (1, 1, 2))
    layer = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(one.state_dict()[layer], same.state_dict()[layer])
    assert not torch.equal(one.state_dict()[layer], other.state_dict()[layer])


def test_training_lowers_the_loss_and_raises_the_agreement(
    engine: Engine, records: list[Record], tmp_path: Path
) -> None:
    made, reports = student(engine.loaded, SMALL), []
    before = agreement(made, records)
    train(made, records, SMALL, tmp_path / "checkpoint", lambda *counts: reports.append(counts))
    after = agreement(made, records)
    assert [step for step, _, _ in reports] == list(range(1, 37))
    assert {steps for _, steps, _ in reports} == {36}  # 48 texts, eight per step, six epochs
    losses = [loss for _, _, loss in reports]
    assert sum(losses[-4:]) < 0.8 * sum(losses[:4])
    assert after["overlap"] > before["overlap"] + 0.1
    assert after["greedy"] > before["greedy"]
    assert not made.training


def test_a_stopped_run_ends_like_an_uninterrupted_one(
    engine: Engine, records: list[Record], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tot.decoders.training.distill.train._CHECKPOINT_EVERY", 5)
    whole = student(engine.loaded, SMALL)
    train(whole, records, SMALL, tmp_path / "whole", lambda *_: None)

    def stop(last: int, step: int, steps: int, loss: float) -> None:
        if step == last:
            raise KeyboardInterrupt

    heard: list[int] = []
    for last in (8, 17):
        with pytest.raises(KeyboardInterrupt):
            train(student(engine.loaded, SMALL), records, SMALL, tmp_path / "stopped", partial(stop, last))
    resumed = student(engine.loaded, SMALL)
    train(resumed, records, SMALL, tmp_path / "stopped", lambda step, *_: heard.append(step))
    assert heard == list(range(16, 37))
    for name, weight in whole.state_dict().items():
        assert torch.equal(weight, resumed.state_dict()[name]), name
    assert not list(tmp_path.glob("*.tmp"))


def test_a_finished_run_is_not_trained_again(
    engine: Engine, records: list[Record], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tot.decoders.training.distill.train._CHECKPOINT_EVERY", 36)
    first, again, heard = student(engine.loaded, SMALL), student(engine.loaded, SMALL), []
    train(first, records, SMALL, tmp_path / "checkpoint", lambda *_: None)
    train(again, records, SMALL, tmp_path / "checkpoint", lambda step, *_: heard.append(step))
    assert heard == []
    assert all(torch.equal(weight, again.state_dict()[name]) for name, weight in first.state_dict().items())


def test_a_model_agrees_with_itself(target: Any, engine: Engine) -> None:
    """The texts are whole. Agreement is measured in bfloat16, so two tokens may swap ranks."""
    records, _ = recorded(engine, requests(ignore_eos=True))
    found = agreement(target, records)
    assert found["greedy"] > 0.93
    assert 0.9 < found["overlap"] <= 1.01


def test_a_different_model_agrees_less(make_model: Callable[..., Any], records: list[Record]) -> None:
    found = agreement(make_model(seed=9, readable=True), records)
    assert found["greedy"] < 0.3
    assert found["overlap"] < 0.4
