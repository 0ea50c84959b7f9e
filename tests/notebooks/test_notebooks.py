"""The notebooks run from start to end on the real model, show the promised results, and are saved with outputs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
NAMES = (
    "1_quick_start",
    "2_your_own_task",
    "3_decoders",
    "4_searches",
    "5_batch_evaluation",
    "6_consistency_llm",
    "7_find_a_formula",
    "8_better_with_time",
)
MACHINE = re.compile(r"/(?:home|root|tmp|work|usr|opt|var|Users|mnt)/|\b[A-Z]:\\|\.venv|site-packages")

every = pytest.mark.parametrize("name", NAMES)
executed = pytest.mark.parametrize(
    "name",
    [name if name[0] in "124" else pytest.param(name, marks=pytest.mark.slow) for name in NAMES],
)


def text_of(cells: list[dict[str, str]]) -> str:
    return "\n".join(cell["stdout"] for cell in cells if "stdout" in cell)


def only_match(pattern: str, cells: list[dict[str, str]]) -> tuple[str, ...]:
    """Return the groups of a pattern's only match in the printed text."""
    (found,) = re.finditer(pattern, text_of(cells), re.MULTILINE)
    return found.groups()


def tables_of(cells: list[dict[str, str]]) -> list[list[list[str]]]:
    """Return the cells of each table as rows, without the header."""
    texts = [re.sub(r"\x1b\[[\d;]*m", "", cell["text/plain"]) for cell in cells if "┏" in cell.get("text/plain", "")]
    return [
        [[part.strip() for part in line.strip("│").split("│")] for line in text.splitlines() if line[0] == "│"]
        for text in texts
    ]


def interval(text: str) -> tuple[float, float, float]:
    """Parse a percentage and its interval, such as "50.0% (31.4% to 68.6%)"."""
    mean, low, high = (float(number) for number in re.findall(r"(-?[\d.]+)%", text))
    assert low <= mean <= high
    return mean, low, high


# -- all notebooks --------------------------------------------------------------------------------


def test_all_notebooks_are_tested() -> None:
    assert sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb")) == sorted(NAMES)
    assert sum(path.stat().st_size for path in (ROOT / "notebooks").iterdir() if path.is_file()) < 1_500_000


@pytest.mark.notebooks
@executed
def test_a_notebook_runs_to_its_end_without_warnings(name: str, run: Any) -> None:
    cells = run(name)
    assert any(cells)
    for cell in cells:
        assert not cell.keys() & {"error", "stderr"}, cell


@pytest.mark.notebooks
@executed
def test_saved_outputs_have_the_types_of_a_new_run(name: str, run: Any, saved: Any) -> None:
    assert [sorted(cell) for cell in saved(name)] == [sorted(cell) for cell in run(name)]


@every
def test_saved_outputs_have_no_error_no_warning_and_no_local_path(name: str, saved: Any) -> None:
    for cell in saved(name):
        assert "error" not in cell, cell
        assert all("a text was cut" in line for line in cell.get("stderr", "").splitlines()), cell
        for kind, text in cell.items():
            if not kind.startswith("image/png"):
                assert "Traceback" not in text
                assert "Warning" not in text
                assert MACHINE.search(text.replace("http://www.w3.org/", "")) is None, (kind, MACHINE.search(text))


@every
def test_cells_were_saved_from_one_run_in_order_and_begin_with_a_title(name: str) -> None:
    cells = json.loads((ROOT / "notebooks" / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    counts = [cell["execution_count"] for cell in cells if cell["cell_type"] == "code"]
    assert counts == list(range(1, len(counts) + 1))
    assert not any(cell["metadata"] for cell in cells), "keep no times: make notebooks"
    first = "".join(cells[0]["source"])
    assert cells[0]["cell_type"] == "markdown"
    assert first.startswith(f"# {name[0]} · ")


# -- single notebooks -----------------------------------------------------------------------------


@pytest.mark.notebooks
def test_the_quick_start_ends_in_checked_answers_and_beats_chance(run: Any) -> None:
    cells = run("1_quick_start")
    printed = text_of(cells)
    assert only_match(r"^checked by the task: (\w+)$", cells) == ("True",)
    thoughts, by_chance = only_match(r"^thoughts: (\d+)$", cells)[0], only_match(r"^median: (\d+)$", cells)[0]
    assert int(thoughts) < int(by_chance)
    (answer,) = only_match(r"^answer: (.+) checked: True$", cells)
    assert sorted(re.findall(r"\d+", answer), key=int) == ["4", "9", "10", "13"]
    (drawing,) = [cell["image/svg+xml"] for cell in cells if "image/svg+xml" in cell]
    texts = [text.text or "" for text in ElementTree.fromstring(drawing).iter("{http://www.w3.org/2000/svg}text")]
    assert any("4 9 10 13" in text for text in texts)
    assert sum("image/png" in cell for cell in cells) == 1
    assert "★" in printed
    shares = {
        label: int(share) for label, share in re.findall(r"^(sure|likely|impossible) +(\d+)%$", printed, re.MULTILINE)
    }
    assert len(shares) == 3
    assert 98 <= sum(shares.values()) <= 102
    nodes, files = only_match(r"^(\d+) nodes read again; (.+)$", cells)
    assert int(nodes) == len(re.findall(r"[├└]── ", printed)) + 1
    assert files.split() == ["tree.html", "tree.json", "tree.png"]
    asked, known = only_match(r"^(\d+) prompt tokens, of which (\d+) were there already$", cells)
    assert int(asked) > int(known) > 0


@pytest.mark.notebooks
def test_a_custom_task_is_scored_and_compared_and_search_beats_one_chain(run: Any) -> None:
    cells = run("2_your_own_task")
    (said,) = only_match(r"^score: (.+)$", cells)
    mean, low, high = interval(said)
    assert low < mean < high
    assert "'add 5'" in text_of(cells) or "'double'" in text_of(cells)
    ((searched, written, shadow),) = tables_of(cells)
    assert [row[0] for row in (searched, written, shadow)] == ["runs/bfs", "runs/chain", "runs/no-model"]
    assert interval(searched[1]) == (mean, low, high)
    assert interval(written[2])[2] < 0
    assert shadow[3].startswith("0 ")
    failed, of = only_match(r"^(\d+) of (\d+) failed: ", cells)
    assert mean == pytest.approx(100 * (1 - int(failed) / int(of)), abs=0.06)


@pytest.mark.slow
@pytest.mark.notebooks
def test_decoders_write_the_same_text_and_report_their_speed(run: Any) -> None:
    cells = run("3_decoders")
    assert re.findall(r"^(\d+) decoders, the same 48 tokens: ", text_of(cells), re.MULTILINE) == ["7"] * 3
    speeds, rationales = tables_of(cells)
    rows = {row[0]: row for row in speeds}
    assert next(iter(rows)) == "ar"
    assert len(rows) == 7
    assert rows["ar"][2:] == ["1.00x", "3.00", ""]
    for name in ("sd (1,1,1)", "mcsd (2,2,1)", "lookahead, W = G = 3"):
        assert float(rows[name][3]) > 3.0, f"{name}: {rows[name]}"
    assert float(rows["seed, packed"][3]) >= 3.0  # on a busy machine it may not draft
    assert 1.0 < float(rows["seed (1,1,1), rounds"][3]) < 3.0
    assert sum("image/png" in cell for cell in cells) == 2  # bars, and the Gantt chart
    busy, longest = only_match(r"at work (\d+)% of the time\nlongest queue: (\d+)", cells)
    assert 0 < int(busy) <= 100
    assert int(longest) >= 1
    whole, *cut = [[int(cell) for cell in row[1:5]] for row in rationales]
    assert whole[2:] == [0, 0]
    assert [row[0] for row in [*cut, whole]] == sorted(row[0] for row in [*cut, whole])  # forwards grow with the cap
    assert all(undecoded > 0 for _, _, _, undecoded in cut)
    assert [row[5] for row in rationales][::3] == [
        "12.",
        "12.",
    ]  # the answers of ar and of the largest cap
    tokens, forwards = only_match(r"^(\d+) tokens in (\d+) forwards$", cells)
    assert int(tokens) > 1.5 * int(forwards)
    assert len(re.findall(r"^#### (?:Food|The tent|The weather):", text_of(cells), re.MULTILINE)) == 3


@pytest.mark.notebooks
def test_searches_solve_a_problem_and_report_hooks_and_mcts_visits(run: Any) -> None:
    cells = run("4_searches")
    searches, first = tables_of(cells)
    assert [row[:2] for row in searches] == [[name, "True"] for name in ("BFS", "DFS", "best-first", "MCTS")]
    steps = {name: int(length) for name, _, length, _ in searches}
    assert steps["best-first"] == int(only_match(r"^shortest plan: (\d+) actions$", cells)[0]) < steps["DFS"]
    levels = re.findall(r"^level (\d+): .+ \((-?\d+)\)$", text_of(cells), re.MULTILINE)
    assert [int(level) for level, _ in levels] == list(range(1, len(levels) + 1))
    assert int(only_match(r"^solved: True  pruned: (\d+)$", cells)[0]) > 0
    assert int(only_match(r"^solved: True  thoughts: (\d+)$", cells)[0]) > 0
    visits = [int(row[1]) for row in first]
    assert visits == sorted(visits, reverse=True)
    assert visits[0] > 0
    assert sum("image/svg+xml" in cell for cell in cells) == 1


@pytest.mark.slow
@pytest.mark.notebooks
def test_data_sets_are_scored_resumed_and_compared(run: Any) -> None:
    cells = run("5_batch_evaluation")
    scores = re.findall(r"^(.+): (.+%\)), (\d+) new tokens a question$", text_of(cells), re.MULTILINE)
    one, votes, again, ranked, chance, passages = ((name, interval(score), int(new)) for name, score, new in scores)
    assert again[:2] == votes[:2]
    assert again[2] == pytest.approx(votes[2], rel=0.1)  # in bf16, a token depends on the other rows of the batch
    assert votes[2] > one[2]
    assert "starts: gsm8k, 6 samples, 4 of them finished" in text_of(cells)
    difference = interval(only_match(r"^6 questions in both; votes against one: (.+)$", cells)[0])
    assert difference[0] == pytest.approx(votes[1][0] - one[1][0], abs=0.1)
    assert ranked[1][0] > 0
    assert chance[1][0] > 0
    assert chance[2] == 0
    assert passages[2] > 0


@pytest.mark.slow
@pytest.mark.notebooks
def test_the_tuned_model_needs_fewer_forwards_and_jacobi_stays_exact(run: Any) -> None:
    cells = run("6_consistency_llm")
    before, after = only_match(r"^tokens a forward: ([\d.]+) before, ([\d.]+) after$", cells)
    assert float(after) > 1.2 * float(before) >= 1.2
    agreeing, of = only_match(r"^jacobi and ar agree on (\d) of (\d)$", cells)
    assert agreeing == of == "4"
    assert sum("image/png" in cell for cell in cells) == 3


@pytest.mark.slow
@pytest.mark.notebooks
def test_a_formula_is_at_least_as_good_as_the_start_and_its_lineage_is_shown(run: Any) -> None:
    cells = run("7_find_a_formula")
    (start,) = only_match(r"score of the start: (\S+)$", cells)
    thoughts, best = only_match(r"^thoughts: (\d+)  best score: (\S+)$", cells)
    assert 1 <= int(thoughts) <= 32
    assert float(best) <= float(start) == pytest.approx(-0.466, abs=0.001)
    held_out = {name: float(only_match(rf"^{name}: (\S+)$", cells)[0]) for name in ("start", "found")}
    assert held_out["start"] == pytest.approx(-0.487, abs=0.001)
    assert sum("image/svg+xml" in cell for cell in cells) == 1
    assert sum("image/png" in cell for cell in cells) == 1


def test_the_saved_search_finds_a_better_formula(saved: Any) -> None:
    cells = saved("7_find_a_formula")
    assert only_match(r"^model: (\S+)$", cells) == ("qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",)
    found, polynomial = (
        float(only_match(rf"^{name}: (\S+)$", cells)[0]) for name in ("found", "polynomial of degree 2")
    )
    assert found < polynomial
