"""The benchmark `quality`: known accuracies, exact replays, and evaluator AUROCs."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from benchmarks.__main__ import main
from benchmarks.evaluators import PLACES, Judged, auroc, judged, pieces_of, solutions, verdict
from benchmarks.leaves import read_leaves
from benchmarks.quality import Answered, Leaf, Options, read_answers, replayed, table, way
from benchmarks.ways import read_ways
from tot import Sample, SelfConsistency, Task, evaluate
from tot.decoders import Completion, Request, Usage
from tot.decoders.budget import Meter
from tot.decoders.request import ChoiceLogprob
from tot.evaluation.folder import read_samples
from tot.llm.backend import Backend
from tot.tree.thought import SampledText, State, Thought
from tot.tree.tree import Node, ThoughtTree

ROWS = [{"question": f"{word} is?", "answer": f"#### {i}"} for i, word in enumerate(("Ada", "Bo", "Cy", "Di"), 1)]
SAMPLES = {  # sampled answers by question: greedy answers are correct for two, majorities for three
    "Ada": ["1", "1", "2", "1"],
    "Bo": ["5", "2", "2", "7"],
    "Cy": ["3", "9", "8", "3"],
    "Di": ["6", "6", "4", "6"],
}


class Known:
    """A decoder with known replies to each question; every character is a token."""

    name = "known"

    class tokenizer:  # noqa: N801 - the attribute's name in decoders
        class backend_tokenizer:  # noqa: N801 - likewise
            @staticmethod
            def decode(tokens: Sequence[int]) -> str:
                return "".join(map(chr, tokens))

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return [self._reply(request, sample) for request in requests for sample in range(request.sampling.n)]

    def _reply(self, request: Request, sample: int) -> Completion:
        word = next(word for word in SAMPLES if word in request.prompt[0].content)  # type: ignore[union-attr]
        if request.choices:
            return self._choice(request, str(list(SAMPLES).index(word) + 1))
        number = SAMPLES[word][sample]
        reply = f"It is.\n\n#### {number}"
        probability = -0.1 if number in "14" else -9.0
        first, rest = (-1.0,) * len("It is.\n\n"), (probability,) * len(f"#### {number}")
        tokens = tuple(map(ord, reply))
        return Completion(reply, tokens, sum(first + rest), "eos", Usage(new_tokens=3), logprobs=first + rest)

    def _choice(self, request: Request, right: str) -> Completion:
        """Choose the first of two answers, unless only the second is correct."""
        answers = re.findall(r"^[12]\. (.*)$", request.prompt[-1].content, re.MULTILINE)  # type: ignore[union-attr]
        first = answers[0] == right or answers[1] != right
        totals = (-0.1, -3.0) if first else (-3.0, -0.1)
        return Completion("", (), 0.0, "stop", Usage(), tuple(ChoiceLogprob(total, 1) for total in totals))


@pytest.fixture
def _known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    purposes = ("generate", "evaluate", "answer")
    for place in ("tot.llm.decoders", "benchmarks.quality", "benchmarks.engines", "benchmarks.evaluators"):
        monkeypatch.setattr(f"{place}.open_decoders", lambda models, stack: dict.fromkeys(purposes, Known()))
    monkeypatch.setattr("tot.evaluation.fingerprint.hash_model", lambda model: "0")


WAYS = (
    *("--way", "plain: search=cot; prompts=chat"),
    *("--way", "votes: search=self-consistency:samples=4; prompts=chat"),
)
COMMAND = ("quality", "--data", "rows.jsonl", *WAYS, "--limit", "4", "--out", "n.json")


@pytest.mark.usefixtures("_known")
def test_measured_accuracies_match_the_known_ones(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--evaluators", "logprob,random", "--judged", "4"]) == 0
    printed = capfd.readouterr().out
    results = json.loads(Path("n.json").read_text())
    scores = {name: [one["score"] for one in answers.values()] for name, answers in results["ways"].items()}
    assert scores["plain"] == scores["votes, majority of 2"] == [1, 0, 1, 0]
    assert scores["votes"] == scores["votes, majority of 4"] == [1, 1, 1, 0]
    assert scores["votes, weighted by probability of 4"] == [1, 1, 1, 1]
    verdicts = ("An evaluator is good enough to prune by if", "at the end 0.75 (0.30 to 0.95))", "random: not shown")
    for fragment in ("+25.0%", "100.0%", "evaluator", *verdicts):
        assert fragment in printed, fragment
    pieces = {cell["side"]: cell["pieces"] for cell in results["evaluators"]}
    assert [len(each) for each in pieces["logprob"]] == [8] * 4
    truths = [(one["depth"], one["truth"]) for one in pieces["random"][1]]
    assert truths == [(depth, float(answer == "2")) for depth in (1, 2) for answer in SAMPLES["Bo"]]
    ada = [one["value"] for one in pieces["logprob"][0]]
    assert ada[:4] == [ada[0]] * 4  # equal texts
    assert ada[4] == ada[5] == ada[7] > ada[6]
    before = Path("quality/plain/samples.jsonl").read_bytes()
    assert main([*COMMAND, "--evaluators", "random", "--judged", "4"]) == 2
    assert "n.json has no results of these options on this machine: delete it" in capfd.readouterr().err
    assert main([*COMMAND, "--evaluators", "random", "--judged", "4", "--out", "m.json"]) == 0  # resumed
    assert Path("quality/plain/samples.jsonl").read_bytes() == before


@pytest.mark.usefixtures("_known")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--way", "plain"), "--way 'plain' can't be read"),
        (("--way", "plain: cot"), "--way 'plain: cot' can't be read"),
        (("--way", "plain: serch=cot"), "unknown option 'serch'"),
        (("--way", "plain: search=cto"), "unknown search 'cto'"),
        (("--way", "plain: search=cot", "--evaluators", "random"), "--evaluators judges pieces of several solutions"),
        ((*WAYS, "--evaluators", "logprob,beam"), "unknown evaluator 'beam'"),
        ((*WAYS, "--mix", "votes+others"), "--mix 'votes+others' can't be read: join ways with +, such as plain+votes"),
        ((*WAYS, "--judge", "known; dtype"), "--judge 'known; dtype' can't be read: write 'MODEL; option=value"),
    ],
)
def test_invalid_options_are_rejected_before_any_request(
    arguments: tuple[str, ...], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["quality", "--data", "rows.jsonl", *arguments]) == 2
    assert message in capfd.readouterr().err
    assert not Path("quality").exists()


@pytest.mark.usefixtures("_known")
def test_a_pairwise_judge_sees_both_orders(capfd: pytest.CaptureFixture[str]) -> None:
    """This judge prefers the first answer, unless only the second is correct."""
    assert main([*COMMAND, "--judge", "known; dtype=fp32; prompts=papers"]) == 0
    printed = capfd.readouterr().out
    results = {question[:2]: won for question, won in json.loads(Path("n.json").read_text())["votes preferred"].items()}
    assert results == {"Ad": 0.5, "Bo": 1.0, "Cy": 0.5, "Di": 0.5}
    assert "preferred to plain" in printed
    assert re.search(r"votes\W+62\.5% \(21\.9% to 90\.8%\)\W+1 of 4\b", printed)


@pytest.mark.usefixtures("_known")
def test_ways_vote_together_in_turns() -> None:
    again = ("--way", "again: search=self-consistency:samples=2; prompts=chat")
    assert main([*COMMAND, *again, "--mix", "again+votes"]) == 0
    results = json.loads(Path("n.json").read_text())["ways"]
    together = results["again+votes, majority of 6"]
    question = next(question for question in together if "Bo" in question)
    assert [leaf["answer"] for leaf in together[question]["leaves"]] == ["5", "5", "2", "2", "2", "7"]
    assert together[question]["score"] == results["votes, majority of 4"][question]["score"]
    samples = ("again, majority of 2", "votes, majority of 4")
    assert together[question]["tokens"] == sum(results[way][question]["tokens"] for way in samples)


def test_methods_without_a_model_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"question": "1 1 4 8"}\n{"question": "2 3 4"}\n')
    chance = "generator=enumerate:prior=random; evaluator=random; model=none"
    ways = ("--way", f"chance: {chance}", "--way", f"few: {chance}; budget_nodes=1")
    command = ("quality", "--task", "game24", "--data", "rows.jsonl", *ways, "--out", "n.json")
    assert main(list(command)) == 0
    results = json.loads(Path("n.json").read_text())["ways"]
    scores = {name: [one["score"] for one in answers.values()] for name, answers in results.items()}
    assert scores == {"chance": [1, 1], "few": [0, 0]}


def test_a_way_may_repeat_an_option() -> None:
    (options,) = read_ways(["drafts: decoder=seed; decoder_option=draft=a.gguf; decoder_option=k_config=2,1"]).values()
    config = way(Options(data="rows.jsonl"), options).config
    model = config.model.by_purpose["generate"]
    assert (model.decoder, model.options) == ("seed", {"draft": "a.gguf", "k_config": "2,1"})


# -- replays ------------------------------------------------------------------------------------------------------


class Letter(Task):
    """The answer is the first letter of the text."""

    templates: ClassVar = {"thought": "{{ question }}", "chain": "{{ question }}", "answer": "{{ question }}"}
    sampling: ClassVar = {"chain": {"max_tokens": 8}}

    def parse_answer(self, text: str) -> str | None:
        return next((letter.lower() for letter in text if letter.isalpha()), None)


class Drafts(Task):
    """Every thought is a draft, which is an answer by itself."""

    templates: ClassVar[dict[str, str]] = {"thought": "{{ question }}", "answer": "{{ question }}"}
    sampling: ClassVar[dict[str, Any]] = {"thought": {"max_tokens": 4}}

    def answer_at(self, state: State) -> str | None:
        return state.thoughts[-1].text if state.thoughts and state.thoughts[-1].text != "none" else None


def test_leaves_with_an_answer_are_solutions(scripted: Any, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "which?", "answer": "b"}\n')
    decoder = scripted({"which?": ["a", "b", "none"]})
    options: dict[str, Any] = {"search": "bfs:thoughts=3,breadth=3,depth=2", "evaluator": "random"}
    evaluate(Drafts(), tmp_path / "rows.jsonl", out=tmp_path / "out", decoder=decoder, **options)
    (sample,) = read_samples(tmp_path / "out")
    _, leaves = read_leaves(tmp_path / "out", sample, Drafts())
    assert list(leaves.values()) == [("a", 0.0), ("b", 1.0)]


def test_a_replay_equals_a_run_with_fewer_samples(tiny: Any, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"question": f"q{i}", "answer": "e"}) + "\n" for i in range(6)))
    with tiny() as decoder:
        for samples in (2, 4, 8):
            search: Any = {"search": SelfConsistency(samples=samples), "generator": Sample(temperature=1.0)}
            evaluate(Letter, rows, out=tmp_path / str(samples), decoder=decoder, evaluator="random", **search)
    decoded = {samples: read_answers(tmp_path / str(samples), Letter()) for samples in (2, 4, 8)}
    again = replayed("votes", decoded[8], Letter())
    for samples, answers in decoded.items():
        replay = again[f"votes, majority of {samples}"]
        assert {q: (one.score, one.tokens) for q, one in replay.items()} == {
            q: (one.score, one.tokens) for q, one in answers.items()
        }
    assert table({"votes": decoded[8], **again}).row_count == 1 + 2 * 3


def test_leaves_of_a_tree_vote_at_the_cost_of_the_whole_tree() -> None:
    """Branches share tokens, so subsets of the leaves are not replayed."""
    leaves = tuple(Leaf(answer, float(answer == "a"), p, 5) for answer, p in (("a", 0.9), ("b", 0.2), ("b", 0.3)))
    answers = {
        "q": Answered(0.0, 11, "b", thoughts=7, leaves=leaves),
        "r": Answered(1.0, 6, "a", thoughts=3, leaves=leaves[:1]),
    }
    replays = {
        name: [(one.score, one.tokens, one.answer) for one in each.values()]
        for name, each in replayed("tree", answers, Letter()).items()
    }
    assert replays == {
        "tree, majority of all": [(0.0, 11, "b"), (1.0, 6, "a")],
        "tree, weighted by probability of all": [(1.0, 11, "a"), (1.0, 6, "a")],
    }


def test_graded_answers_are_also_counted_if_fully_correct() -> None:
    graded = table({"plain": {"q": Answered(0.75, 3), "r": Answered(1.0, 3)}})
    assert [column.header for column in graded.columns][1:4] == ["right", "minus plain", "wholly right"]
    assert next(iter(graded.columns[3].cells)).startswith("50.0%")
    assert "wholly right" not in [column.header for column in table({"plain": {"q": Answered(1.0, 3)}}).columns]


# -- evaluators ---------------------------------------------------------------------------------------------------


def test_thoughts_of_a_tree_are_judged_once_each(tmp_path: Path) -> None:
    """The truth of a thought is the share of correct leaves below it."""
    tree = ThoughtTree(State(question="q"))

    def grow(parent: Node, text: str, ended: bool = False) -> Node:
        return tree.add(parent, Thought(parts={"thought": text}, ended=ended))

    first = grow(tree.root, "well ")
    grow(first, "and e", ended=True)
    grow(grow(first, "but "), "x", ended=True)
    grow(tree.root, "e", ended=True)
    (tmp_path / "trees").mkdir()
    (tmp_path / "trees" / "0-0.json").write_text(json.dumps(tree.to_json()))

    class Whole(Letter):
        def parse_answer(self, text: str) -> str | None:
            return text

    class Longer:
        def key(self, context: Any, node: Node) -> None:
            return None

        async def evaluate(self, context: Any, nodes: Sequence[Node]) -> list[float]:
            return [float(len(context.state(node).text)) for node in nodes]

    given = [solutions(tmp_path, {"id": "0-0", "question": "q", "reference": "well and e"}, Whole(), None)]
    (found,) = asyncio.run(judged(given, Whole(), Longer(), Backend({}, Meter())))
    assert [(one.depth, one.along, one.truth) for one in found] == [
        (1, 1 / 2.5, 0.5),
        (1, 1.0, 0.0),
        (2, 1.0, 1.0),
        (2, 2 / 3, 0.0),
        (3, 1.0, 0.0),
    ]


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("One.\n\nTwo.\n \n\n Three", ["One.\n\n", "Two.\n \n\n ", "Three"]),
        ("\n\nOne\ntwo", ["\n\nOne\ntwo"]),
        ("One\n\n", ["One\n\n"]),
        ("", []),
    ],
)
def test_a_message_is_split_into_its_paragraphs(text: str, pieces: list[str]) -> None:
    """A token across a paragraph break belongs to the next paragraph."""
    tokens = tuple(map(ord, text))
    whole = SampledText(text=text, tokens=tokens, logprobs=tuple(-float(token) for token in tokens))

    def decode(ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))

    split = pieces_of(whole, decode)
    assert [(one.text, decode(one.tokens)) for one in split] == [(piece, piece) for piece in pieces]
    assert all(one.logprobs == tuple(-float(token) for token in one.tokens) for one in split)
    assert [(one.text, one.tokens) for one in pieces_of(whole, None)] == [(piece, ()) for piece in pieces]


@pytest.mark.parametrize(
    ("value", "expected"),
    [(lambda t: t, "1.00 (0.57 to 1.00)"), (lambda t: -t, "0.00 (0.00 to 0.43)"), (lambda t: 3, "0.50 (0.17 to 0.83)")],
)
def test_auroc_of_known_values(value: Any, expected: str) -> None:
    questions = [
        [Judged(depth, depth / 2, truth, value(truth)) for depth in (1, 2) for truth in (0.0, 0.25, 1.0)]
        for _ in range(5)
    ]
    questions.append([Judged(1, 0.1, 1.0, 0.0), Judged(1, 0.1, 1.0, 5.0)])  # equal truths, so nothing to rank
    for place in PLACES.values():
        share, count = auroc(questions, place)
        assert share is not None
        assert (share.format(".2f"), count) == (expected, 5)
    assert auroc(questions[-1:], PLACES["all"]) == (None, 0)


@pytest.mark.parametrize(
    ("before", "at_end", "expected"),
    [
        (14, 10, "good enough to prune by (AUROC before the end 0.70 (0.67 to 0.73), at the end 0.50 (0.47 to 0.53))"),
        (12, 11, "good enough to weigh votes, too noisy to prune by (AUROC before the end 0.60 (0.57 to 0.63), "),
        (10, 10, "not shown to be good enough to prune by or to weigh votes (AUROC before the end 0.50"),
        (20, 0, "good enough to prune by (AUROC before the end 1.00 (1.00 to 1.00), at the end 0.00"),
    ],
)
def test_verdicts_follow_from_the_lower_bounds(before: int, at_end: int, expected: str) -> None:
    """A right piece has the value `count` among twenty wrong ones with the values 0.5, 1.5 and so on."""
    pieces = [Judged(1, 0.5, 1.0, before), *(Judged(1, 0.5, 0.0, wrong + 0.5) for wrong in range(20))]
    pieces += [Judged(2, 1.0, 1.0, at_end), *(Judged(2, 1.0, 0.0, wrong + 0.5) for wrong in range(20))]
    assert verdict([pieces] * 1000).startswith(expected)
