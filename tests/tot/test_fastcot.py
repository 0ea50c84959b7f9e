"""Answers after parts of rationales: equal to the decoder's caps, calibrated, and never lost."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from benchmarks.__main__ import main as benchmark
from benchmarks.caps import Answers, by_iteration, decode_whole, find_cap
from benchmarks.rationales import Question, rationales
from tot import BFS, ChainOfThought, EngineOptions, Explain, Model, Sample, Task, evaluate, solve
from tot.decoders import Engine, OptionError, Usage, load_decoder
from tot.decoders.request import ChoiceLogprob
from tot.registry import load_task
from tot.tasks import GSM8K, MultipleChoice

TASK = """
from tot import Task

class Riddle(Task):
    templates = {"chain": "Riddle: {{ question }}\\nThink:"}
    sampling = {"chain": {"max_tokens": 30}}
    triggers = {"chain": " So:"}

    def choices(self, state):
        return ("one", "ten") if "two" in state.question else ()

    def parse_answer(self, text):
        return text.partition("So:")[2][:1] or None
"""
ROWS = [{"question": f"What comes after {word}?", "answer": "one"} for word in ("two", "ten", "two or so", "noon")]


class Guess(Task):
    templates: ClassVar = {"chain": "chain {{ question }}"}
    triggers: ClassVar = {"chain": " So:"}
    sampling: ClassVar = {"chain": {"stop": ("\n\n",)}}

    def parse_answer(self, text: str) -> str | None:
        return text.partition("So: ")[2] or None


class Anything(Guess):
    """Any text after the trigger is an answer."""

    def parse_answer(self, text: str) -> str | None:
        return text.partition(" So:")[2] or "nothing"


@pytest.fixture
def engine(tiny: Any) -> Iterator[Engine]:
    with tiny() as decoder:
        yield decoder.engine


@pytest.fixture
def riddle(tmp_path: Path) -> Task:
    (tmp_path / "riddle.py").write_text(TASK)
    return load_task(f"{tmp_path / 'riddle.py'}:Riddle")


# -- answers after parts of rationales -----------------------------------------------------------------------------


@pytest.mark.parametrize("glimpse", [True, False])
def test_answers_by_iteration_match_the_caps(engine: Engine, riddle: Task, glimpse: bool) -> None:
    records = rationales(riddle, ROWS, 30)
    caps = [0, 1, 3, 8, 40]
    decoded = decode_whole(engine, records, 6)
    for cap, answers in zip(caps, by_iteration(engine, records, decoded, caps, glimpse), strict=True):
        with load_decoder("fastcot", engine=engine, window=6, cap=cap, glimpse=glimpse) as decoder:
            completions = decoder.generate([one.request for one in records])
        assert answers.given == [one.read(one.answer(each)) for one, each in zip(records, completions, strict=True)]
    assert answers.given == answers.whole
    assert answers.agreement == 1.0


@pytest.mark.parametrize("task", [GSM8K(), MultipleChoice()])
def test_chat_prompts_have_an_answer_trigger(task: Task) -> None:
    rows = [{"question": "Which is it?\nA) 15\nB) 16", "answer": "A" if isinstance(task, MultipleChoice) else "15"}]
    few_shot, chat = (rationales(task, rows, 20, chat)[0].request for chat in (False, True))
    assert chat.answer_trigger == few_shot.answer_trigger is not None
    assert len(chat.prompt[0].content) < 200 < len(few_shot.prompt[0].content)


def test_a_task_without_a_trigger_is_rejected() -> None:
    with pytest.raises(OptionError, match="no answer trigger for its template 'chain'"):
        rationales(Task(), ROWS, 30)


def test_a_rationale_ends_at_a_trigger_that_the_model_writes() -> None:
    (record,) = rationales(Guess(), ROWS[:1], 20)
    assert record.request.sampling.stop == ("\n\n", " So:")
    assert (record.request.sampling.temperature, record.request.sampling.max_tokens) == (0.0, 20)


# -- calibration ---------------------------------------------------------------------------------------------------


def made_up(right: float, unchanged: float) -> Answers:
    """Make ten questions answered "a" if whole and correct.

    After a part of the rationale, a share `right` is still correct, and a share `unchanged` has the same answer.
    """
    request: Any = None  # not decoded
    records = [
        Question(request, str, str, lambda answer, right=right: float(answer == right))  # type: ignore[misc]
        for right in "aaaaabbbbb"
    ]
    whole = ["a"] * 5 + ["x"] * 5
    given = ["a"] * round(10 * right) + ["y"] * (5 - round(10 * right))
    given += ["x"] * round(10 * unchanged - 10 * right) + ["z"] * (5 - round(10 * unchanged - 10 * right))
    return Answers.of(records, given, whole)


def test_the_cap_is_the_smallest_with_enough_agreement() -> None:
    curve = [made_up(0.5, 1.0), made_up(0.3, 0.8), made_up(0.5, 0.9), made_up(0.5, 1.0), made_up(0.4, 0.9)]
    caps = [0, 10, 20, 30, 40]
    assert [answers.accuracy for answers in curve] == [0.5, 0.3, 0.5, 0.5, 0.4]
    assert [answers.agreement for answers in curve] == [1.0, 0.8, 0.9, 1.0, 0.9]
    assert find_cap(caps, curve, loss=0.1, agreement=0.9) == 20
    assert find_cap(caps, curve, loss=0.2, agreement=0.8) == 0
    assert find_cap(caps, curve, loss=0.05, agreement=0.9) is None
    assert find_cap(caps[:4], curve[:4], loss=0.0, agreement=0.95) == 30


def test_the_papers_rule_limits_only_the_loss() -> None:
    curve = [made_up(0.2, 0.7), made_up(0.5, 0.5), made_up(0.3, 0.8), made_up(0.5, 1.0)]
    caps = [0, 10, 20, 30]
    assert find_cap(caps, curve, loss=0.1) == 10  # of few unchanged answers, and the next cap loses more
    assert find_cap(caps, curve, loss=0.2) == 10
    assert find_cap(caps, curve, loss=0.3) == 0
    assert find_cap(caps, curve, loss=0.1, agreement=0.5) == 30
    assert find_cap(caps[::2], curve[::2], loss=0.1) is None


# -- in the tree ---------------------------------------------------------------------------------------------------


def test_an_unparsed_answer_is_asked_again_after_the_whole_rationale(scripted: Any) -> None:
    cut = scripted.completion("Hm. So: ", new_tokens=3)
    object.__setattr__(cut, "usage", Usage(new_tokens=3, approximate_tokens=2, undecoded_tokens=9))
    replies = [cut, scripted.completion("Hm, well, yes. So: yes", new_tokens=7)]

    class Twice(type(scripted({}))):  # type: ignore[misc]
        def _reply(self, request: Any, sample: int) -> Any:
            return replies[len(self.batches) - 1]

    decoder = Twice({})
    solution = solve(Guess(), "what?", decoder=decoder, search=ChainOfThought())
    assert [request.whole_rationale for request in decoder.requests] == [False, True]
    assert all(request.answer_trigger == " So:" for request in decoder.requests)
    assert solution.answer == "yes"
    assert solution.parse_failures == 1
    assert solution.usage.new_tokens == 10
    assert solution.tree[1].usage.undecoded_tokens == 9


def test_explanations_are_rationales_with_expected_values(letters: Any, scripted: Any) -> None:
    task = type(
        "Judged",
        (letters,),
        {
            "templates": letters.templates | {"explain": "explain {{ thought }}"},
            "triggers": {"explain": " The number:"},
            "scale": (1, 2),
        },
    )
    scores = (ChoiceLogprob(-1.3862943611198906, 1), ChoiceLogprob(-0.2876820724517809, 1))  # 0.25 and 0.75
    decoder = scripted({"grow": "a", "explain a": scripted.completion("Since it is.", choice_logprobs=scores)})
    search = BFS(thoughts=1, breadth=1, depth=2)
    solution = solve(task, "Q", decoder=decoder, search=search, generator=Sample(), evaluator=Explain())
    (request,) = [one for one in decoder.requests if one.purpose == "evaluate"]
    assert request.answer_trigger == " The number:"
    assert request.choices == (" 1", " 2")
    assert request.close_choices
    assert solution.tree[1].value == pytest.approx(1.75)


def test_without_a_trigger_an_explanation_is_followed_by_the_choice(letters: Any, scripted: Any) -> None:
    prompt = "value a\n\nExplain your judgement first, in a sentence or two."
    scores = (ChoiceLogprob(-1.3862943611198906, 1), ChoiceLogprob(-0.2876820724517809, 1))  # 0.25 and 0.75
    decoder = scripted({"grow": "a", prompt: scripted.completion("It is.", choice_logprobs=scores)})
    evaluator = Explain(labels={"good": 1, "bad": 0})
    solution = solve(letters, "Q", decoder=decoder, search=BFS(thoughts=1, depth=2), evaluator=evaluator)
    (request,) = [one for one in decoder.requests if one.purpose == "evaluate"]
    assert request.answer_trigger == "\nThe answer, one of good, bad, is:"
    assert request.choices == (" good", " bad")
    assert solution.tree[1].value == pytest.approx(0.25)


def test_reproducible_answers_are_equal_alone_and_in_a_batch(tiny: Any, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    spent = {}
    for window, concurrency in itertools.product((2, 20), (1, 4)):
        with tiny() as decoder:
            pass  # closing the decoder restores the model's own attention
        out = tmp_path / f"{window}-{concurrency}"
        evaluate(
            Anything,
            tmp_path / "rows.jsonl",
            out=out,
            model=Model(
                decoder.model,
                "fastcot",
                {"cap": 6, "window": window},
                tokenizer=decoder.tokenizer,
                engine=EngineOptions(kv_budget="4000"),
            ),
            search=ChainOfThought(),
            max_tokens=40,
            concurrency=concurrency,
            reproducible=True,
        )
        lines = (out / "samples.jsonl").read_text().splitlines()
        spent[window, concurrency] = [line.partition(', "measured"')[0] for line in lines]
    assert spent[2, 1] == spent[2, 4]
    assert spent[20, 1] == spent[20, 4]
    assert spent[2, 1] != spent[20, 1]


@pytest.mark.real
@pytest.mark.parametrize("name", ["gsm8k", "multiple_choice"])
def test_built_in_tasks_have_explanations_and_triggers(name: str, smollm2: str) -> None:
    solution = solve(
        name,
        load_task(name).example(),
        model={"generate": smollm2, "evaluate": Model(smollm2, "fastcot", {"cap": 3, "window": 4})},
        prompts="papers",
        search=BFS(thoughts=2, breadth=1, depth=2),
        evaluator="explain",
        max_tokens=12,
    )
    evaluated = [node for node in solution.tree if node.parent is not None]
    assert all(1 <= node.value <= 10 for node in evaluated)
    assert any(node.usage.undecoded_tokens > 0 for node in evaluated)
    assert solution.usage.approximate_tokens > 0
    assert solution.usage.undecoded_tokens > 0


# -- the command line ----------------------------------------------------------------------------------------------


@pytest.fixture
def _here(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tiny() as decoder:
        pass  # closing the decoder restores the model's own attention
    decoder.model.save_pretrained(tmp_path / "base")
    decoder.tokenizer.save_pretrained(tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    Path("riddle.py").write_text(TASK)
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS * 2))


@pytest.mark.benches
@pytest.mark.usefixtures("_here")
def test_the_benchmark_prints_its_tables(capfd: pytest.CaptureFixture[str]) -> None:
    options = ("--data", "rows.jsonl", "--task", "riddle.py:Riddle", "--model", "base", "--max-tokens", "16")
    assert benchmark(["fastcot", *options, "--timed", "3", "--limit", "8", "--out", "n.json"]) == 0
    printed = capfd.readouterr().out
    for title in (
        "FastCoT, calibrated on 4 questions",
        "FastCoT, the paper's rule, cap ",
        "forward passes",
        "answers of CoT",
        "without by-products",
        "window 25",
    ):
        assert title in printed
    numbers = json.loads(Path("n.json").read_text())
    alone, packed = (numbers[f"rationales, {together} at a time"] for together in (1, 8))
    assert [cell["side"] for cell in packed] == ["CoT", "FastCoT", "FastCoT, the paper's rule"]
    assert all(0 < cell["parts"]["verify"] < cell["seconds"] for cell in (*alone, *packed))
    assert [len([cell for cell in alone if cell["side"] == side]) for side in ("CoT", "no rationale")] == [3, 3]
    answers = {side: [cell["answers"] for cell in alone if cell["side"] == side] for side in ("CoT", "FastCoT, no cap")}
    assert answers["FastCoT, no cap"] == answers["CoT"]


@pytest.mark.benches
@pytest.mark.usefixtures("_here")
def test_an_interrupted_benchmark_resumes_with_equal_results(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    command = ["fastcot", "--data", "rows.jsonl", "--task", "riddle.py:Riddle", "--model", "base"]
    command += ["--max-tokens", "16", "--limit", "8", "--parts", "answers", "--dtype", "fp32"]
    decoded: list[tuple[str, int]] = []
    limit = [6]

    def watched(engine: Engine, batch: list[Question], window: int) -> Any:
        if len(decoded) == limit[0]:
            raise KeyboardInterrupt
        decoded.append((str(batch[0].request.prompt), window))
        return decode_whole(engine, batch, window)

    def default(window: int) -> None:
        monkeypatch.setattr("benchmarks.fastcot.FastCoTOptions", lambda: SimpleNamespace(window=window))

    monkeypatch.setattr("benchmarks.fastcot._BATCH", 3)
    monkeypatch.setattr("benchmarks.fastcot.decode_whole", watched)
    default(5)
    assert benchmark([*command, "--out", "stopped.json"]) == 130
    limit[0] = 10**9
    default(3)  # the run of the file is resumed
    assert benchmark([*command, "--out", "stopped.json"]) == 0
    again = capfd.readouterr().out
    stopped, decoded[:] = list(decoded), []
    default(5)
    assert benchmark([*command, "--out", "whole.json"]) == 0
    assert len(stopped) == len(decoded)
    assert sorted(stopped) == sorted(decoded)  # nothing was decoded twice
    for table in ("agreement after iterations", "by window"):
        assert table in again
    saved = [json.loads(Path(f"{name}.json").read_text()) for name in ("stopped", "whole")]
    for numbers in saved:
        assert [len(cell["answers"][0]["given"]) for cell in numbers["calibration"]] == [3, 1]
    for title in ("calibration", "answers by window"):
        one, other = ([cell["answers"] for cell in numbers[title]] for numbers in saved)
        assert one == other


@pytest.mark.usefixtures("_here")
def test_invalid_calibration_input_is_rejected(capfd: pytest.CaptureFixture[str]) -> None:
    Path("one.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    options = ("--task", "riddle.py:Riddle", "--model", "base")
    assert benchmark(["fastcot", "--data", "one.jsonl", *options]) == 2
    assert "has 1 rows" in capfd.readouterr().err
    assert benchmark(["fastcot", "--data", "none.jsonl", *options]) == 2
    assert "there is no such file" in capfd.readouterr().err
