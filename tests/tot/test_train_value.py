"""Heads that read from hidden states whether a path ends right: what they are trained on, what they value, and when."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from tot import BFS, Combine, Head, SelfConsistency, solve
from tot.decoders import OptionError
from tot.evaluation.folder import read_samples
from tot.evaluation.leaves import read_leaves
from tot.evaluators.head import ValueHead, load_head
from tot.registry import EVALUATORS, load_task, named
from tot.training.value import Paths, choose
from tot.tree.thought import State
from tot.tree.tree import ThoughtTree

TASK = """
from tot import Task

class Odd(Task):
    depth = 5
    generator = "continue:tokens=4"
    templates = {
        "thought": "{% block user %}{{ question }}{% endblock %}{% block assistant %}So:"
        "{% for t in thoughts %}{{ t.thought }}{% endfor %}{% endblock %}",
        "answer": "{{ question }}",
        "chain": "{% block user %}{{ question }}{% endblock %}{% block assistant %}So:{% endblock %}",
    }
    sampling = {name: {"max_tokens": 12, "temperature": 1.0} for name in templates}

    def parse_answer(self, text):
        return "odd" if len(text) % 2 else "even"
"""
Tot = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def made(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model, a task, and questions whose answers are odd."""
    folder = tmp_path_factory.mktemp("made")
    with tiny() as decoder:
        pass  # closed, it has its own attention back
    decoder.model.save_pretrained(folder / "model")
    decoder.tokenizer.save_pretrained(folder / "model")
    (folder / "odd.py").write_text(TASK)
    rows = [json.dumps({"question": f"Number {i}?", "answer": "odd"}) for i in range(20)]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    return folder


@pytest.fixture
def train(made: Path, tot: Tot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setattr("tot.decoders.engine.runner._MOST_TOKENS", 3000)
    monkeypatch.setenv("TOT_CACHE", str(tmp_path / "cache"))

    def run(*more: str) -> tuple[int, str, str]:
        asked = ("--questions", f"{made / 'odd.py'}:Odd={made / 'rows.jsonl'}", "--model", str(made / "model"))
        given = ("--limit", "20", "--samples", "4", "--layers", "1,2", "--dtype", "fp32")
        return tot("train-value", *asked, *given, "--out", str(tmp_path / "head.safetensors"), *more)

    return run


@pytest.fixture
def random_head(tiny: Any, tmp_path: Path) -> Callable[..., Path]:
    """A head with random weights, for a model that `tiny` makes; `about` changes what it says of itself."""

    def make(**about: Any) -> Path:
        with tiny() as decoder:
            known = {"model": "tiny", "identity": decoder.engine.loaded.identity, "prompts": "papers", "layer": 1}
        torch.manual_seed(3)
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.safetensors"
        weight, bias = torch.randn(32), torch.randn(())
        ValueHead(torch.randn(32), 1 + torch.rand(32), weight, bias, {**known, **about}).save(path)
        return path

    return make


def paths(questions: int, tell: Callable[[torch.Tensor], torch.Tensor], seed: int = 0) -> Paths:
    """Six beginnings of each question; layer 2 holds what `tell` makes of their labels, layer 1 nothing."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.rand((questions * 6,), generator=generator).round()
    noise = torch.randn((2, len(labels), 8), generator=generator)
    noise[1, :, 3] = tell(labels)
    along = torch.tensor([0.4, 0.5, 0.6, 1, 1, 1]).repeat(questions)
    of = torch.arange(questions).repeat_interleave(6)
    return Paths({1: noise[0].half(), 2: noise[1].half()}, labels, along, of)


# -- training -----------------------------------------------------------------------------------------------------


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Paths]:
    """What heads were chosen by."""
    found: list[Paths] = []

    def spy(paths: Paths, *about: Any) -> ValueHead:
        found.append(paths)
        return choose(paths, *about)

    monkeypatch.setattr("tot.training.value.choose", spy)
    return found


@pytest.mark.training
def test_paths_are_as_good_as_the_share_of_their_ends_that_are_right(
    train: Any, made: Path, seen: list[Paths], tmp_path: Path
) -> None:
    status, out, err = train()
    assert status == 0, err
    assert "layer 1" in out or "layer 2" in out
    work, labels = tmp_path / "head-work", []
    task, shards = load_task(f"{made / 'odd.py'}:Odd"), [load_file(path) for path in (work / "states").iterdir()]
    assert len(shards) == 20
    assert {states.shape for shard in shards for states in shard.values()} == {(2, 32)}
    for sample in sorted(read_samples(work / "rollouts"), key=lambda sample: sample["index"]):
        tree, leaves = read_leaves(work / "rollouts", sample, task)
        assert leaves
        shares: dict[int, list[float]] = {}
        for leaf, (answer, right) in leaves.items():
            assert right == float(answer == "odd") == len(tree.state(tree[leaf]).message) % 2
            for node in tree.path(tree[leaf])[1:]:
                shares.setdefault(node.id, []).append(right)
        labels += [sum(each) / len(each) for each in shares.values()]
    assert any(0 < label < 1 for label in labels)
    assert seen[0].labels.tolist() == pytest.approx(labels)
    assert seen[0].states[1].shape == (len(labels), 32)
    head = load_head(tmp_path / "head.safetensors")
    assert head.about["prompts"] == "papers"
    assert head.about["questions"] == 16
    assert set(head.about["auroc"]) == {"all", "ends", "half way"}


@pytest.mark.training
def test_work_that_was_cut_off_is_gone_on_with(train: Any, seen: list[Paths], tmp_path: Path) -> None:
    assert train("--limit", "12", "--concurrency", "3")[0] == 0
    assert train()[0] == 0  # as many as asked for by now
    shards, path = sorted((tmp_path / "head-work" / "states").iterdir()), tmp_path / "head.safetensors"
    head = load_head(path)
    shards[3].write_bytes(shards[3].read_bytes()[:50])
    shards[7].unlink()
    path.unlink()
    assert train()[0] == 0
    fewer, before, after = seen
    assert before.labels[: len(fewer.labels)].equal(fewer.labels)
    assert len(before.labels) > len(fewer.labels)
    assert before.labels.equal(after.labels)
    near = torch.isclose(after.states[2], before.states[2], atol=0.01, rtol=0).all(1)
    assert near.float().mean() > 0.97  # a text of a random model may begin with a blank, or a character's half
    assert load_head(path).layer == head.layer
    status, _, err = train("--samples", "6")
    assert status == 2
    assert "was started with search=" in err


def test_states_that_hold_the_truth_tell_it() -> None:
    console = Console(quiet=True)
    head = choose(paths(60, lambda labels: 4 * labels), (1, 2), {"model": "m"}, console)
    assert head.layer == 2
    assert head.about["auroc"]["all"]["mean"] == head.about["auroc"]["ends"]["low"] == 1.0
    assert head.about["questions"] == 48
    others = paths(40, lambda labels: 4 * labels, seed=1)
    told = head.probabilities(others.states[2])
    assert (told - others.labels).abs().mean() < 0.1
    doubtful = paths(
        400, lambda labels: labels * 2 + torch.randn(len(labels), generator=torch.Generator().manual_seed(1))
    )
    head = choose(doubtful, (1, 2), {"model": "m"}, console)
    told = head.probabilities(doubtful.states[2])
    high = told > 0.7
    assert abs(float(doubtful.labels[high].mean()) - float(told[high].mean())) < 0.06  # calibrated


def test_nothing_to_tell_apart_is_refused() -> None:
    console = Console(quiet=True)
    right = paths(20, lambda labels: labels)
    right.labels[:] = 1.0
    with pytest.raises(
        OptionError, match=r"none has paths that end right and others .* \(100% of all paths end right\)"
    ):
        choose(right, (1, 2), {}, console)


@pytest.mark.training
def test_solutions_that_never_end_are_refused(train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tot.training.value.read_leaves", lambda *about: (ThoughtTree(State(question="?")), {}))
    status, _, err = train()
    assert status == 2
    assert "no question has a solution that came to an end" in err


def test_tasks_without_messages_and_wrong_options_are_refused(tot: Tot, made: Path, tmp_path: Path) -> None:
    rows, model, out = str(made / "rows.jsonl"), str(made / "model"), str(tmp_path / "head.safetensors")
    for asked, said in (
        (("--questions", f"blocksworld={rows}"), "the thoughts of blocksworld are no pieces of one message"),
        (("--questions", "gsm8k"), "--questions 'gsm8k' can't be read: write TASK=FILE"),
        (("--questions", f"gsm8k={rows}", "--layers", "a"), "train-value, option layers"),
        (("--questions", f"gsm8k={rows}", "--limit", "3"), "greater than or equal to 10"),
    ):
        status, _, err = tot("train-value", *asked, "--model", model, "--out", out)
        assert (status, said in err) == (2, True), err


# -- valuing ------------------------------------------------------------------------------------------------------


def expected(tiny: Any, path: Path, tokens: list[int]) -> float:
    """By the states that transformers computes."""
    head = load_head(path)
    with tiny() as decoder:
        pass
    with torch.inference_mode():
        states = decoder.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states[head.layer]
    return float(head.probabilities(states[0, -1:]))


def test_values_are_read_from_the_forwards_that_drew_the_texts(
    tiny: Any, made: Path, random_head: Callable[..., Path]
) -> None:
    path, task = random_head(), load_task(f"{made / 'odd.py'}:Odd")
    with tiny() as decoder:
        options = {"decoder": decoder, "search": BFS(thoughts=2, breadth=4), "evaluator": Head(path=str(path))}
        solution = solve(task, "Number?", **options)
        codec = decoder.engine.codec
        asked, checked = codec.encode_prompt(task.prompt("thought", task.start("Number?"))), 0
        for node in list(solution.tree)[1:]:
            parts = [thought.drawn["thought"] for thought in solution.tree.state(node).thoughts]
            drawn = [token for part in parts for token in part.tokens if token not in codec.end_ids]
            torn = "\ufffd" in parts[-1].text  # a character that has lost its bytes
            if not torn and not parts[0].text[:1].isspace():  # blanks at the beginning of a message are left out
                assert node.value == pytest.approx(expected(tiny, path, [*asked, *drawn]), abs=2e-3)
                checked += 1
        assert checked > 1
        mixed = Combine(evaluators=(Head(path=str(path)), "random"), weights=(1.0, 0.0))
        assert mixed.layers == (1,)


def test_states_that_are_not_at_hand_are_asked_for(tiny: Any, made: Path, random_head: Callable[..., Path]) -> None:
    path, task = random_head(), load_task(f"{made / 'odd.py'}:Odd")
    values = []
    for evaluator in (Head(path=str(path)), Combine(evaluators=(Head(path=str(path)),), weights=(1.0,))):
        with tiny() as decoder:
            search = SelfConsistency(samples=3, weighted=True)
            tree = solve(task, "Number?", decoder=decoder, search=search, evaluator=evaluator).tree
            values.append([node.value for node in list(tree)[1:]])
    assert values[0] == values[1]
    assert len(set(values[0])) > 1


@pytest.mark.parametrize(
    ("about", "said"),
    [
        ({"identity": "0" * 64}, "the head reads tiny, and this is another model"),
        ({"prompts": "chat"}, "the head reads tiny asked in chat prompts, and this is papers"),
        ({"layer": 9}, "there is no layer 9: this model's states are numbered from 0 to 2"),
    ],
)
def test_a_head_for_something_else_is_refused(
    tiny: Any, made: Path, random_head: Callable[..., Path], about: dict[str, Any], said: str
) -> None:
    task = load_task(f"{made / 'odd.py'}:Odd")
    with tiny() as decoder, pytest.raises(Exception, match=said):
        solve(task, "Number?", decoder=decoder, search=BFS(), evaluator=Head(path=str(random_head(**about))))


def test_a_file_that_is_no_head_is_refused(random_head: Callable[..., Path], tmp_path: Path) -> None:
    path = random_head()
    (tmp_path / "cut").write_bytes(path.read_bytes()[:100])
    (tmp_path / "text").write_text("no head")
    for name, said in (("nothing", "can't be read"), ("cut", "is no head"), ("text", "is no head")):
        with pytest.raises(OptionError, match=f"{name} {said}"):
            Head(path=str(tmp_path / name))
    for about in ({"layer": "x"}, {"layer": -1}, {"layer": None}):
        with pytest.raises(OptionError, match="is no head"):
            Head(path=str(random_head(**about)))
    assert named(f"head:path={path}", EVALUATORS) == Head(path=str(path))
    ValueHead(torch.zeros(32), torch.ones(32), torch.zeros(31), torch.zeros(()), load_head(path).about).save(path)
    with pytest.raises(OptionError, match="is no head"):
        Head(path=str(path))


def test_a_head_of_an_earlier_version_is_refused_and_said_to_be_trained_again(tmp_path: Path) -> None:
    path = tmp_path / "old.safetensors"
    save_file({"0.weight": torch.zeros(1, 32)}, path, {"format": "tot.value", "version": "1", "about": "{}"})
    said = r"old\.safetensors is 'tot.value', version '1', .* 'tot.value', 2: train it again by tot train-value"
    with pytest.raises(OptionError, match=said):
        Head(path=str(path))
