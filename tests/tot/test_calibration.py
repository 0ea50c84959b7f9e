"""Calibration: probabilities of answers, files, fits on simulated and evaluated samples."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from benchmarks.__main__ import main as benchmark
from benchmarks.calibrate import calibrate, cross_validated, fit
from tot import BestOfN, ChainOfThought, SelfConsistency, Solution, Task, Value, solve
from tot.cli.output import answer_line
from tot.config import SearchConfig
from tot.decoders import OptionError
from tot.evaluation.estimate import reliability
from tot.evaluation.measures import calibrated
from tot.evaluation.pool import Sample
from tot.llm.decoders import identity_of
from tot.search.calibration import Calibration, Source, calibration_of, general, to_json
from tot.search.votes import Ballot
from tot.tasks.gsm8k import GSM8K


class Riddle(Task):
    """The answer is the last word of a solution."""

    templates: ClassVar = {"chain": "solve {{ question }}", "value": "value {{ chain }}"}

    def parse_answer(self, text: str) -> str | None:
        words = text.split()
        return words[-1] if words and words[-1] != "..." else None


CHAIN = Source(weight=2, others=1, tokens=50)
PROGRAM = Source(weight=3, others=0.5, tokens=20)


def one(task: str | None = "riddle", model: str | None = None, **sources: Source) -> Calibration:
    sources = sources or {"chain": CHAIN}
    return Calibration(task=task, model=model, questions=50, none=0, sources=sources, gains=(0.5, 0.2))


def written(path: Path, *calibrations: Calibration) -> str:
    path.write_text(json.dumps(to_json(calibrations)))
    return str(path)


# -- probabilities ------------------------------------------------------------------------------------------------


def test_probabilities_are_products_over_the_sources() -> None:
    own = one(program=PROGRAM, chain=CHAIN)
    ballots = [Ballot("a", 1.0, "chain"), Ballot("a", 1.0, "program@large"), Ballot("b", 9.0, "chain")]
    found = own.probabilities(ballots, {"chain": 3, "program": 1})
    # v(a) = 2 ** 2 * 2 ** 3, v(b) = 2 ** 2, v(none) = 4 ** 1 * 2 ** 0.5
    total = 32 + 4 + 4 * math.sqrt(2)
    assert found == pytest.approx({"a": 32 / total, "b": 4 / total})


def test_an_unknown_source_counts_as_a_chain_or_as_the_first() -> None:
    ballots = [Ballot("a", 1.0, "step")] * 2
    assert one(program=PROGRAM, chain=CHAIN).probabilities(ballots, {"step": 2}) == {"a": pytest.approx(9 / (9 + 3))}
    assert one(program=PROGRAM).probabilities(ballots, {"step": 2}) == {"a": pytest.approx(27 / (27 + math.sqrt(3)))}


def test_large_exponents_do_not_overflow() -> None:
    own = one(chain=Source(weight=20, others=-20, tokens=1))
    assert own.probabilities([Ballot("a", 1.0, "chain")] * 10**4, {"chain": 10**4}) == {"a": 1.0}


def test_gains_depend_on_the_number_of_samples_and_the_probability() -> None:
    assert [one().gain(samples, 0.6) for samples in (0, 1, 9)] == pytest.approx([0.2, 0.08, 0.08])


def test_a_calibration_counts_for_its_task_and_model_only(tmp_path: Path, tiny: Any) -> None:
    model = identity_of(tiny().engine.loaded)
    assert model is not None
    assert model.startswith("llama-0.0b-")
    path = written(tmp_path / "c.json", one("gsm8k"), one("gsm8k", model), one("game24", model))
    for decoder, wanted in ((tiny(), model), (object(), None)):
        assert calibration_of(GSM8K(), decoder, path) == one("gsm8k", wanted)
        for task in (GSM8K(), Riddle()):
            assert calibration_of(task, decoder, None) is None
    assert (general().task, general().model) == (None, None)


# -- solutions ----------------------------------------------------------------------------------------------------


def voted(scripted: Any, replies: Sequence[str], task: Any = Riddle, **options: Any) -> Solution:
    config = SearchConfig.of(None, {"search": SelfConsistency(samples=len(replies)), **options})
    return solve(task, "q", config, decoder=scripted({"solve q": list(replies)}))


def test_a_vote_has_the_probability_of_its_calibration(scripted: Any, tmp_path: Path) -> None:
    path = written(tmp_path / "c.json", one())
    solution = voted(scripted, ["so yes", "yes", "no", "well ..."], calibration=path)
    assert solution.certainty == pytest.approx(9 / (9 + 4 + 5))
    assert solution.gain == pytest.approx(0.5 * 0.2)
    assert solution.summary()["certainty"] == solution.to_json()["certainty"] == solution.certainty
    assert answer_line(solution) == "Answer (2 of 3 votes, 50% sure, one more sample +10.0 points): yes"
    without = voted(scripted, ["so yes", "yes"])
    assert (without.certainty, without.gain) == (None, None)


@pytest.mark.parametrize("search", [ChainOfThought(), BestOfN(samples=2)], ids=["one greedy path", "no vote"])
def test_without_a_vote_the_certainty_is_not_known(scripted: Any, tmp_path: Path, search: Any) -> None:
    decoder = scripted({"solve q": ["so yes", "yes"], "value so yes": "5", "value yes": "4"})
    config = SearchConfig.of(None, {"calibration": written(tmp_path / "c.json", one())})
    solution = solve(Riddle, "q", config, decoder=decoder, search=search, evaluator=Value())
    assert (solution.answer, solution.certainty, answer_line(solution)) == ("yes", None, "Answer: yes")


def test_a_verified_answer_is_certain_unless_the_task_checks_a_part(scripted: Any, tmp_path: Path) -> None:
    path = written(tmp_path / "c.json", one())
    checked = type("Riddle", (Riddle,), {"verify": lambda self, question, answer: answer == "yes"})
    solution = voted(scripted, ["no", "no", "so yes"], checked, calibration=path)
    assert (solution.solved, solution.certainty) == (True, 1.0)
    assert answer_line(solution) == "Answer (verified): yes"
    partly = type("Riddle", (checked,), {"verdict": "examples pass"})
    assert voted(scripted, ["no", "so yes"], partly, calibration=path).certainty is None


# -- files --------------------------------------------------------------------------------------------------------

GOOD = json.dumps(to_json([one()]))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (json.dumps(to_json([one("game24"), one(None)])), "has calibrations for any task, game24, not for riddle: fit"),
        (json.dumps(to_json([one("riddle", "qwen2")])), "for qwen2, not for models that do not run locally: fit"),
        (json.dumps(to_json([])), "calibrations for nothing, not for riddle: fit one with"),
        (GOOD.replace('"version": 1', '"version": 2'), r"version 1 \(version = 2: .* fit one with"),
        (GOOD.replace("tot.calibration", "tot.run"), r"version 1 \(format = 'tot.run'"),
        (GOOD[:100], "not a file of calibrations, version 1 .*Invalid JSON.*: fit one with"),
        ("", "not a file of calibrations, version 1 .*Invalid JSON"),
        (
            GOOD.replace('"weight": 2.0', '"weight": NaN'),
            r"sources.chain.weight = nan: Input should be a finite number",
        ),
        (GOOD.replace('"weight": 2.0', '"weight": -1'), r"sources.chain.weight = -1: .*greater than or equal to 0"),
        (None, "c.json can't be read .*No such file.*: give another file"),
    ],
    ids=["task", "model", "no calibrations", "version", "format", "cut", "empty", "nan", "negative", "missing"],
)
def test_an_invalid_file_is_refused(scripted: Any, tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "c.json").write_text(text)
    decoder = scripted({"solve q": ["yes", "yes"]})
    config = SearchConfig.of(None, {"calibration": str(tmp_path / "c.json")})
    with pytest.raises(OptionError, match=message) as caught:
        solve(Riddle, "q", config, decoder=decoder, search=SelfConsistency(samples=2))
    assert str(tmp_path / "c.json") in str(caught.value)
    assert decoder.batches == []


# -- fitting ------------------------------------------------------------------------------------------------------


def simulated(questions: int, seed: int) -> list[list[Sample]]:
    """Return the samples of questions of different difficulty: programs are more often right than chains."""
    random, drawn = np.random.default_rng(seed), []
    for _ in range(questions):
        easy, some = random.beta(1, 1), []
        for source, chance in [("chain", easy), ("program", easy**0.5)] * 3:
            key = "right" if random.random() < chance else f"wrong {random.integers(4)}"
            some.append(Sample(key, key, float(key == "right"), source, 20 if source == "chain" else 40, None, None))
        drawn.append(some)
    return drawn


def test_a_fit_is_calibrated_on_fresh_questions() -> None:
    fitted = fit(simulated(400, seed=0), "riddle", "qwen2")
    assert (fitted.task, fitted.model, fitted.questions) == ("riddle", "qwen2", 400)
    assert {name: source.tokens for name, source in fitted.sources.items()} == {"chain": 20, "program": 40}
    found = [calibrated(some[:size], fitted) for some in simulated(400, seed=1) for size in (2, 4, 6)]
    measured = reliability([sure for sure, _ in found], [float(score == 1) for _, score in found])
    assert measured is not None
    assert measured.error < 0.05
    assert measured.score_at_coverage[50] - measured.score_at_coverage[100] > 0.1
    assert list(fitted.gains) == sorted(fitted.gains, reverse=True)
    assert len(fitted.gains) == 6


def test_cross_validation_measures_the_error() -> None:
    assert cross_validated(simulated(150, seed=2)).error < 0.1


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


def test_calibrations_are_fitted_on_evaluations_and_used(
    tot: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "parts.py").write_text(PARTS)
    rows = [{"question": f"number {i}", "answer": str(i)} for i in range(60)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task, folder, own = f"{tmp_path}/parts.py:Riddle", tmp_path / "out", str(tmp_path / "c.json")
    here = ("--decoder", f"{tmp_path}/parts.py:Voter", "--model", "none", "--search", "self-consistency:samples=4")
    assert tot("eval", task, *here, "--data", str(tmp_path / "rows.jsonl"), "--out", str(folder))[0] == 0
    assert benchmark(["calibrate", "--folder", str(folder), "--out", own, "--task", task]) == 0
    row = next(line for line in capfd.readouterr().out.splitlines() if "riddle" in line)
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells[:3] == ["riddle", "any", "60"]
    assert float(cells[5].rstrip("%")) - float(cells[6].rstrip("%")) > 30
    assert [one["model"] for one in json.loads(Path(own).read_text())["calibrations"]] == [None]
    status, out, err = tot("solve", task, "number 3", *here, "--calibration", own, "--json")
    assert (status, err) == (0, "")
    assert json.loads(out)["certainty"] > 0.8
    ((joined, _),) = calibrate([folder, folder], task, general=True)
    assert (joined.task, joined.model, joined.questions) == (None, None, 60)
    (tmp_path / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:19]))
    assert tot("eval", task, *here, "--data", str(tmp_path / "few.jsonl"), "--out", str(tmp_path / "few"))[0] == 0
    with pytest.raises(OptionError, match="riddle, no local model: 19 questions, but a calibration needs 20: evaluate"):
        calibrate([tmp_path / "few"], task)
