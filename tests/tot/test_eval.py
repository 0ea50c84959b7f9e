"""evaluate(): the output folder, results that depend on seeds alone, and failing rows and searches."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tot import BFS, Budget, State, Task, ThoughtTree, TotError, Value, evaluate
from tot.decoders import ModelError, OptionError, TaskError
from tot.registry import options_to_json

ROWS = [{"question": f"what is {i}?", "answer": "b/c" if i % 2 else "no"} for i in range(6)]  # language: ok
"""The script answers "b/c" to every question."""
TABLE: dict[str, Any] = {"grow": ["a", "b"], "value a": "3", "value b": "7", "grow b": ["c", "d"]}
TABLE |= {"value b/c": "9", "value b/d": "2", "answer b/c": "b/c"}
SEARCH: dict[str, Any] = {"search": BFS(thoughts=2, breadth=1, depth=3), "evaluator": Value()}


@pytest.fixture
def data_file(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


@pytest.fixture
def run(letters: Any, data_file: Path, tmp_path: Path) -> Callable[..., Any]:
    """Run evaluate() on the six rows into tmp_path/out: run(decoder, limit=3)."""

    def evaluated(decoder: Any, **options: Any) -> Any:
        task = options.pop("task", letters)
        return evaluate(task, data_file, **{"out": tmp_path / "out", "decoder": decoder} | SEARCH | options)

    return evaluated


def samples(folder: Path, measured: bool = False) -> list[dict[str, Any]]:
    """Return the lines of samples.jsonl without machine-dependent fields."""
    lines = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    return lines if measured else [{name: sample[name] for name in sample if name != "measured"} for sample in lines]


# -- the folder -------------------------------------------------------------------------------------------------


def test_a_folder_has_configuration_samples_trees_and_results(run: Any, scripted: Any, tmp_path: Path) -> None:
    results = run(scripted(TABLE))
    out = tmp_path / "out"
    assert results.folder == out
    assert {path.name for path in out.iterdir() if path.name[0] != "."} == {
        "config.yaml", "samples.jsonl", "trees", "results.json", "log.txt"
    }  # fmt: skip
    first = samples(out)[0]
    usage = {purpose: {"calls": calls, "prompt_tokens": 0, "new_tokens": 5 * calls} for purpose, calls in
             (("generate", 4), ("evaluate", 4), ("answer", 1))}  # fmt: skip
    assert first == {
        "id": "0-0", "index": 0, "repeat": 0, "question": "what is 0?",  # language: ok
        "reference": "no", "answer": "b/c", "certainty": None,
        "score": 0.0, "solved": False, "parse_failure": False, "unreadable": 0, "thoughts": 4, "stopped": None,
        "error": None, "usage": usage,
    }  # fmt: skip
    assert [sample["score"] for sample in samples(out)] == [0, 1, 0, 1, 0, 1]
    tree = ThoughtTree.load(out / "trees" / "5-0.json")
    assert (tree.state(tree.root).question, len(tree)) == ("what is 5?", 5)  # language: ok
    config = json.loads((out / "results.json").read_text())
    assert (config["format"], config["version"], config["score"]["mean"]) == ("tot.results", 1, results.score.mean) == (
        "tot.results", 1, 0.5
    )  # fmt: skip
    assert "finished: score 50.0%" in (out / "log.txt").read_text()


def test_the_configuration_reproduces_the_run(run: Any, scripted: Any, data_file: Path, tmp_path: Path) -> None:
    run(scripted(TABLE), limit=2, seed=4, repeats=2, max_tokens=9, budget=Budget(nodes=7))
    config = yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())
    expected = {"limit": 2, "seed": 4, "repeats": 2, "max_tokens": 9, "budget_nodes": 7}
    assert {name: config[name] for name in expected} == expected
    assert config["data"] == str(data_file)
    assert config["search"] == "bfs:depth=3,thoughts=2,breadth=1"
    record = config["record"]
    assert (record["search"]["select"], record["search"]["aggregate"]) == ("greedy", "best")
    assert (record["generator"]["name"], record["generator"]["temperature"]) == ("sample", 0.7)
    assert (record["evaluator"]["name"], record["verdict"]) == ("value", "verified")
    assert set(config["record"]["versions"]) == {"python", "tot", "torch", "transformers", "datasets"}
    assert len(config["record"]["data_sha256"]) == 64


def test_the_data_set_of_the_task_is_the_default(letters: Any, scripted: Any, data_file: Path, tmp_path: Path) -> None:
    own = type("Own", (letters,), {"data_set": str(data_file)})
    assert evaluate(own, limit=1, out=tmp_path / "out", decoder=scripted(TABLE), **SEARCH).samples == 1
    with pytest.raises(OptionError, match="the task has no data set of its own: give --data FILE"):
        evaluate(letters, out=tmp_path / "none", decoder=scripted(TABLE))


def test_limit_offset_and_repeats_select_the_samples_and_not_their_seeds(
    run: Any, scripted: Any, tmp_path: Path
) -> None:
    seeds = []
    for out, options in (("all", {"limit": 5}), ("some", {"limit": 2, "offset": 3})):
        decoder = scripted(TABLE)
        run(decoder, out=tmp_path / out, concurrency=1, repeats=2, **options)
        grown = [one.sampling.seed for one in decoder.requests if one.prompt[-1].content == "grow"]
        assert len(set(grown)) == len(grown) == 2 * options["limit"]
        seeds.append(grown)
    assert [sample["id"] for sample in samples(tmp_path / "some")] == ["3-0", "3-1", "4-0", "4-1"]
    assert seeds[1] == seeds[0][6:]


def test_a_budget_applies_to_each_search_and_its_end_is_no_parse_failure(
    run: Any, letters: Any, scripted: Any, tmp_path: Path
) -> None:
    mute = type("Mute", (letters,), {"parse_answer": lambda self, text: None})
    short = run(scripted(TABLE), task=mute, limit=2, budget=Budget(tokens=25))
    whole = run(scripted(TABLE), task=mute, limit=2, out=tmp_path / "whole")
    assert [sample["stopped"] for sample in samples(tmp_path / "out")] == ["budget: tokens (30 of 25)"] * 2
    assert [sample["answer"] for sample in samples(tmp_path / "out")] == [None] * 2
    assert (short.tokens, short.parse_failures.mean, whole.parse_failures.mean) == (60, 0.0, 1.0)


def test_an_exhausted_search_is_not_a_parse_failure(scripted: Any, tmp_path: Path) -> None:
    path = tmp_path / "ones.jsonl"
    path.write_text(json.dumps({"question": "1 1 1 1", "answer": "1 1 1 1"}) + "\n")

    for name, search, reply in (("steps", "bfs:breadth=1", "1 + 1 = 2 (left: 1 1 2)"), ("whole", "cot", "No idea.")):
        decoder = type("Same", (scripted,), {"_reply": lambda self, request, sample, said=reply: self.completion(said)})
        evaluate("game24", path, out=tmp_path / name, decoder=decoder({}), search=search, generator="propose",
                 evaluator="random")  # fmt: skip
    (steps,), (whole,) = samples(tmp_path / "steps"), samples(tmp_path / "whole")
    assert (steps["answer"], steps["stopped"], steps["parse_failure"]) == (None, "no goal among 2 thoughts", False)
    assert (whole["answer"], whole["parse_failure"]) == (None, True)


def test_the_folder_has_the_parts_and_limits_that_the_task_chose(
    run: Any, letters: Any, scripted: Any, tmp_path: Path
) -> None:
    limited = type("Limited", (letters,), {"sampling": {"thought": {"max_tokens": 90, "stop": ("x",)}, "value": {}}})
    run(scripted(TABLE), task=limited, max_tokens=9, search=None, limit=1)
    config = yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())
    assert "search" not in config
    assert config["record"]["search"] == options_to_json(BFS()) | {"name": "bfs"}
    assert config["record"]["sampling"] == {"thought": {"max_tokens": 9}, "value": {"max_tokens": 9}}


def test_a_judge_rates_each_answer_beside_the_score(run: Any, letters: Any, scripted: Any, tmp_path: Path) -> None:
    plain = run(scripted(TABLE), limit=2)
    assert (plain.judged, "judged" in samples(tmp_path / "out")[0]) == (None, False)
    judged = run(scripted(TABLE), limit=2, judge="value", out=tmp_path / "judged")
    assert judged.score == plain.score
    assert [sample["judged"] for sample in samples(tmp_path / "judged")] == [9.0, 9.0]
    assert ("Judge", "9.00 (all equal)", "mean rating of the answers") in judged.figures
    one = run(scripted(TABLE), limit=1, judge="value", out=tmp_path / "one")
    assert one.to_json()["judged"] == {"mean": 9.0, "low": None, "high": None}
    with pytest.raises(OptionError, match="judge vote does not rate an answer alone: choose value or likelihood"):
        run(scripted(TABLE), judge="vote", out=tmp_path / "vote")
    without = type("Without", (Task,), {"templates": {"thought": "{{ question }}", "answer": "a"}})
    with pytest.raises(TaskError, match="value"):
        run(scripted(TABLE), task=without, judge="value", out=tmp_path / "without")


def test_concurrent_searches_share_forward_passes_and_give_the_same_samples(
    run: Any, tiny: Any, tmp_path: Path
) -> None:
    lines, forwards = [], []
    for concurrency in (1, 16):
        out = tmp_path / str(concurrency)
        with tiny() as decoder:
            run(decoder, out=out, concurrency=concurrency, repeats=2, max_tokens=6, reproducible=True)
            forwards.append(decoder.engine.forwards)
        lines.append([line.partition(', "measured"')[0] for line in (out / "samples.jsonl").read_text().splitlines()])
    assert len(lines[0]) == 12
    assert len({json.loads(line + "}")["answer"] for line in lines[0]}) > 4
    assert lines[0] == lines[1]
    assert forwards[0] > 3 * forwards[1]


# -- errors -----------------------------------------------------------------------------------------------------


def test_a_bad_row_is_reported_with_its_line_and_the_others_continue(
    run: Any, scripted: Any, data_file: Path, tmp_path: Path, capfd: Any
) -> None:
    bad = ['{"question": "torn', "[1]", "", '{"answer": "x"}', '{"question": "q"}', '{"question": " ", "answer": 1}']
    bad.append('{"question": null, "answer": 1}')
    data_file.write_text("\n".join([json.dumps(ROWS[0]), *bad, json.dumps(ROWS[1])]) + "\n")
    results = run(scripted(TABLE))
    assert [sample["id"] for sample in samples(tmp_path / "out")] == ["0-0", "7-0"]
    assert (results.samples, results.bad_rows, results.score.mean) == (2, 6, 0.5)
    reasons = [
        r"line 2 is not JSON (Invalid control character at: line 1 column 19 (char 18))",
        "line 3 is not a JSON object",
        "line 5 has no 'question' (it has answer)",
        "line 6 has no 'answer' (it has question)",
        "line 7 is not a valid question: the question is empty: give some text",
        "line 8 has no 'question' (it has answer)",
    ]
    message, log = capfd.readouterr().err, (tmp_path / "out" / "log.txt").read_text()
    for reason in reasons:
        assert f"{data_file}, {reason}\n" in message
        assert f"{data_file}, {reason}\n" in log


def test_a_search_that_raises_is_recorded_and_the_others_continue(
    run: Any, letters: Any, scripted: Any, tmp_path: Path, capfd: Any
) -> None:
    class Fragile(letters):  # type: ignore[misc]
        def score(self, answer: Any, reference: Any) -> float:
            return 1 / (reference != "no")

    results = run(scripted(TABLE), task=Fragile, limit=3)
    errors = [sample["error"] for sample in samples(tmp_path / "out")]
    error = "TaskError: Fragile.score raised ZeroDivisionError: division by zero: fix the task"
    assert errors == [error, None, error]
    assert (results.errors, results.score.mean) == (2, pytest.approx(1 / 3))
    assert len(ThoughtTree.load(tmp_path / "out" / "trees" / "0-0.json")) == 5
    assert f"sample 0-0 failed: {error}\n" in capfd.readouterr().err


def test_a_search_that_fails_at_its_start_is_recorded(run: Any, letters: Any, scripted: Any, tmp_path: Path) -> None:
    class Begun(letters):  # type: ignore[misc]
        asked = 0

        def start(self, question: str) -> State:
            Begun.asked += question == "what is 1?"  # language: ok
            if Begun.asked == 3:  # after the rows were counted and read
                raise RuntimeError("not again")
            return super().start(question)

    run(scripted(TABLE), task=Begun, limit=2, concurrency=1)
    second = samples(tmp_path / "out", measured=True)[1]
    assert second["error"] == "TaskError: Begun.start raised RuntimeError: not again: fix the task"
    assert (second["thoughts"], second["measured"]["forwards"]) == (0, 0)
    assert not (tmp_path / "out" / "trees" / "1-0.json").exists()


def test_a_model_that_writes_garbage_scores_0_and_every_answer_is_a_parse_failure(
    run: Any, scripted: Any, tmp_path: Path
) -> None:
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps({"question": f"{i} + 1?", "answer": f"#### {i + 1}"}) + "\n" for i in range(4)))

    class Rubbish(scripted):  # type: ignore[misc]
        def _reply(self, request: Any, sample: int) -> Any:
            return self.completion("\ufffd<|> ##\x00 {{ }} ~~")

    results = evaluate("gsm8k", path, out=tmp_path / "sums", decoder=Rubbish({}), search="bfs:thoughts=2,depth=2",
                       evaluator="value")  # fmt: skip
    assert (results.score.mean, results.parse_failures.mean, results.errors) == (0.0, 1.0, 0)
    assert results.unreadable == 8  # two rejected sub-questions for each row


def test_a_failing_model_ends_the_run_and_finished_samples_are_kept(run: Any, scripted: Any, tmp_path: Path) -> None:
    class Failing(scripted):  # type: ignore[misc]
        def generate(self, requests: Any) -> Any:
            if len(self.batches) > 7:
                raise ModelError("the model is gone: bring it back")
            return super().generate(requests)

    with pytest.raises(ModelError, match="the model is gone"):
        run(Failing(TABLE), concurrency=1)
    assert [sample["id"] for sample in samples(tmp_path / "out")] == ["0-0"]
    log = (tmp_path / "out" / "log.txt").read_text()
    assert "stopped with 1 of 6 samples: the model is gone: bring it back\n" in log


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([], {}, r"rows\.jsonl has no rows: give another file"),
        (ROWS, {"offset": 6}, r"rows\.jsonl has no rows from 6 on: give another file"),
        ([{"q": "x", "a": 1}] * 3, {}, r"no valid question: line 1 has no 'question' \(it has q, a\)"),
        (ROWS, {"limit": 0}, r"limit = 0: Input should be greater than or equal to 1"),
        (ROWS, {"budget": 5}, "budget = 5: Input should be a valid dictionary or instance of Budget"),
        (ROWS, {"shuffle_seed": 1}, "option 'shuffle_seed' was removed: shuffle the rows of the file"),
        (ROWS, {"resume": True, "out": None}, r"--resume needs the folder of the run to continue: name it with --out"),
        (ROWS, {"search": "bsf"}, r"unknown search 'bsf'"),
    ],
)
def test_invalid_rows_and_options_are_rejected_without_a_folder(
    run: Any,
    scripted: Any,
    data_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rows: Any,
    options: Any,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    data_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(TotError, match=message):
        run(scripted(TABLE), **options)
    assert not (tmp_path / "out").exists()
    assert not Path("runs").exists()


def test_a_run_rejected_at_its_first_step_can_be_started_again(run: Any, scripted: Any) -> None:
    with pytest.raises(TotError, match="unknown decoder 'beam'"):
        run("beam")
    assert run(scripted(TABLE)).samples == 6
