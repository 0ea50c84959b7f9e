"""`tot bench quality`: accuracies are known, replays are what would have been decoded, evaluators tell."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tot import Sample, SelfConsistency, Task, evaluate
from tot.bench.evaluators import PLACES, Judged, judged, pieces_of, solutions, told
from tot.bench.options import QualityOptions
from tot.bench.quality import Answered, Leaf, prompts_told, read_answers, replayed, table, way
from tot.cli.app import main
from tot.config import SearchConfig
from tot.decoders import Completion, Request, Usage
from tot.decoders.budget import Meter
from tot.decoders.request import ChoiceLogprob
from tot.evaluation.folder import read_samples
from tot.evaluation.leaves import read_leaves
from tot.llm.backend import Backend
from tot.tree.thought import Drawn, State, Thought
from tot.tree.tree import Node, ThoughtTree

ROWS = [{"question": f"{word} is?", "answer": f"#### {i}"} for i, word in enumerate(("Ada", "Bo", "Cy", "Di"), 1)]
SAID = {  # by question, what its samples say: plain answers are right for two, majorities for three
    "Ada": ["1", "1", "2", "1"],
    "Bo": ["5", "2", "2", "7"],
    "Cy": ["3", "9", "8", "3"],
    "Di": ["6", "6", "4", "6"],
}


class Known:
    """Says of each question what it is told to, a character a token."""

    name = "known"

    class tokenizer:  # noqa: N801 - as decoders name it
        @staticmethod
        def decode(tokens: Sequence[int], **options: Any) -> str:
            return "".join(map(chr, tokens))

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return [self._reply(request, sample) for request in requests for sample in range(request.sampling.n)]

    def _reply(self, request: Request, sample: int) -> Completion:
        if isinstance(request.prompt, str):  # to see how fast it is
            return Completion("", (), 0.0, "length", Usage())
        text = request.prompt[0].content  # type: ignore[union-attr]
        word = next((word for word in SAID if word in text), None)
        if word is None:
            raise AssertionError(text)
        if request.choices:
            return self._choice(request, str(list(SAID).index(word) + 1))
        number = SAID[word][sample]
        said = f"It is.\n\n#### {number}"
        probability = -0.1 if number in "14" else -9.0
        first, rest = (-1.0,) * len("It is.\n\n"), (probability,) * len(f"#### {number}")
        tokens = tuple(map(ord, said))
        return Completion(said, tokens, sum(first + rest), "eos", Usage(new_tokens=3), logprobs=first + rest)

    def _choice(self, request: Request, right: str) -> Completion:
        """The first of two answers, unless the second is right and it is not."""
        shown = re.findall(r"^[12]\. (.*)$", request.prompt[-1].content, re.MULTILINE)  # type: ignore[union-attr]
        first = shown[0] == right or shown[1] != right
        totals = (-0.1, -3.0) if first else (-3.0, -0.1)
        return Completion("", (), 0.0, "stop", Usage(), tuple(ChoiceLogprob(total, 1) for total in totals))


@pytest.fixture
def _known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    purposes = ("generate", "evaluate", "answer")
    monkeypatch.setattr(SearchConfig, "open", lambda self, stack: dict.fromkeys(purposes, Known()))
    monkeypatch.setattr("tot.evaluation.fingerprint.hash_model", lambda model: "0")


WAYS = (
    *("--way", "plain: search=cot; prompts=chat"),
    *("--way", "votes: search=self-consistency:samples=4; prompts=chat"),
)


class Drafts(Task):
    """A thought is a draft, which holds its answer by itself."""

    templates: ClassVar[dict[str, str]] = {"thought": "{{ question }}", "answer": "{{ question }}"}
    sampling: ClassVar[dict[str, Any]] = {"thought": {"max_tokens": 4}}

    def answer_at(self, state: State) -> str | None:
        return state.thoughts[-1].text if state.thoughts and state.thoughts[-1].text != "none" else None


def test_leaves_that_hold_an_answer_by_themselves_are_solutions(scripted: Any, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "which?", "answer": "b"}\n')
    decoder = scripted({"which?": ["a", "b", "none"]})
    options: dict[str, Any] = {"search": "bfs:thoughts=3,breadth=3,depth=2", "evaluator": "random"}
    evaluate(Drafts(), tmp_path / "rows.jsonl", out=tmp_path / "out", decoder=decoder, **options)
    (sample,) = read_samples(tmp_path / "out")
    _, leaves = read_leaves(tmp_path / "out", sample, Drafts())
    assert list(leaves.values()) == [("a", 0.0), ("b", 1.0)]


@pytest.mark.usefixtures("_known")
def test_accuracies_are_what_they_are_known_to_be(capfd: pytest.CaptureFixture[str]) -> None:
    asked = ("bench", "quality", "--data", "rows.jsonl", *WAYS, "--limit", "4", "--out", "n.json", "--evaluators")
    assert main([*asked, "logprob,random", "--judged", "4", "--timed", "2", "--picture", "picture.svg"]) == 0
    shown = capfd.readouterr().out
    kept = json.loads(Path("n.json").read_text())
    scores = {name: [one["score"] for one in answers.values()] for name, answers in kept["ways"].items()}
    assert scores["plain"] == [1, 0, 1, 0]
    assert scores["votes"] == scores["votes, majority of 4"] == [1, 1, 1, 0]
    assert scores["votes, majority of 2"] == [1, 0, 1, 0]
    assert scores["votes, weighted by probability of 4"] == [1, 1, 1, 1]
    for said in ("about 0.0 hours", "+25.0%", "100.0%", "evaluator", "2 questions, one at a time"):
        assert said in shown, said
    assert "seconds a question" in Path("picture.svg").read_text()  # what glyphs say stands in comments
    judged = {cell["side"]: cell["pieces"] for cell in kept["evaluators"]["cells"]}
    assert [len(each) for each in judged["logprob"]] == [8] * 4
    truths = [(one["depth"], one["truth"]) for one in judged["random"][1]]
    assert truths == [(depth, float(said == "2")) for depth in (1, 2) for said in SAID["Bo"]]
    ada = [one["value"] for one in judged["logprob"][0]]
    assert ada[:4] == [ada[0]] * 4  # they say the same
    assert ada[4] == ada[5] == ada[7] > ada[6]
    refused = ("bench", "quality", "--data", "rows.jsonl", "--way", "plain: search=cot", "--evaluators", "random")
    assert main(refused) == 2
    assert "--evaluators judges pieces of several solutions per question" in capfd.readouterr().err
    assert main([*asked, "logprob,beam"]) == 2  # before anything is asked
    assert "unknown evaluator 'beam'" in capfd.readouterr().err
    before = Path("quality/plain/samples.jsonl").read_bytes()
    again = ("random", "--judged", "4", "--picture", "tokens.svg")
    assert main([*asked, *again]) == 0  # gone on with: nothing is decoded again
    assert "new tokens a question" in Path("tokens.svg").read_text()
    assert Path("quality/plain/samples.jsonl").read_bytes() == before


def test_ways_that_ask_no_model_are_told_beside_each_other(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"question": "1 1 4 8"}\n{"question": "2 3 4"}\n')
    chance = "generator=enumerate:prior=random; evaluator=random; model=none"
    ways = ("--way", f"chance: {chance}", "--way", f"few: {chance}; budget_nodes=1")
    asked = ("bench", "quality", "--task", "game24", "--data", "rows.jsonl", *ways, "--timed", "1", "--out", "n.json")
    assert main(list(asked)) == 0
    assert "2 ways without a model" in capfd.readouterr().out
    kept = json.loads(Path("n.json").read_text())["ways"]
    assert {name: [one["score"] for one in answers.values()] for name, answers in kept.items()} == {
        "chance": [1, 1],
        "few": [0, 0],
    }


def test_an_option_may_be_given_several_times_in_a_way() -> None:
    options = "decoder=seed; decoder_option=draft=a.gguf; decoder_option=k_config=2,1"
    asked = QualityOptions(data="rows.jsonl", way=[f"drafts: {options}"])
    made = way(asked, asked.ways["drafts"]).config
    assert (made.decoder, made.model_options["draft"], made.model_options["k_config"]) == ("seed", "a.gguf", "2,1")


@pytest.mark.usefixtures("_known")
@pytest.mark.parametrize(
    ("way", "said"),
    [
        ("plain", "--way 'plain' can't be read"),
        ("plain: cot", "--way 'plain: cot' can't be read"),
        ("plain: serch=cot", "unknown option 'serch'"),
        ("plain: search=cto", "unknown search 'cto'"),
    ],
)
def test_a_way_that_means_nothing_is_refused(way: str, said: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "quality", "--data", "rows.jsonl", "--way", way]) == 2
    assert said in capfd.readouterr().err
    assert not Path("quality").exists()


class Letter(Task):
    """Its answer is the first letter that is written."""

    templates: ClassVar = {"thought": "{{ question }}", "chain": "{{ question }}", "answer": "{{ question }}"}
    sampling: ClassVar = {"chain": {"max_tokens": 3}}

    def parse_answer(self, text: str) -> str | None:
        return next((letter.lower() for letter in text if letter.isalpha()), None)


def test_ways_that_are_asked_with_different_prompts_are_told() -> None:
    given = ["a: prompts=chat", "b: decoder=pdos", "c: prompts=chat"]
    asked = QualityOptions(data="rows.jsonl", model="smollm2-135m", way=given)
    works = {name: way(asked, options) for name, options in asked.ways.items()}
    assert "prompts differ: a chat, b papers, c chat" in prompts_told(works)
    del works["b"]
    assert prompts_told(works) == ""


def test_a_replay_is_what_would_have_been_decoded(tiny: Any, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"question": f"q{i}", "answer": "e"}) + "\n" for i in range(6))
    )
    with tiny() as decoder:
        for samples in (2, 4, 8):
            search = {"search": SelfConsistency(samples=samples), "generator": Sample(temperature=1.0)}
            out = tmp_path / str(samples)
            evaluate(Letter, tmp_path / "rows.jsonl", out=out, decoder=decoder, evaluator="random", **search)
    decoded = {samples: read_answers(tmp_path / str(samples), Letter()) for samples in (2, 4, 8)}
    again = replayed("votes", decoded[8], Letter())
    for samples, answers in decoded.items():
        found = again[f"votes, majority of {samples}"]
        assert {question: one.score for question, one in found.items()} == {q: one.score for q, one in answers.items()}
        assert {question: one.tokens for question, one in found.items()} == {
            q: one.tokens for q, one in answers.items()
        }
    assert table({"votes": decoded[8], **again}).row_count == 1 + 2 * 3


def test_a_trees_leaves_are_chosen_among_at_the_price_of_the_tree() -> None:
    """Branches share tokens, so fewer of them are not replayed."""
    leaves = tuple(
        Leaf(answer, float(answer == "a"), None, probability, 5)
        for answer, probability in (("a", 0.9), ("b", 0.2), ("b", 0.3))
    )
    answers = {
        "q": Answered(0.0, 11, "b", thoughts=7, leaves=leaves),
        "r": Answered(1.0, 6, "a", thoughts=3, leaves=leaves[:1]),
    }
    found = {
        name: [(one.score, one.tokens, one.answer) for one in each.values()]
        for name, each in replayed("tree", answers, Letter()).items()
    }
    assert found == {
        "tree, majority of all": [(0.0, 11, "b"), (1.0, 6, "a")],
        "tree, weighted by probability of all": [(1.0, 11, "a"), (1.0, 6, "a")],
    }


def test_the_best_leaf_is_the_one_of_most_value() -> None:
    """Where all leaves have some: two votes of 0.4 outweigh one of 0.7."""
    values = (("a", 0.7), ("b", 0.4), ("b", 0.4), (None, 0.9))
    leaves = tuple(Leaf(answer, float(answer == "a"), value, None, 5) for answer, value in values)
    found = replayed("votes", {"q": Answered(0.0, 20, "b", thoughts=4, leaves=leaves)}, Letter())
    right = {name: answers["q"].answer for name, answers in found.items()}
    assert right == {
        "votes, majority of 2": "a",
        "votes, weighted by value of 2": "a",
        "votes, best value of 2": "a",
        "votes, majority of 4": "b",
        "votes, weighted by value of 4": "b",
        "votes, best value of 4": "a",
    }


def test_values_that_are_the_probabilities_get_no_row_of_their_own() -> None:
    leaves = tuple(Leaf(answer, 0.0, value, value, 5) for answer, value in (("a", 0.7), ("b", 0.4)))
    found = replayed("votes", {"q": Answered(0.0, 10, "a", thoughts=2, leaves=leaves)}, Letter())
    assert list(found) == ["votes, majority of 2", "votes, weighted by probability of 2", "votes, best value of 2"]


def test_a_trees_thoughts_are_judged_as_they_grew(tmp_path: Path) -> None:
    """Each once, with the share of the leaves behind it that are right."""
    tree = ThoughtTree(State(question="q"))

    def grow(parent: Node, text: str, ended: bool = False) -> Node:
        return tree.add(parent, Thought(parts={"thought": text}, ended=ended))

    first = grow(tree.root, "well ")
    grow(first, "and e", ended=True)
    grow(grow(first, "but "), "x", ended=True)
    grow(tree.root, "e", ended=True)
    (tmp_path / "trees").mkdir()
    (tmp_path / "trees" / "0-0.json").write_text(json.dumps(tree.to_json()))
    sample = {"id": "0-0", "question": "q", "reference": "well and e"}

    class Whole(Letter):
        def parse_answer(self, text: str) -> str | None:
            return text

    class Longer:
        def key(self, context: Any, node: Node) -> None:
            return None

        async def evaluate(self, context: Any, nodes: Sequence[Node]) -> list[float]:
            return [float(len(context.state(node).text)) for node in nodes]

    given = [solutions(tmp_path, sample, Whole(), None)]
    (found,) = asyncio.run(judged(given, Whole(), Longer(), Backend({}, Meter())))
    assert [(one.depth, one.along, one.truth) for one in found] == [
        (1, 1 / 2.5, 0.5),
        (1, 1.0, 0.0),
        (2, 1.0, 1.0),
        (2, 2 / 3, 0.0),
        (3, 1.0, 0.0),
    ]


@pytest.mark.usefixtures("_known")
def test_a_model_that_judges_pairs_sees_them_in_both_orders(capfd: pytest.CaptureFixture[str]) -> None:
    """This one prefers what it sees first, unless only the other is right."""
    asked = ("bench", "quality", "--data", "rows.jsonl", *WAYS, "--limit", "4", "--out", "n.json")
    assert main([*asked, "--judge", "known; dtype"]) == 2
    assert "--judge 'known; dtype' can't be read: write 'MODEL; option=value" in capfd.readouterr().err
    assert main([*asked, "--judge", "known; dtype=fp32; prompts=papers"]) == 0
    shown = capfd.readouterr().out
    kept = {question[:2]: won for question, won in json.loads(Path("n.json").read_text())["votes preferred"].items()}
    assert kept == {"Ad": 0.5, "Bo": 1.0, "Cy": 0.5, "Di": 0.5}
    assert "preferred to plain" in shown
    assert re.search(r"votes\W+62\.5% \(50\.0% to 87\.5%\)\W+1 of 4\b", shown)


def test_graded_answers_are_also_counted_where_they_are_wholly_right() -> None:
    ways = {"plain": {"q": Answered(0.75, 3), "r": Answered(1.0, 3)}}
    assert [column.header for column in table(ways).columns][1:3] == ["right", "wholly right"]
    assert next(iter(table(ways).columns[2].cells)).startswith("50.0%")
    assert "wholly right" not in [column.header for column in table({"plain": {"q": Answered(1.0, 3)}}).columns]


@pytest.mark.usefixtures("_known")
def test_ways_vote_together_in_turns(capfd: pytest.CaptureFixture[str]) -> None:
    ways = (*WAYS, "--way", "again: search=self-consistency:samples=2; prompts=chat")
    asked = ("bench", "quality", "--data", "rows.jsonl", *ways, "--limit", "4", "--out", "n.json")
    assert main([*asked, "--mix", "again+votes"]) == 0
    kept = json.loads(Path("n.json").read_text())["ways"]
    together = kept["again+votes, majority of 6"]
    question = next(question for question in together if "Bo" in question)
    assert [leaf["answer"] for leaf in together[question]["leaves"]] == ["5", "5", "2", "2", "2", "7"]
    assert together[question]["score"] == kept["votes, majority of 4"][question]["score"]
    drawn = ("again, majority of 2", "votes, majority of 4")
    assert together[question]["tokens"] == sum(kept[way][question]["tokens"] for way in drawn)
    assert main([*asked, "--mix", "again+others"]) == 2
    assert "--mix 'again+others' can't be read: join ways with +, such as plain+votes+again" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("One.\n\nTwo.\n \n\n Three", ["One.\n\n", "Two.\n \n\n ", "Three"]),
        ("\n\nOne\ntwo", ["\n\nOne\ntwo"]),
        ("One\n\n", ["One\n\n"]),
        ("", []),
    ],
)
def test_a_message_is_cut_into_its_paragraphs(text: str, pieces: list[str]) -> None:
    """Where one token is the end of a paragraph and the beginning of the next, it is the next one's."""
    tokens = tuple(map(ord, text))
    whole = Drawn(text=text, tokens=tokens, logprobs=tuple(-float(token) for token in tokens))
    found = pieces_of(whole, Known.tokenizer.decode)
    assert [(one.text, Known.tokenizer.decode(one.tokens)) for one in found] == [(piece, piece) for piece in pieces]
    assert all(one.logprobs == tuple(-float(token) for token in one.tokens) for one in found)
    assert [(one.text, one.tokens) for one in pieces_of(whole, None)] == [(piece, ()) for piece in pieces]
    twos = pieces_of(whole, lambda tokens: text[: 2 * len(tokens)])
    assert [one.text for one in twos] == pieces
    assert sum(len(one.tokens) for one in twos) <= len(tokens)


@pytest.mark.parametrize(("value", "expected"), [(lambda t: t, "1.00"), (lambda t: -t, "0.00"), (lambda t: 3, "0.50")])
def test_telling_is_known(value: Any, expected: str) -> None:
    questions = [
        [Judged(depth, depth / 2, truth, value(truth)) for depth in (1, 2) for truth in (0.0, 0.25, 1.0)]
        for _ in range(5)
    ]
    questions.append([Judged(1, 0.1, 1.0, 0.0), Judged(1, 0.1, 1.0, 5.0)])  # nothing to tell
    for place in ("all", "first pieces", "half way", "ends"):
        assert told(questions, PLACES[place]) == f"{expected} ({expected} to {expected}), 5 questions"
    assert told(questions[-1:], PLACES["all"]) == ""
