r"""Formulas in LaTeX: equal ones share a key, and none takes more than seconds or memory of the searching process."""

from __future__ import annotations

import json
import os
import resource
import signal
from pathlib import Path

import pytest

from tot.tasks import formulas
from tot.tasks.competition_math import Math
from tot.tasks.formulas import MAX_LENGTH, key, read, same


@pytest.mark.parametrize(
    "equal",
    [
        ("0.5", "1/2", r"\frac12", r"\dfrac{2}{4}", r"x = \frac{1}{2}", r"y=0.5"),
        ("2", r"\sqrt{4}", "2.0", "2.", r"2\text{ cm}", "2 dollars", r"2\%", r"\$2", r"2^\circ"),
        (r"\frac{\pi}{2}", "pi/2", r"0.5\pi", "1.5707963267948966"),
        ("14/3", r"\frac{14}{3}", "4.666666666666667", r"4\frac{2}{3}"),
        (r"3\sqrt{13}", "10.816653826391969"),
        (r"\sqrt{64}", "8", "7.999999999999999", "8.0"),
        (r"11\sqrt2", "11*sqrt(2)", r"\sqrt{242}"),
        ("(x+1)^2", "x^2+2x+1", "x**2 + 2*x + 1", "1 + 2x + x^2"),
        ("p - q", "-q+p"),
        (r"\{1, 2\}", "2, 1", "{1,2}"),
        (r"\left( 3, \frac{\pi}{2} \right)", "(3, pi/2)"),
        (r"\begin{pmatrix} -1/3 \\ 2 \end{pmatrix}", r"\begin{pmatrix} -\frac13 \\ 2 \end{pmatrix}"),
        (r"3 \pm \sqrt{2}", r"3 + \sqrt 2, 3 - \sqrt 2"),
        (r"\text{Even}", "even", "even."),
        (r"\text{(C)}", "C", "(C)"),
        (r"32,\!348", "32348", "32,348"),
        (r"\sin 30^\circ", r"\cos 60°", r"\tfrac12"),
        (r"(1+i)^2", "2i", r"\sqrt{-4}"),
        (r"e^{i\pi}", "i^2", r"\sqrt[3]{-1}", "-1"),
        ("x<3", r"(-\infty,3)", "3 > x", r"x \in (-\infty, 3)"),
        (r"-2 \le x \le 7", "[-2,7]"),
        (r"x>3 \text{ or } x<1", r"(-\infty,1)\cup(3,\infty)"),
        (r"\emptyset", r"\varnothing", "∅", r"\{ \}", r"\text{no solution}"),
        ("1, 2, 2", "2,1,2"),
        (r"\frac{1}{2006!}", "1/2006!"),
        (r"2:30 \text{ p.m.}", "2:30 PM", "2:30pm"),
        ("4210_5", "4210_{5}"),
        ("1:05", "01:05"),
        ("(0,1.5)", r"(0, \frac32)"),
        ("(1.0, 2)", "(1,2)", "(x, y) = (1, 2)"),
        (r"0.\overline{3}", "1/3"),
        (r"0.1\overline{6}", r"\frac16", r"0.1\bar{6}"),
        (r"-4.\overline{36}", r"-\frac{48}{11}"),
        (r"10 \%", r"10\%", "10"),
    ],
)
def test_equal_formulas_share_a_key(equal: tuple[str, ...]) -> None:
    assert {key(formula) for formula in equal} == {key(equal[0])}
    assert all(same(formula, equal[0]) for formula in equal)


@pytest.mark.parametrize(
    "different",
    [
        ("1/2", "2", r"-\frac12", "0.51", "0.5001", r"\frac{5001}{10001}"),
        ("p - q", "q - p", "p + q"),
        ("(3, 4)", "(4, 3)", "[3, 4]"),
        (r"\sqrt{2}", "1.41", "2"),
        ("x^2", "2x", "x^2 + 1"),
        ("even", "odd", "east"),
        ("sin x", r"\cos x", "tan x"),
        (r"\frac{1}{2004!}", r"\frac{1}{2006!}", "0"),
        ("2^{-98}", "2^{-99}", "0"),
        ("1", r"1 + \frac{1}{2006!}", "1 + 10^{-15}", r"\frac{10^{20}+1}{10^{20}}", "1 - e^{-100}"),
        ("1, 2", "1, 2, 2"),
        ("x=1, y=2", "x=2, y=1"),
        ("[-2,7]", r"-2 < x \le 7"),
        ("1:00", "12:00", "1:00 pm"),
        ("4210_5", "4210_7"),
        (
            r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}",
            r"\begin{pmatrix} 1 & 2 \end{pmatrix}",
            r"\begin{pmatrix} 2 \\ 1 \end{pmatrix}",
        ),
    ],
)
def test_different_formulas_have_different_keys(different: tuple[str, ...]) -> None:
    assert len({key(formula) for formula in different}) == len(different)
    assert not any(same(formula, different[0]) for formula in different[1:])


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"Hence $x = \frac{3}{4}$.", "0.75"),
        ("The final answer is 7", "7"),
        ("It is 12 apples.", "12"),
        ("nothing", None),
        ("", None),
        ("$" * 5000, None),
    ],
)
def test_a_text_without_a_box_ends_in_its_answer(text: str, answer: str | None) -> None:
    found = read(text)
    assert found is None if answer is None else found is not None and key(found) == answer


@pytest.mark.parametrize(
    "formula",
    [
        "9^{9^{9^{9}}}",
        "9**9**9**9**9",
        "99999999999!",
        "(x+y+z+w)^{400}",
        r"\sum_{n=1}^{10^9} \frac{1}{n^3+n+7}",
        "{" * 400 + "1" + "}" * 400,
        "(" * 450 + "1" + ")" * 450,
        r"\sqrt{" * 120 + "2" + "}" * 120,
        r"\frac{" * 90 + "1" + "}{2}" * 90,
        "1" * (MAX_LENGTH + 1),
        "x + " * 100_000,
        "}{",
        r"\boxed{",
        "\x00",
        "\ud800",
        "",
    ],
)
def test_a_hostile_formula_ends_and_equals_only_itself(formula: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    first = key(formula)
    assert first == key(formula)
    assert first != key("2") == "2"
    assert key(r"\sqrt{9}") == "3"  # the next one is read
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


def test_a_comparison_that_takes_too_long_is_false_and_the_next_one_works() -> None:
    assert not same("9^{9^{9^{9}}} + x", "9^{9^{9^{9}}} + y")
    assert same("x + 1", "1 + x")


def test_a_killed_process_is_started_again() -> None:
    assert key("3 + x") == "x + 3"
    running = formulas._process()._running
    assert running is not None
    os.kill(running.pid, signal.SIGKILL)
    running.wait()
    assert formulas._process().ask("key", "4 + x") is None
    assert formulas._process().ask("key", "4 + x") == "x + 4"


def test_a_missing_library_is_reported_with_its_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "formulas.py"
    script.write_text("import a_missing_library")
    monkeypatch.setattr(formulas, "_SCRIPT", script)
    with pytest.raises(formulas.OptionError, match=r"math-verify can't be run \(exit status 1\): pip install"):
        formulas._Process().ask("key", "1")


def test_the_references_of_math500_are_read_from_their_solutions(data: Path) -> None:
    rows = [json.loads(line) for line in (data / "math500_dev.jsonl").read_text().splitlines()]
    task = Math()
    for row in rows[:60]:
        answer = task.parse_answer(row["solution"])
        assert task.score(answer, task.reference_of(row)) == 1
        assert task.canonical(answer) == task.canonical(row["answer"])
