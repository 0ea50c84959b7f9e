"""Drafts from hidden states: the target's logprobs and states are recorded exactly, and a draft trains on them."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from torch import Tensor

from tot.decoders import Completion, Engine, ModelError, OptionError, Request, Sampling, load_decoder, load_model
from tot.decoders.decoder import LocalDecoder
from tot.decoders.drafting.state_drafter import DraftNetwork
from tot.decoders.methods.method import OpenedMethod
from tot.decoders.training.distill.record import TOP, Record, Recorder, load, save
from tot.decoders.training.distill.train import agreement, new_draft, save_draft, train
from tot.decoders.training.options import DraftOptions

pytestmark = pytest.mark.training

LAYERS = 1, 2
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


def recorded(engine: Engine, requests: Sequence[Request]) -> tuple[list[Record], list[Completion]]:
    recorder = Recorder(LAYERS)
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
def assert_recorded(target: Any, logits_alone: Callable[..., Tensor]) -> Callable[[Record, Sequence[int]], None]:
    """Check that a record is the end of a text, with the unmodified target's logprobs and states."""

    def check(record: Record, text: Sequence[int]) -> None:
        count = len(record.tokens)
        assert record.tokens.tolist() == list(text)[-count:]
        logprobs = logits_alone(target, list(text))[-1 - count : -1].log_softmax(-1)
        assert record.top.shape == record.logprobs.shape == (count, TOP)
        assert torch.allclose(record.logprobs.float(), logprobs.topk(TOP).values, atol=0.02, rtol=2e-3)  # float16
        assert torch.allclose(record.logprobs.float(), logprobs.gather(1, record.top.long()), atol=0.02, rtol=2e-3)
        with torch.no_grad():
            hidden = target(torch.tensor([list(text)[:-1]]), output_hidden_states=True).hidden_states
        states = torch.stack([hidden[layer][0, -count:] for layer in LAYERS], 1)
        assert torch.allclose(record.states.float(), states, atol=0.02, rtol=2e-3)
        assert [part.dtype for part in record] == [torch.int32, torch.int32, torch.float16, torch.float16]

    return check


# -- recording -------------------------------------------------------------------------------------


def test_recording_changes_no_token(engine: Engine) -> None:
    submitted = [*requests(), *requests(2, ignore_eos=True, stop=(" t", "e"))]
    expected = load_decoder(engine=engine).generate(submitted)
    records, got = recorded(engine, submitted)
    assert [(one.tokens, one.text) for one in got] == [(one.tokens, one.text) for one in expected]
    assert [one.logprob for one in got] == pytest.approx([one.logprob for one in expected], abs=1e-4)
    assert len(records) == len(got)


def test_records_hold_the_models_own_logprobs_and_states(engine: Engine, assert_recorded: Any) -> None:
    submitted = requests(ignore_eos=True)
    records, got = recorded(engine, submitted)
    prompts = [engine.codec.encode_prompt(request.prompt) for request in submitted for _ in range(request.sampling.n)]
    texts = {one.tokens: [*prompt, *one.tokens] for prompt, one in zip(prompts, got, strict=True)}
    for record in records:
        assert_recorded(record, texts[tuple(record.tokens.tolist())])
    assert len(records) == len(got) == 8
    assert all(one.states is None for one in got)  # no request asks for states


def test_an_answer_is_recorded_separately_from_its_rationale(engine: Engine, assert_recorded: Any) -> None:
    plain = {"ignore_eos": True, "temperature": 1.0}
    request = Request(
        prompt=LONG, sampling=Sampling(max_tokens=12, **plain), answer_trigger=" So the answer is", answer_tokens=7
    )
    records, (got,) = recorded(engine, [request])
    prompt = engine.codec.encode_prompt(LONG)
    trigger = engine.codec.encode(" So the answer is")
    rationale, answer = records
    assert (len(rationale.tokens), len(answer.tokens)) == (12, 7)
    assert_recorded(rationale, [*prompt, *got.tokens[:12]])
    assert_recorded(answer, [*prompt, *got.tokens[:12], *trigger, *got.tokens[12:]])


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
    assert_recorded(records[0], [*prompt, *got.tokens[:drawn]])
    assert records[1].tokens.tolist() == list(got.tokens[drawn:])


def test_choices_are_not_recorded(engine: Engine) -> None:
    records, got = recorded(engine, [Request(prompt="abc", choices=("1", "10"))])
    assert records == []
    assert len(got[0].choice_logprobs) == 2


def test_a_cancelled_text_is_not_recorded(engine: Engine) -> None:
    recorder = Recorder(LAYERS)
    sampling = Sampling(max_tokens=900, ignore_eos=True)
    handle = engine.submit(Request(prompt="abc", sampling=sampling), recorder.policy, stream=True)
    next(iter(handle))
    handle.cancel()
    handle.result(30)
    assert recorder.records == []


def test_given_texts_are_recorded_unchanged(engine: Engine, assert_recorded: Any) -> None:
    texts = [[5, 6, 7, 8, 9], [5, 6, 7], [4, 4], list(range(10, 60)), [5, 6, 7, 8, 9], [3], []]
    recorder = Recorder(LAYERS)
    recorder.read(engine, texts)
    read = {tuple(record.tokens.tolist()): record for record in recorder.records}
    assert read.keys() == {tuple(text[1:]) for text in texts if len(text) > 1}
    for text in texts:
        if len(text) > 1:
            assert_recorded(read[tuple(text[1:])], text)


def test_a_long_text_is_read_some_rows_at_a_time(
    engine: Engine, assert_recorded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tot.decoders.training.distill.record._ROWS", 16)
    rows, forward = [], engine.runner.forward

    def counted(*given: Any) -> Any:
        result = forward(*given)
        rows.append(len(result.logits))
        return result

    monkeypatch.setattr(engine.runner, "forward", counted)
    texts = [list(range(10, 60)), list(range(20, 53))]
    recorder = Recorder(LAYERS)
    recorder.read(engine, texts)
    assert rows == [16, 16, 16, 1, 16, 16]
    for record, text in zip(recorder.records, texts, strict=True):
        assert_recorded(record, text)


def test_saved_records_are_loaded_unchanged(engine: Engine, tmp_path: Path) -> None:
    records, _ = recorded(engine, requests())
    path = tmp_path / "texts.safetensors"
    save(records, path)
    again = load(path)
    assert [file.name for file in tmp_path.iterdir()] == ["texts.safetensors"]
    assert len(again) == len(records)
    for one, other in zip(records, again, strict=True):
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(one, other, strict=True))


# -- training --------------------------------------------------------------------------------------

SMALL = DraftOptions(width=64, batch=64, epochs=6.0, learning_rate=1e-2, steps=3)


@pytest.fixture
def records(engine: Engine) -> list[Record]:
    return recorded(engine, requests(12, tokens=30, ignore_eos=True, n=4))[0]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"width": 0}, "width"),
        ({"layers": "a"}, "layers"),
        ({"tokens": 0}, "tokens"),
        ({"known": 0}, "known"),
        ({"steps": 0}, "steps"),
        ({"epochs": 0}, "epochs"),
        ({"batch": 0}, "batch"),
        ({"depth": 2}, "depth"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], field: str) -> None:
    with pytest.raises(ValidationError, match=field):
        DraftOptions(**options)


def test_a_draft_knows_the_most_frequent_tokens(engine: Engine, records: list[Record]) -> None:
    written = torch.cat([record.tokens for record in records])
    made = new_draft(engine.loaded, records, SMALL.model_copy(update={"known": 20}))
    assert made.head.weight.shape == (20, 64)
    assert int(written.bincount().argmax()) in made.tokens.tolist()
    assert len(set(made.tokens.tolist())) == 20


def test_a_drafts_embeddings_begin_as_the_targets_head_rotated(engine: Engine, records: list[Record]) -> None:
    made = new_draft(engine.loaded, records, SMALL)
    theirs = engine.loaded.model.get_output_embeddings().weight[made.tokens.long()]
    ours = made.embedding.weight[:-1]
    products, expected = ours @ ours.T, theirs @ theirs.T
    scale = float((products.norm() / expected.norm()).detach())
    assert torch.allclose(products, scale * expected, atol=1e-2 * float(products.max()))


def test_a_draft_begins_with_the_distribution_that_its_states_give(engine: Engine, records: list[Record]) -> None:
    made = new_draft(engine.loaded, records, SMALL)
    record = records[0]
    logprobs = (made.head(made.last_norm(made.start(record.states)))).log_softmax(-1)
    known = {token: row for row, token in enumerate(made.tokens.tolist())}
    top = [(i, known[token]) for i, token in enumerate(record.top[:, 0].tolist()) if token in known]
    matches = [int(logprobs[i].argmax()) == row for i, row in top]
    assert matches.count(True) > 0.8 * len(matches) > 10


def test_the_same_seed_gives_the_same_draft(engine: Engine, records: list[Record]) -> None:
    one, same, other = (
        new_draft(engine.loaded, records, SMALL.model_copy(update={"seed": seed})).state_dict()["mix.weight"]
        for seed in (1, 1, 2)
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_training_lowers_the_loss_and_raises_the_agreement(
    engine: Engine, records: list[Record], tmp_path: Path
) -> None:
    made, reports = new_draft(engine.loaded, records, SMALL), []
    before = agreement(made, records, SMALL.steps)
    train(made, records, SMALL, tmp_path / "checkpoint", lambda *counts: reports.append(counts))
    after = agreement(made, records, SMALL.steps)
    steps = 6 * math.ceil(48 * (30 - 3) / 64)  # 48 texts
    assert [step for step, _, _ in reports] == list(range(1, steps + 1))
    losses = [loss for _, _, loss in reports]
    assert sum(losses[-4:]) < 0.8 * sum(losses[:4])
    for one, other in zip(before, after, strict=True):
        assert 1.01 > other["overlap"] > one["overlap"] + 0.1
        assert other["greedy"] > one["greedy"]


def test_a_stopped_run_ends_like_an_uninterrupted_one(
    engine: Engine, records: list[Record], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tot.decoders.training.distill.train._CHECKPOINT_EVERY", 5)
    options = SMALL.model_copy(update={"epochs": 1.5})
    whole = new_draft(engine.loaded, records, options)
    train(whole, records, options, tmp_path / "whole", lambda *_: None)

    def stop(last: int, step: int, steps: int, loss: float) -> None:
        if step == last:
            raise KeyboardInterrupt

    heard: list[int] = []
    for last in (8, 17):
        with pytest.raises(KeyboardInterrupt):
            train(
                new_draft(engine.loaded, records, options), records, options, tmp_path / "stopped", partial(stop, last)
            )
    resumed = new_draft(engine.loaded, records, options)
    train(resumed, records, options, tmp_path / "stopped", lambda step, *_: heard.append(step))
    assert heard == list(range(16, 33))
    for name, weight in whole.state_dict().items():
        assert torch.equal(weight, resumed.state_dict()[name]), name
    assert not list(tmp_path.glob("*.tmp"))


# -- drafting --------------------------------------------------------------------------------------


@pytest.fixture
def folder(engine: Engine, records: list[Record], tmp_path: Path) -> Path:
    """A folder with a trained draft."""
    made = new_draft(engine.loaded, records, SMALL)
    train(made, records, SMALL, tmp_path / "checkpoint", lambda *_: None)
    save_draft(made, LAYERS, engine.loaded, tmp_path)
    return tmp_path


def close(ours: Any, theirs: Tensor) -> bool:
    """Whether numbers are equal up to the rounding of weights and inputs to eight bits."""
    expected = theirs.detach().numpy()
    return float(np.abs(ours - expected).max()) < 0.05 * float(expected.std())


def test_the_network_computes_what_was_trained(engine: Engine, records: list[Record], folder: Path) -> None:
    network, made = DraftNetwork(folder), new_draft(engine.loaded, records, SMALL)
    made.load_state_dict(load_file(folder / "model.safetensors"))
    states = torch.stack([record.states[3] for record in records[:5]])
    ours, theirs = network.start(states.numpy()), made.start(states)
    assert close(ours, theirs)
    unknown = next(token for token in range(300) if token not in made.tokens.tolist())
    tokens = [*made.tokens[:4].tolist(), unknown]
    ours, logits = network.step(ours, tokens)
    theirs, logprobs = made(theirs, torch.tensor([0, 1, 2, 3, len(made.tokens)]))
    assert close(ours, theirs)
    assert logits.shape == (5, 300)
    assert np.isneginf(logits).sum(1).tolist() == [300 - len(made.tokens)] * 5
    known = torch.from_numpy(logits)[:, made.tokens.long()].log_softmax(-1)
    assert close(known.numpy(), logprobs)


@pytest.mark.parametrize("method", ["sd", "mcsd", "auto", "seed"])
def test_drafts_from_states_change_no_token(engine: Engine, folder: Path, method: str) -> None:
    submitted = requests(tokens=40)
    expected = load_decoder(engine=engine).generate(submitted)
    with load_decoder(method, engine=engine, draft=str(folder)) as decoder:
        got = decoder.generate(submitted)
        asked = decoder.generate([one.model_copy(update={"states": (2, 0)}) for one in submitted])
    assert [one.tokens for one in got] == [one.tokens for one in asked] == [one.tokens for one in expected]
    assert sum(one.usage.accepted for one in got) > 0 or method in ("auto", "seed")  # which may not draft
    assert all(one.states is not None and one.states.shape[1] == 2 for one in asked)


def test_a_draft_from_states_is_often_accepted(engine: Engine, folder: Path) -> None:
    with load_decoder("sd", engine=engine, draft=str(folder), k=3) as decoder:
        got = decoder.generate(requests(12, tokens=30, ignore_eos=True))
    accepted, reached = (sum(getattr(one.usage, name) for one in got) for name in ("accepted", "reached"))
    assert accepted > 0.3 * reached


def test_the_rejection_rule_draws_from_the_draft(engine: Engine, folder: Path) -> None:
    with load_decoder("sd", engine=engine, draft=str(folder), k=2, rule="leviathan") as decoder:
        got = decoder.generate(requests(6, tokens=30, ignore_eos=True))
    assert sum(one.usage.accepted for one in got) > 0


def test_a_draft_of_another_target_is_refused(make_model: Callable[..., Any], tokenizer: Any, folder: Path) -> None:
    other = Engine(load_model(make_model(hidden_size=96), tokenizer=tokenizer), 1000)
    with pytest.raises(ModelError, match="was trained for"):
        load_decoder("sd", engine=other, draft=str(folder))
    other.close()


def test_two_drafts_from_states_are_refused(engine: Engine, folder: Path) -> None:
    with pytest.raises(OptionError, match="several drafts made by tot train-draft: give one of them"):
        load_decoder("sd", engine=engine, draft=[str(folder), "lookup", str(folder)])


def test_a_draft_of_states_that_the_target_lacks_is_refused(engine: Engine, folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "layers": [1, -1]}))
    with pytest.raises(ModelError, match="was trained for"):
        load_decoder("sd", engine=engine, draft=str(folder))


@pytest.mark.parametrize("damage", ["model.safetensors", "layers"])
def test_a_damaged_draft_is_an_error(engine: Engine, folder: Path, damage: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    if damage == "layers":
        (folder / "config.json").write_text(json.dumps({**config, "layers": []}))
    else:
        (folder / damage).write_bytes(b"nothing")
    with pytest.raises(ModelError, match="has no valid draft"):
        load_decoder("sd", engine=engine, draft=str(folder))
