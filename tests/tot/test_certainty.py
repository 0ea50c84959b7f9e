"""Certainty: features of votes, curves and their files, fitting, and the reliability that evaluations report."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from ml_dtypes import bfloat16

from benchmarks.__main__ import main as benchmark
from benchmarks.calibrate import Vote, cross_validated, fit
from tot import BFS, BestOfN, ChainOfThought, SelfConsistency, Solution, Task, Value, solve
from tot.cli.output import answer_line
from tot.config import SearchConfig
from tot.decoders import OptionError
from tot.decoders.models.weights import Weights
from tot.llm.decoders import identity_of
from tot.search.certainty import Curve, Features, curve_for, features, to_json
from tot.search.votes import Ballot
from tot.tasks.gsm8k import GSM8K


class Riddle(Task):
    """The answer is the last word of a solution."""

    templates: ClassVar = {"chain": "solve {{ question }}", "value": "value {{ chain }}"}

    def parse_answer(self, text: str) -> str | None:
        words = text.split()
        return words[-1] if words and words[-1] != "..." else None


def curve(task: str = "riddle", model: str | None = None, **changes: Any) -> Curve:
    """Return a curve whose logit is twice the share minus one."""
    coefficients = Features(share=2, agree=0, weight=0)
    options: dict[str, Any] = {"questions": 50, "intercept": -1, "coefficients": coefficients, "weights": (0.4, 0.8)}
    return Curve(task=task, model=model, **options | changes)


def logistic(logit: float) -> float:
    return 1 / (1 + math.exp(-logit))


def written(path: Path, *curves: Curve) -> str:
    path.write_text(json.dumps(to_json(curves)))
    return str(path)


# -- features and curves ----------------------------------------------------------------------------------------


def test_features_are_shares_of_the_weight_with_one_more_ballot_for_no_answer() -> None:
    ballots = [Ballot("a", 0.5, "chain"), Ballot("b", 0.6, "chain"), Ballot("a", 0.7, "program")]
    seen = features(ballots)
    assert seen.share == pytest.approx(1.2 / 2.4)
    assert (seen.agree, seen.weight) == (1.0, pytest.approx(0.6))
    assert features(ballots[:2]).model_dump() == pytest.approx({"share": 0.6 / 1.65, "agree": 0, "weight": 0.6})


def test_a_curve_counts_for_its_task_and_model_only(tmp_path: Path, tiny: Any) -> None:
    model = identity_of(tiny().engine.loaded)
    assert model is not None
    assert model.startswith("llama-0.0b-")
    path = written(tmp_path / "c.json", curve("gsm8k"), curve("gsm8k", model), curve("game24", model))
    for decoder, wanted in ((tiny(), model), (object(), None)):
        found = curve_for(GSM8K(), {"generate": decoder}, path)
        assert found is not None
        assert (found.task, found.model) == ("gsm8k", wanted)
    assert curve_for(GSM8K(), {"generate": tiny(), "escalate": object()}, path) == curve("gsm8k")
    with pytest.raises(OptionError, match="certainty curves for game24, gsm8k, not for riddle"):
        curve_for(Riddle(), {"generate": tiny()}, path)


def test_without_a_fitted_curve_the_certainty_is_not_known(tiny: Any) -> None:
    """Five equal votes of a toy task, and a known task with a model that no curve was fitted for."""
    for task in (GSM8K(), Riddle()):
        for decoder in (tiny(), object()):
            assert curve_for(task, {"generate": decoder}, None) is None


def test_the_identity_of_a_model_survives_quantization_and_not_fine_tuning() -> None:
    def loaded(norm: float, dtype: Any) -> Any:
        weights = SmallWeights({"model.norm.weight": np.full(64, norm, dtype)})
        return SimpleNamespace(config=SimpleNamespace(model_type="qwen2"), weights=weights)

    assert (
        identity_of(loaded(1.5, np.float32))
        == identity_of(loaded(1.5, bfloat16))
        != identity_of(loaded(1.25, bfloat16))
    )
    assert identity_of(None) is None
    assert identity_of(SimpleNamespace(config=None, weights=SmallWeights({}))) is None  # type: ignore[arg-type]


class SmallWeights(Weights):
    def __init__(self, arrays: dict[str, Any]) -> None:
        self._arrays, self.shapes = arrays, {name: array.shape for name, array in arrays.items()}

    def __getitem__(self, name: str) -> Any:
        return self._arrays[name]


# -- solutions --------------------------------------------------------------------------------------------------


def voted(scripted: Any, replies: Sequence[str], task: Any = Riddle, **options: Any) -> Solution:
    search = SelfConsistency(samples=len(replies))
    config = SearchConfig.of(None, {"search": search, **options})
    return solve(task, "q", config, decoder=scripted({"solve q": list(replies)}))


def test_a_vote_has_the_certainty_of_its_curve(scripted: Any, tmp_path: Path) -> None:
    path = written(tmp_path / "c.json", curve("riddle"))
    solution = voted(scripted, ["so yes", "yes", "no", "well ..."], certainty=path)
    assert solution.certainty == pytest.approx(logistic(2 * 2 / 4 - 1)) == pytest.approx(0.5)
    assert solution.summary()["certainty"] == solution.to_json()["certainty"] == solution.certainty
    assert answer_line(solution) == "Answer (2 of 3 votes, 50% sure): yes"
    tie = voted(scripted, ["so yes", "no"], certainty=path)
    assert (tie.answer, tie.certainty) == ("yes", pytest.approx(logistic(2 / 3 - 1)))


@pytest.mark.parametrize(
    ("replies", "search", "answer"),
    [
        (["so yes"], ChainOfThought(), "yes"),
        (["so yes"], SelfConsistency(samples=1), "yes"),
        (["so yes", "yes"], BestOfN(samples=2), "yes"),
        (["a ...", "b ..."], SelfConsistency(samples=2), None),
    ],
    ids=["one greedy path", "one sample", "no vote", "no valid answer"],
)
def test_without_a_vote_the_certainty_is_not_known(
    scripted: Any, replies: list[str], search: Any, answer: str | None
) -> None:
    decoder = scripted({"solve q": replies, "value so yes": "5", "value yes": "4"})
    solution = solve(Riddle, "q", decoder=decoder, search=search, evaluator=Value())
    assert (solution.answer, solution.certainty) == (answer, None)
    expected = "Answer: none found" if answer is None else "Answer: yes"
    assert answer_line(solution) == expected


def test_a_verified_answer_is_certain_unless_the_task_checks_a_part(scripted: Any) -> None:
    checked = type("Checked", (Riddle,), {"verify": lambda self, question, answer: answer == "yes"})
    solution = voted(scripted, ["no", "no", "so yes"], checked)
    assert (solution.solved, solution.certainty) == (True, 1.0)
    assert answer_line(solution) == "Answer (verified): yes"
    partly = type("Partly", (checked,), {"verdict": "examples pass"})
    assert voted(scripted, ["no", "so yes"], partly).certainty is None


def test_shipped_curves_are_not_used_for_solutions_that_share_thoughts(
    letters: Any, scripted: Any, tmp_path: Path
) -> None:
    replies = {"grow": ["a", "b"], "value a": "9", "value b": "5", "answer a": "1", "answer b": "1"}
    search = BFS(thoughts=2, breadth=2, depth=2, aggregate="majority")
    grown: Callable[..., Solution] = lambda **options: solve(  # noqa: E731
        letters, "q", SearchConfig.of(None, options), decoder=scripted(replies), search=search, evaluator=Value()
    )
    assert (grown().votes, grown().certainty) == ((2, 2), None)
    own = written(tmp_path / "c.json", curve("letters"))
    assert grown(certainty=own).certainty == pytest.approx(logistic(2 * 2 / 3 - 1))


# -- files ------------------------------------------------------------------------------------------------------

GOOD = to_json([curve("riddle")])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (json.dumps(to_json([curve("game24"), curve("gsm8k")])), "certainty curves for game24, gsm8k, not for riddle"),
        (
            json.dumps(to_json([curve("riddle", "qwen2-0.5b")])),
            "for qwen2-0.5b, not for a model that does not run locally",
        ),
        (json.dumps(to_json([])), "certainty curves for nothing, not for riddle"),
        (json.dumps(GOOD | {"version": 1}), r"not a file of certainty curves, version 2 \(version = 1"),
        (json.dumps(GOOD | {"format": "tot.run"}), r"not a file of certainty curves, version 2 \(format = 'tot.run'"),
        (json.dumps(GOOD)[:100], "not a file of certainty curves, version 2 .*Invalid JSON"),
        (json.dumps(GOOD).replace("-1.0", "NaN"), r"\(curves.0.intercept = nan: Input should be a finite number"),
        (json.dumps(GOOD).replace('"share"', '"shares"'), r"\(curves.0.coefficients.share"),
        ("[]", r"not a file of certainty curves, version 2"),
        (None, "can't be read .*No such file"),
    ],
    ids=["task", "model", "empty", "version", "format", "cut", "nan", "names", "list", "missing"],
)
def test_an_invalid_file_of_curves_is_refused(scripted: Any, tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "c.json").write_text(text)
    decoder = scripted({"solve q": ["yes", "yes"]})
    config = SearchConfig.of(None, {"certainty": str(tmp_path / "c.json")})
    with pytest.raises(OptionError, match=message):
        solve(Riddle, "q", config, decoder=decoder, search=SelfConsistency(samples=2))
    assert decoder.batches == []


# -- fitting ----------------------------------------------------------------------------------------------------


def drawn(questions: int) -> list[Vote]:
    """Draw votes whose scores follow a known curve of share and agreement."""
    random, votes = np.random.default_rng(0), []
    for i in range(questions):
        share, agree = random.uniform(0.3, 0.95), float(random.random() < 0.5)
        right = random.random() < logistic(6 * share - 4 + agree)
        seen = Features(share=share, agree=agree, weight=0.7)
        votes.append(Vote(str(i), seen, float(right)))
    return votes


def test_a_fit_recovers_the_curve_of_its_votes() -> None:
    votes = drawn(2000)
    own = fit(votes, "riddle", "qwen2-0.5b")
    assert (own.task, own.model, own.questions, own.weights) == ("riddle", "qwen2-0.5b", 2000, (0.7, 0.7))
    for share, agree in ((0.4, 0.0), (0.6, 1.0), (0.9, 0.0)):
        seen = Features(share=share, agree=agree, weight=0.7)
        assert own.certainty(seen) == pytest.approx(logistic(6 * share - 4 + agree), abs=0.04)
    measured = cross_validated(votes, "riddle")
    assert measured.error < 0.04
    assert measured.score_at_coverage[50] - measured.score_at_coverage[100] > 0.1


def test_too_few_questions_are_refused() -> None:
    with pytest.raises(OptionError, match=r"riddle, no local model: 19 questions have votes .*, but a curve needs 20"):
        fit(drawn(19), "riddle")


PARTS = '''
import zlib
from tot import Task
from tot.decoders import Completion, Usage

class Riddle(Task):
    """Easy questions get one answer from all samples, hard ones mostly other answers."""

    templates = {"chain": "{{ question }}"}

    def parse_answer(self, text):
        return text or None

class Voter:
    def generate(self, requests):
        return [self.reply(one, i) for one in requests for i in range(one.sampling.n)]

    def reply(self, request, sample):
        number = int(request.prompt[-1].content.split()[-1])
        noise = zlib.crc32(f"{number} {sample} {request.sampling.seed}".encode())
        right = noise % 10 < (9, 5, 1)[number % 3]
        text = "" if noise % 17 == 0 else str(number) if right else f"wrong {noise % 5}"
        return Completion(text, (), 0.0, "eos", Usage(new_tokens=1))
'''


@pytest.fixture
def parts(tmp_path: Path) -> str:
    path = tmp_path / "parts.py"
    path.write_text(PARTS)
    rows = [{"question": f"number {i}", "answer": str(i)} for i in range(60)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_curves_are_fitted_on_evaluations_and_used(
    tot: Any, tmp_path: Path, parts: str, capfd: pytest.CaptureFixture[str]
) -> None:
    here = ("--decoder", f"{parts}:Voter", "--model", "none", "--search", "self-consistency:samples=6")
    task, folder, own = f"{parts}:Riddle", str(tmp_path / "out"), str(tmp_path / "c.json")
    status, out, err = tot("eval", task, *here, "--data", str(tmp_path / "rows.jsonl"), "--out", folder)
    assert (status, err) == (0, "")
    assert "Calibration error" not in out
    assert benchmark(["calibrate", "--folder", folder, "--out", own, "--task", task]) == 0
    out = capfd.readouterr().out
    fitted = [cell.strip() for cell in out.splitlines()[4].strip("│").split("│")]
    assert fitted[:3] == ["riddle", "not local", "60"]
    assert 250 < int(fitted[3]) <= 300  # beginnings of two to six samples with an answer
    surer, other = (float(cell.rstrip("%")) for cell in fitted[5:])
    assert surer - other > 30
    curves = json.loads((tmp_path / "c.json").read_text())["curves"]
    assert [(one["task"], one["model"], one["questions"]) for one in curves] == [("riddle", None, 60)]
    status, out, err = tot("solve", task, "number 3", *here, "--certainty", own, "--json")
    assert (status, err) == (0, "")
    assert json.loads(out)["certainty"] > 0.8
    assert benchmark(["calibrate", "--folder", str(tmp_path), "--out", own]) == 2
    assert f"{tmp_path} is not the folder of an evaluation: it has no config.yaml\n" in capfd.readouterr().err
