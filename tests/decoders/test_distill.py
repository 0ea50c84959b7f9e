"""What a target said is recorded as it said it; a draft learns from that, also after it was stopped."""

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
    """On a copy of the target, so that the target stays untouched. All slots must be free at the end."""
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
def assert_said(target: Any, logits_alone: Callable[..., Tensor]) -> Callable[[Record, Sequence[int], int], None]:
    """That a record is of the end of a text, and holds what the untouched target says of its last tokens."""

    def check(record: Record, text: Sequence[int], said: int) -> None:
        tokens = record.tokens.tolist()
        assert tokens == list(text)[-len(tokens) :]
        assert len(tokens) - record.first == len(record.top) == len(record.logprobs) == said
        logprobs = logits_alone(target, list(text))[-1 - said : -1].log_softmax(
            -1
        )  # what comes after each but the last
        assert record.top.shape == record.logprobs.shape == (said, TOP)
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
    asked = [*requests(), *requests(2, ignore_eos=True, stop=(" t", "e"))]
    expected = load_decoder(engine=engine).generate(asked)
    records, got = recorded(engine, asked)
    assert [(one.tokens, one.text) for one in got] == [(one.tokens, one.text) for one in expected]
    assert [one.logprob for one in got] == pytest.approx([one.logprob for one in expected], abs=1e-4)
    assert len(records) == len(got)


def texts_of(engine: Engine, asked: Sequence[Request], got: Sequence[Completion]) -> dict[tuple[int, ...], int]:
    """All tokens of each completion and its prompt, and how many of them were drawn."""
    prompts = [engine.codec.encode_prompt(request.prompt) for request in asked for _ in range(request.sampling.n)]
    return {(*prompt, *one.tokens): len(one.tokens) for prompt, one in zip(prompts, got, strict=True)}


def test_what_is_recorded_is_what_the_model_says_by_itself(engine: Engine, assert_said: Any) -> None:
    asked = requests(ignore_eos=True)
    records, got = recorded(engine, asked)
    texts = texts_of(engine, asked, got)
    for record in records:
        text = tuple(record.tokens.tolist())
        assert_said(record, text, texts[text])
    assert len(records) == len(got) == 8


@pytest.mark.parametrize("window", [2, 20, 31, 40])
def test_texts_are_cut_to_their_last_tokens(engine: Engine, assert_said: Any, window: int) -> None:
    asked = requests(tokens=30, ignore_eos=True)
    records, got = recorded(engine, asked, window)
    texts = texts_of(engine, asked, got)
    for record in records:
        (whole,) = {text for text in texts if text[-window:] == tuple(record.tokens.tolist())}
        assert_said(record, whole, min(30, window - 1))
        assert len(record.tokens) == min(window, len(whole))
        assert record.first >= 1  # something comes before all that was drawn


def test_an_answer_is_recorded_apart_from_its_rationale(engine: Engine, assert_said: Any) -> None:
    plain = {"ignore_eos": True, "temperature": 1.0}
    request = Request(
        prompt=LONG, sampling=Sampling(max_tokens=12, **plain), answer_trigger=" So the answer is", answer_tokens=7
    )
    records, (got,) = recorded(engine, [request])
    prompt = engine.codec.encode_prompt(LONG)
    trigger = engine.codec.encode(" So the answer is")
    rationale, answer = records
    assert_said(rationale, [*prompt, *got.tokens[:12]], 12)
    assert_said(answer, [*prompt, *got.tokens[:12], *trigger, *got.tokens[12:]], 7)


def test_a_rationale_that_a_stop_string_cut_is_recorded_with_it(engine: Engine, assert_said: Any) -> None:
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
    assert_said(records[0], [*prompt, *got.tokens[:drawn]], drawn)
    assert_said(records[1], records[1].tokens.tolist(), 5)
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


def test_texts_are_read_as_they_are(engine: Engine, assert_said: Any) -> None:
    texts = [[5, 6, 7, 8, 9], [5, 6, 7], [4, 4], list(range(10, 60)), [5, 6, 7, 8, 9], [3], []]
    recorder = Recorder(100)
    recorder.read(engine, texts)
    read = sorted(record.tokens.tolist() for record in recorder.records)
    assert read == sorted(text for text in texts if len(text) > 1)
    for record in recorder.records:
        assert record.first == 1
        assert_said(record, record.tokens.tolist(), len(record.tokens) - 1)


def test_records_are_read_as_they_were_written(engine: Engine, tmp_path: Path) -> None:
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
def test_options_that_no_draft_can_have_are_refused(options: dict[str, Any], field: str) -> None:
    with pytest.raises(ValidationError, match=field):
        DraftOptions(**options)


def test_a_student_is_a_small_llama_over_the_targets_tokens(engine: Engine) -> None:
    made = student(engine.loaded, DraftOptions(layers=3, width=128, window=32))
    config = made.config
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers) == (300, 128, 3)
    assert (config.num_attention_heads, config.max_position_embeddings) == (2, 32)
    assert made.get_input_embeddings().weight is made.get_output_embeddings().weight
    assert made(torch.tensor([[5, 6]])).logits.shape == (1, 2, 300)


@pytest.mark.parametrize("width", [64, 192])
def test_a_student_knows_which_of_the_targets_tokens_are_alike(engine: Engine, make_model: Any, width: int) -> None:
    """Its embeddings begin with the target's, turned: products of any two are the same, where it is wide enough."""
    made = student(engine.loaded, DraftOptions(width=width, layers=1))
    theirs = engine.loaded.model.get_input_embeddings().weight
    ours = made.get_input_embeddings().weight[:, : theirs.shape[1]]
    assert torch.allclose(ours @ ours.T, theirs @ theirs.T, atol=1e-3)
    wide = load_model(make_model(hidden_size=96), tokenizer=engine.loaded.tokenizer)
    ours, theirs = (model.get_input_embeddings().weight for model in (student(wide, SMALL), wide.model))
    kept = torch.linalg.svdvals(theirs)[:64].square().sum()  # the most that 64 columns can hold
    assert ours.square().sum().item() == pytest.approx(float(kept), rel=1e-3)


def test_the_same_seed_gives_the_same_student(engine: Engine) -> None:
    one, same, other = (student(engine.loaded, DraftOptions(width=64, layers=1, seed=seed)) for seed in (1, 1, 2))
    layer = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(one.state_dict()[layer], same.state_dict()[layer])
    assert not torch.equal(one.state_dict()[layer], other.state_dict()[layer])


def test_training_lowers_the_loss_and_raises_the_agreement(
    engine: Engine, records: list[Record], tmp_path: Path
) -> None:
    made, heard = student(engine.loaded, SMALL), []
    before = agreement(made, records)
    train(made, records, SMALL, tmp_path / "checkpoint", lambda *told: heard.append(told))
    after = agreement(made, records)
    assert [step for step, _, _ in heard] == list(range(1, 37))
    assert {steps for _, steps, _ in heard} == {36}  # 48 texts, eight a step, six times
    losses = [loss for _, _, loss in heard]
    assert sum(losses[-4:]) < 0.8 * sum(losses[:4])
    assert after["overlap"] > before["overlap"] + 0.1
    assert after["greedy"] > before["greedy"]
    assert not made.training


def test_a_run_that_was_stopped_ends_as_one_that_was_not(
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
    """Where nothing of the texts was cut away. Measured in bfloat16, so that two tokens may change their places."""
    records, _ = recorded(engine, requests(ignore_eos=True))
    found = agreement(target, records)
    assert found["greedy"] > 0.93
    assert 0.9 < found["overlap"] <= 1.01


def test_a_model_that_says_something_else_agrees_less(make_model: Callable[..., Any], records: list[Record]) -> None:
    found = agreement(make_model(seed=9, readable=True), records)
    assert found["greedy"] < 0.3
    assert found["overlap"] < 0.4
