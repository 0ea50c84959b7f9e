"""`tot eval`: options, configuration files, exit codes and comparisons, on tasks without a model."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from tot.config import SearchConfig

PROBLEM = """(define (problem p) (:domain blocksworld-4ops) (:objects a b)
(:init (handempty) (ontable a) (on b a) (clear b)) (:goal (and (on a b))))"""
SYMBOLIC = ("--model", "none", "--search", "best-first", "--generator", "enumerate:prior=uniform")


@pytest.fixture
def rows(tmp_path: Path) -> tuple[str, ...]:
    """The arguments of three problems."""
    done = PROBLEM.replace("(on a b))))", "(on b a))))")
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"pddl": pddl}) + "\n" for pddl in (PROBLEM, done, PROBLEM)))
    return "eval", "blocksworld", "--data", "x.jsonl"


def test_an_evaluation_prints_its_numbers_and_writes_a_folder(tot: Any, rows: Any, tmp_path: Path) -> None:
    status, out, err = tot(*rows, *SYMBOLIC, "--out", "out")
    assert (status, err) == (0, "")
    cells = [re.split("  +", line.strip()) for line in out.splitlines()]
    assert cells[0] == ["Score", "100.0%", "95%: 43.9% to 100.0%"]
    assert cells[1] == ["Model", "never asked", "rules and actions of the task gave all answers"]
    assert re.fullmatch(r"[\d.]+ s per question, loading included", cells[2][2])
    assert (cells[2][0], cells[3][0], cells[3][2]) == ("Wall time", "Latency", "mean of a search, while others run")
    assert cells[4] == ["Questions", "3"]
    assert ["Verified", "3", "samples, verified by the task"] in cells
    assert cells[-1] == ["Folder", "out"]
    answers = [json.loads(line)["answer"] for line in (tmp_path / "out" / "samples.jsonl").read_text().splitlines()]
    assert answers[1] == []
    assert answers[0] == answers[2] == ["(unstack b a)", "(put-down b)", "(pick-up a)", "(stack a b)"]


def test_without_out_each_run_gets_a_new_folder(tot: Any, rows: Any, tmp_path: Path) -> None:
    for _ in range(2):
        tot(*rows, *SYMBOLIC, "--limit", "1")
    names = [folder.parent.name for folder in sorted(tmp_path.glob("runs/*/results.json"))]
    assert len(names) == 2
    assert all(re.fullmatch(r"blocksworld-\d{8}-\d{6}(-1)?", name) for name in names)


def test_the_configuration_of_a_folder_repeats_the_run(tot: Any, rows: Any, tmp_path: Path) -> None:
    flags = shlex.split("--limit 2 --offset 1 --seed 3 --budget-nodes 9 --max-tokens 9 --concurrency 2")
    tot(*rows, *SYMBOLIC, *flags, "--out", "a")
    assert tot("eval", "--config", "a/config.yaml", "--out", "b")[0] == 0
    configs = [yaml.safe_load((tmp_path / name / "config.yaml").read_text()) for name in "ab"]
    assert configs[0] == configs[1]
    assert (configs[0]["max_tokens"], configs[0]["budget_nodes"], configs[0]["offset"]) == (9, 9, 1)
    lines = [
        [line.partition(', "measured"')[0] for line in (tmp_path / name / "samples.jsonl").read_text().splitlines()]
        for name in "ab"
    ]
    assert lines[0] == lines[1]


def test_options_override_a_configuration_file(tot: Any, rows: Any, tmp_path: Path) -> None:
    options = {"generator": "enumerate:prior=uniform", "limit": 1, "budget-nodes": 7, "kv-budget": 4000}
    Path("run.yaml").write_text(yaml.safe_dump({"model": "none", "search": "best-first", **options}))
    assert tot(*rows, "--config", "run.yaml", "--limit", "2", "--out", "out")[0] == 0
    config = yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())
    assert (config["limit"], config["budget_nodes"], config["search"]) == (2, 7, "best-first")
    assert config["kv_budget"] == "4000"


def test_api_keys_are_never_written() -> None:
    options = ["api_key=sk-123", "HF-TOKEN=sk-123", "base_url=https://me:sk-123@host/v1", "key=sk-123", "monkey=7"]
    config = SearchConfig.of(None, {"decoder_option": options}).to_json()
    assert config["decoder_option"] == ["base_url=https://host/v1", "monkey=7"]
    assert "sk-123" not in str(config)


def test_a_bad_row_or_a_failed_search_is_exit_status_1(tot: Any, rows: Any) -> None:
    with Path("x.jsonl").open("a") as file:
        file.write('{"pddl": \n')
    status, out, err = tot(*rows, *SYMBOLIC, "--out", "out")
    assert status == 1
    assert re.search(r"x\.jsonl, line 4 is not JSON", err)
    assert re.search(r"^Failed +0 +searches, and 1 invalid rows *$", out, re.MULTILINE)
    status, out, err = tot(*rows, "--model", "none", "--limit", "1", "--search", "bfs", "--generator", "sample",
                           "--out", "none")  # fmt: skip
    assert status == 1
    assert re.search(r"^Failed +1 +searches *$", out, re.MULTILINE)
    assert re.search(r"^Score +none +every search failed *$", out, re.MULTILINE)
    assert "%" not in out
    assert "finished: score none: every search failed\n" in Path("none/log.txt").read_text()
    assert "sample 0-0 failed: RequestError: the search needs a model, but none was given" in err


def test_evaluations_are_compared(tot: Any, rows: Any) -> None:
    tot(*rows, *SYMBOLIC, "--out", "a")
    tot(*rows, *SYMBOLIC, "--budget-nodes", "1", "--out", "b")
    status, out, err = tot("eval", "--compare", "a", "b")
    assert (status, err) == (0, "")
    assert "common questions: 2" in out  # two rows are the same question
    assert "100.0% (34.2% to 100.0%)" in out
    assert "-50.0% (-100.0% to +56.3%)" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("eval", r"no task is given: give its name, .*"),
        ("eval game24", r"the task has no data set of its own: give --data FILE, or org/name:split on the hub"),
        ("eval gsm9k --data x.jsonl", r"unknown task 'gsm9k' .*"),
        ("eval gsm8k two --data x.jsonl", r"more than one task is given \('two'\): .*"),
        ("eval gsm8k --data x.jsonl", r".*no valid question: line 1 has no 'question' \(it has pddl\)"),
        ("eval gsm8k --data x.doc", r".*unknown kind of data set '\.doc'.*org/name:split"),
        ("eval gsm8k --data x.jsonl --resume", r"--resume needs the folder of the run to continue: name it with --out"),
        ("eval gsm8k --data x.jsonl --limit 0", r".*'--limit': .*greater than or equal to 1"),
        ("eval gsm8k --config bad.yaml", r"unknown option 'lmit' \(did you mean limit\?\): choose one of .*"),
        ("eval gsm8k --config type.yaml", r"limit = 'many': Input should be a valid integer.*"),
        ("eval gsm8k --config torn.yaml", r"torn\.yaml can't be read as YAML: .*"),
        ("eval gsm8k --config newer.yaml", r"newer\.yaml is 'tot\.evaluation', version 2: this program .*"),
        ("eval gsm8k --plot a.png", r"option '--plot' was removed: .*"),
        ("eval --compare", r"no evaluation to compare: name two folders or more, .*"),
        ("eval --compare a", r"a is not the folder of an evaluation: it has no config\.yaml"),
        ("eval --compare a b", r"a is not the folder of an evaluation: it has no config\.yaml"),
        ("eval --compare a b --limit 3", r"--compare reads finished folders: leave --limit out"),
        ("eval --compare a b --seed 0", r"--compare reads finished folders: leave --seed out"),
        ("eval --task gsm8k --data x.jsonl", r"--task gsm8k is for --compare: give the task as an argument, .*"),
    ],
)
def test_invalid_arguments_are_a_one_line_error_with_a_remedy(
    tot: Any, rows: Any, tmp_path: Path, arguments: str, message: str
) -> None:
    for name, text in (("bad", "lmit: 5"), ("type", "{limit: many, data: x.jsonl}"), ("list", "- 5"), ("torn", "a: [1"),
                       ("newer", "{format: tot.evaluation, version: 2, data: x.jsonl}")):  # fmt: skip
        (tmp_path / f"{name}.yaml").write_text(text)
    status, out, err = tot(*shlex.split(arguments))
    assert (status, out) == (2, "")
    assert re.fullmatch(f"tot: {message}\n", err)


def test_eval_accepts_every_search_option_of_solve(tot: Any) -> None:
    flags = [
        set(re.findall(r"^ +(--[a-z-]+)", tot(command, "--help")[1], re.MULTILINE)) for command in ("solve", "eval")
    ]
    of_optimize = {"--score", "--start", "--best"}
    assert flags[0] - flags[1] == {"--row", "--json", "--live", "--overwrite"} | of_optimize
