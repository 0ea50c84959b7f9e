"""`tot bench quality`: accuracies are known, replays are what would have been decoded, evaluators tell."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tot import Sample, SelfConsistency, Task, evaluate
from tot.bench.quality import Judged, read_answers, replayed, table, told
from tot.cli.app import main
from tot.config import SearchConfig
from tot.decoders import Completion, Request, Usage

ROWS = [{"question": f"{word} is?", "answer": f"#### {i}"} for i, word in enumerate(("Ada", "Bo", "Cy", "Di"), 1)]
SAID = {  # by question, what its samples say: plain answers are right for two, majorities for three
    "Ada": ["1", "1", "2", "1"],
    "Bo": ["5", "2", "2", "7"],
    "Cy": ["3", "9", "8", "3"],
    "Di": ["6", "6", "4", "6"],
}


class Known:
    """Says of each question what it is told to; a piece of a message first, where it may stop there."""

    name = "known"

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return [self._reply(request, sample) for request in requests for sample in range(request.sampling.n)]

    def _reply(self, request: Request, sample: int) -> Completion:
        if isinstance(request.prompt, str):  # to see how fast it is
            return Completion("", (), 0.0, "length", Usage())
        text = request.prompt[0].content  # type: ignore[union-attr]
        word = next((word for word in SAID if word in text), None)
        if word is None or request.choices:
            raise AssertionError(text)
        if request.sampling.keep_stop and len(request.prompt) == 1:
            said, reason = f"It is {SAID[word][sample]} first.\n\n", "stop"
        else:
            before = request.prompt[-1].content if len(request.prompt) > 1 else ""  # type: ignore[union-attr]
            told = before.split()[2] if before else SAID[word][sample]
            said, reason = f"#### {told}", "eos"
        probability = -0.1 if "1" in said or "4" in said else -2.0
        tokens = tuple(range(3))
        return Completion(said, tokens, 3 * probability, reason, Usage(new_tokens=3), logprobs=(probability,) * 3)


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
    assert Path("picture.svg").exists()
    assert {one["truth"] for each in kept["evaluator logprob"] for one in each} == {0.0, 1.0}
    before = Path("quality/plain/samples.jsonl").read_bytes()
    assert main([*asked, "random", "--judged", "4"]) == 0  # gone on with: nothing is decoded again
    assert Path("quality/plain/samples.jsonl").read_bytes() == before


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


@pytest.mark.parametrize(("value", "expected"), [(lambda t: t, "1.00"), (lambda t: -t, "0.00"), (lambda t: 3, "0.50")])
def test_telling_is_known(value: Any, expected: str) -> None:
    questions = [
        [Judged(depth, truth, value(truth)) for depth in (1, 2) for truth in (0.0, 0.25, 1.0)] for _ in range(5)
    ]
    questions.append([Judged(1, 1.0, 0.0), Judged(1, 1.0, 5.0)])  # nothing to tell
    assert told(questions, range(1, 99)) == f"{expected} ({expected} to {expected}), 5 questions"
    assert told(questions, range(3, 99)) == ""
