"""Value heads, which predict from hidden states whether a path ends correctly: training, values, and errors."""

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
        pass  # closing the decoder restores the model's own attention
    decoder.model.save_pretrained(folder / "model")
    decoder.tokenizer.save_pretrained(folder / "model")
    (folder / "odd.py").write_text(TASK)
    rows = [json.dumps({"question": f"Number {i}?", "answer": "odd"}) for i in range(20)]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    return folder


@pytest.fixture
def train(made: Path, tot: Tot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setattr("tot.decoders.engine.runner.MOST_TOKENS", 3000)
    monkeypatch.setenv("TOT_CACHE", str(tmp_path / "cache"))

    def run(*more: str) -> tuple[int, str, str]:
        source = ("--questions", f"{made / 'odd.py'}:Odd={made / 'rows.jsonl'}", "--model", str(made / "model"))
        given = ("--limit", "20", "--samples", "4", "--layers", "1,2", "--dtype", "fp32")
        return tot("train-value", *source, *given, "--out", str(tmp_path / "head.safetensors"), *more)

    return run


@pytest.fixture
def random_head(tiny: Any, tmp_path: Path) -> Callable[..., Path]:
    """A head with random weights for a model that `tiny` makes; `about` overrides its metadata."""

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
    """Make six prefixes of each question; layer 2 is `tell` of their labels, layer 1 is noise."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.rand((questions * 6,), generator=generator).round()
    noise = torch.randn((2, len(labels), 8), generator=generator)
    noise[1, :, 3] = tell(labels)
    along = torch.tensor([0.4, 0.5, 0.6, 1, 1, 1]).repeat(questions)
    of = torch.arange(questions).repeat_interleave(6)
    return Paths({1: noise[0].half(), 2: noise[1].half()}, labels, along, of)


# -- training -----------------------------------------------------------------------------------------------------


@pytest.fixture
def training_paths(monkeypatch: pytest.MonkeyPatch) -> list[Paths]:
    """The paths that heads were trained on."""
    found: list[Paths] = []

    def spy(paths: Paths, *about: Any) -> ValueHead:
        found.append(paths)
        return choose(paths, *about)

    monkeypatch.setattr("tot.training.value.choose", spy)
    return found


@pytest.mark.training
def test_the_label_of_a_path_is_the_share_of_correct_ends(
    train: Any, made: Path, training_paths: list[Paths], tmp_path: Path
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
    assert training_paths[0].labels.tolist() == pytest.approx(labels)
    assert training_paths[0].states[1].shape == (len(labels), 32)
    head = load_head(tmp_path / "head.safetensors")
    assert head.about["prompts"] == "papers"
    assert head.about["questions"] == 16
    assert set(head.about["auroc"]) == {"all", "ends", "half way"}


@pytest.mark.training
def test_interrupted_training_is_resumed(train: Any, training_paths: list[Paths], tmp_path: Path) -> None:
    assert train("--limit", "12", "--concurrency", "3")[0] == 0
    assert train()[0] == 0  # the requested number by now
    shards, path = sorted((tmp_path / "head-work" / "states").iterdir()), tmp_path / "head.safetensors"
    head = load_head(path)
    shards[3].write_bytes(shards[3].read_bytes()[:50])
    shards[7].unlink()
    path.unlink()
    assert train()[0] == 0
    fewer, before, after = training_paths
    assert before.labels[: len(fewer.labels)].equal(fewer.labels)
    assert len(before.labels) > len(fewer.labels)
    assert before.labels.equal(after.labels)
    near = torch.isclose(after.states[2], before.states[2], atol=0.01, rtol=0).all(1)
    assert near.float().mean() > 0.97  # a text of a random model may begin with a space or half a character
    assert load_head(path).layer == head.layer
    status, _, err = train("--samples", "6")
    assert status == 2
    assert "was started with search=" in err


def test_a_head_learns_labels_that_are_in_the_states() -> None:
    console = Console(quiet=True)
    head = choose(paths(60, lambda labels: 4 * labels), (1, 2), {"model": "m"}, console)
    assert head.layer == 2
    assert head.about["auroc"]["all"]["mean"] == head.about["auroc"]["ends"]["high"] == 1.0
    assert head.about["questions"] == 48
    others = paths(40, lambda labels: 4 * labels, seed=1)
    predicted = head.probabilities(others.states[2])
    assert (predicted - others.labels).abs().mean() < 0.1
    doubtful = paths(
        400, lambda labels: labels * 2 + torch.randn(len(labels), generator=torch.Generator().manual_seed(1))
    )
    head = choose(doubtful, (1, 2), {"model": "m"}, console)
    predicted = head.probabilities(doubtful.states[2])
    high = predicted > 0.7
    assert abs(float(doubtful.labels[high].mean()) - float(predicted[high].mean())) < 0.06  # calibrated


def test_equal_labels_are_rejected() -> None:
    console = Console(quiet=True)
    right = paths(20, lambda labels: labels)
    right.labels[:] = 1.0
    with pytest.raises(OptionError, match=r"has both correct and incorrect paths \(100% of all paths are correct\)"):
        choose(right, (1, 2), {}, console)


@pytest.mark.training
def test_solutions_that_never_end_are_rejected(train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tot.training.value.read_leaves", lambda *about: (ThoughtTree(State(question="?")), {}))
    status, _, err = train()
    assert status == 2
    assert "no question has a complete solution" in err


def test_tasks_without_messages_and_invalid_options_are_rejected(tot: Tot, made: Path, tmp_path: Path) -> None:
    rows, model, out = str(made / "rows.jsonl"), str(made / "model"), str(tmp_path / "head.safetensors")
    for options, message in (
        (("--questions", f"blocksworld={rows}"), "the thoughts of blocksworld are not parts of one message"),
        (("--questions", "gsm8k"), "--questions 'gsm8k' can't be read: write TASK=FILE"),
        (("--questions", f"gsm8k={rows}", "--layers", "a"), "train-value, option layers"),
        (("--questions", f"gsm8k={rows}", "--limit", "3"), "greater than or equal to 10"),
    ):
        status, _, err = tot("train-value", *options, "--model", model, "--out", out)
        assert (status, message in err) == (2, True), err


# -- values -------------------------------------------------------------------------------------------------------


def expected(tiny: Any, path: Path, tokens: list[int]) -> float:
    """Compute the value from the hidden states of transformers."""
    head = load_head(path)
    with tiny() as decoder:
        pass
    with torch.inference_mode():
        states = decoder.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states[head.layer]
    return float(head.probabilities(states[0, -1:]))


def test_values_use_the_hidden_states_of_the_decoding_forwards(
    tiny: Any, made: Path, random_head: Callable[..., Path]
) -> None:
    path, task = random_head(), load_task(f"{made / 'odd.py'}:Odd")
    with tiny() as decoder:
        options = {"decoder": decoder, "search": BFS(thoughts=2, breadth=4), "evaluator": Head(path=str(path))}
        solution = solve(task, "Number?", **options)
        codec = decoder.engine.codec
        prompt, checked = codec.encode_prompt(task.prompt("thought", task.start("Number?"))), 0
        for node in list(solution.tree)[1:]:
            parts = [thought.drawn["thought"] for thought in solution.tree.state(node).thoughts]
            generated = [token for part in parts for token in part.tokens if token not in codec.end_ids]
            torn = "\ufffd" in parts[-1].text  # a character that lost its bytes
            if not torn and not parts[0].text[:1].isspace():  # leading spaces of a message are dropped
                assert node.value == pytest.approx(expected(tiny, path, [*prompt, *generated]), abs=2e-3)
                checked += 1
        assert checked > 1
        mixed = Combine(evaluators=(Head(path=str(path)), "random"), weights=(1.0, 0.0))
        assert mixed.layers == (1,)


def test_missing_hidden_states_are_computed(tiny: Any, made: Path, random_head: Callable[..., Path]) -> None:
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
    ("about", "message"),
    [
        ({"identity": "0" * 64}, "the head was trained on tiny, not on this model"),
        ({"prompts": "chat"}, "the head was trained with chat prompts, but this run uses papers"),
        ({"layer": 9}, "the model has no layer 9: ask for states of layers 0 to 2"),
    ],
)
def test_a_head_of_another_model_or_task_is_rejected(
    tiny: Any, made: Path, random_head: Callable[..., Path], about: dict[str, Any], message: str
) -> None:
    task = load_task(f"{made / 'odd.py'}:Odd")
    with tiny() as decoder, pytest.raises(Exception, match=message):
        solve(task, "Number?", decoder=decoder, search=BFS(), evaluator=Head(path=str(random_head(**about))))


def test_a_file_that_is_not_a_head_is_rejected(random_head: Callable[..., Path], tmp_path: Path) -> None:
    path = random_head()
    (tmp_path / "cut").write_bytes(path.read_bytes()[:100])
    (tmp_path / "text").write_text("no head")
    for name, message in (("nothing", "can't be read"), ("cut", "is not a head"), ("text", "is not a head")):
        with pytest.raises(OptionError, match=f"{name} {message}"):
            Head(path=str(tmp_path / name))
    for about in ({"layer": "x"}, {"layer": -1}, {"layer": None}):
        with pytest.raises(OptionError, match="is not a head"):
            Head(path=str(random_head(**about)))
    assert named(f"head:path={path}", EVALUATORS) == Head(path=str(path))
    ValueHead(torch.zeros(32), torch.ones(32), torch.zeros(31), torch.zeros(()), load_head(path).about).save(path)
    with pytest.raises(OptionError, match="is not a head"):
        Head(path=str(path))


def test_a_head_of_an_earlier_version_is_rejected_with_a_remedy(tmp_path: Path) -> None:
    path = tmp_path / "old.safetensors"
    save_file({"0.weight": torch.zeros(1, 32)}, path, {"format": "tot.value", "version": "1", "about": "{}"})
    message = r"old\.safetensors is 'tot.value', version '1', .* 'tot.value', 2: train a new head"
    with pytest.raises(OptionError, match=message):
        Head(path=str(path))
