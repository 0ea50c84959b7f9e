"""Which answers of `ask` are one answer: marks, units, dates and denials that make it another one."""

from __future__ import annotations

import pytest

from tot.tasks import Ask
from tot.tasks.answer_words import words


@pytest.mark.parametrize(
    ("question", "one", "other", "same"),
    [
        ("How far?", "5 km", "5", True),
        ("How far?", "5 km", "5 kilometers", True),
        ("How long?", "5 days", "5 weeks", False),
        ("How long?", "3 months", "3 years", False),
        ("How long?", "3 years", "3 yr", True),
        ("How big?", "5 GB", "5 MB", False),
        ("How big?", "5 acres", "5 hectares", False),
        ("Which operator?", "+", "-", False),
        ("Which operator?", "==", "!=", False),
        ("Which version?", "v1.2", "1.2", True),
        ("How many?", "12 500", "12,500", True),
        ("How many?", "1 000 000", "1000000", True),
        ("How much is left?", "half", "1/2", True),
        ("How long?", "5 minutes", "5 hours", False),
        ("How much?", "$5", "€5", False),
        ("How much?", "$5", "5 dollars", True),
        ("What percent?", "50%", "50", True),
        ("Which version?", "Python 3.10", "Python 3.1", False),
        ("Which version?", "3.10", "It is version 3.10.", True),
        ("How many?", "twenty", "20", True),
        ("How many?", "thirteen", "13", True),
        ("How many?", "one hundred and five", "105", True),
        ("When?", "1776-07-04", "July 4th, 1776", True),
        ("When?", "4 July 1776", "5 July 1776", False),
        ("When?", "on the 4th of July", "July 4", True),
        ("What is left?", "x + 1", "x+1", True),
        ("Who?", "J.K. Rowling", "J. K. Rowling", True),
        ("Which?", "not guilty", "guilty", False),
        ("What is it?", "well-known", "well known", True),
        ("Simplify 2x + 3x - 1.", "5x - 1", "5x + 1", False),
        ("What is 17 + 28?", "17 + 28 = 45", "45", True),
        ("Who?", "It was not Mark Twain.", "Mark Twain", False),
        ("When?", "It was 1984, not 1985.", "1984", True),
        ("What time?", "2:30 pm", "14:30", True),
        ("What time?", "2:30 pm", "2:30 am", False),
        ("How many?", "٣", "3", True),
        ("How many?", "５", "5", True),
        ("Which blood type?", "O negative", "O-", True),
        ("Which key?", "F sharp", "F#", True),
        ("Which key?", "B♭", "B flat", True),
        ("Which country?", "the US", "U.S.", True),
        ("What?", "x<3", "x>3", False),
        ("How many?", "1.5 million", "1,500,000", True),
        ("How many?", "2 dozen", "24", True),
        ("Grade?", "A+", "A", False),
        ("Grade?", "A-", "A", False),
        ("How many?", "2/3", "0.667", False),
        ("What?", "3 1/2", "3.5", True),
        ("What is the range?", "5-10", "5–10", True),
        ("Area?", "5 m²", "5 square meters", True),
        ("Speed?", "60 mph", "60 miles per hour", True),
        ("Vitamin?", "vitamin A", "vitamin B", False),
        ("Which vitamin?", "Vitamin A", "A", True),
        ("Which language?", "C#", "C++", False),
        ("Who?", "Yes", "No", False),
        ("How cold?", "-40 °C", "-40 °F", False),
        ("How cold?", "-40", "−40", True),
        ("Who wrote it?", "The Beatles", "Beatles", True),
        ("Which?", "10^6", "10^5", False),
        ("how many?", "10^6", "1 million", True),
        ("What is -infinity?", "infinity", "-infinity", False),
        ("Who?", "Dr. Smith", "Dr Smith", True),
        ("where?", "St. Louis", "St Louis", True),
        ("Which?", "Ag+", "Ag", False),
        ("Which?", "A", "B", False),
        ("Which?", "(A)", "A", True),
        ("Which?", "A.", "A", True),
        ("Which option?", "Option A", "A", True),
        ("?", "6'2\"", "62", False),
        ("Who?", "Louis XIV", "Louis XV", False),
        ("How many?", "three quarters", "3/4", True),
        ("Q?", "$1,000", "1000 USD", True),
        ("Q?", "100 degrees Celsius", "100 °C", True),
        ("Q?", "1st", "2nd", False),
        ("Q?", "Paris.", "**Paris**", True),
        ("Q?", "`Paris`", '"Paris"', True),
    ],
)
def test_answers_share_a_ballot_if_nothing_makes_them_different(
    question: str, one: str, other: str, same: bool
) -> None:
    keys, _ = Ask().elect(question, [one, other], [1.0, 1.0])
    assert (keys[0] == keys[1]) is same


def test_a_number_without_a_unit_votes_with_the_only_unit() -> None:
    elect = Ask().elect
    assert elect("How far?", ["5", "5 km", "5 kilometres"], [1.0] * 3)[0] == ["5 km"] * 3
    assert elect("How far?", ["5", "5 km", "5 miles"], [1.0] * 3)[0] == ["5", "5 km", "5 mi"]


@pytest.mark.parametrize(
    ("answer", "reference", "score"),
    [
        ("It is not Paris.", "Paris", 0),
        ("8, 9 or 10", "10", 0),
        ("Is it Lyon? No, Paris.", "Lyon", 0),
        ("Is it Lyon? No, Paris.", "Paris", 1),
        ("Mark Twain? No.", "Mark Twain", 0),
        ("Paris?", "Paris", 1),
        ("5 days", "5 weeks", 0),
        ("+", "+", 1),
        ("+", "-", 0),
        ("half", "0.5", 1),
        ("It is Paris or Lyon.", "Paris", 0),
        ("It was 1984, not 1985.", "1985", 0),
        ("It's not Lyon but Paris.", "Paris", 1),
        ("It's not Lyon but Paris.", "Lyon", 0),
        ("Paris, not Lyon", "Paris", 1),
        ("Paris, not Lyon", "Lyon", 0),
        ("Mark Twain did not write it.", "Mark Twain", 0),
        ("I don't think it is Paris.", "Paris", 0),
        ("There is no doubt that it is Paris.", "Paris", 1),
        ("It did not end until 1945.", "1945", 1),
        ("It is 5 miles.", "5 km", 0),
        ("It is 5 kilometers", "5 km", 1),
        ("5", "5 km", 1),
        ("5 km", "5", 1),
        ("July 4, 1776", "1776", 1),
        ("4 July 1776", "July 4, 1776", 1),
        ("It was on 4 July 1776.", "July 1776", 1),
        ("It was in July 1776.", "4 July 1776", 0),
        ("1.5 million", "1.5 billion", 0),
        ("1500000", "1.5 million", 1),
        ("The note is F#.", "F", 0),
        ("The note is F sharp.", "F#", 1),
        ("50%", "50", 1),
        ("50", "50%", 1),
        ("not guilty", "not guilty", 1),
        ("He was found not guilty.", "not guilty", 1),
        ("He was found guilty.", "not guilty", 0),
        ("It is either 5 or 6.", "6", 0),
        ("Paris rather than Lyon", "Lyon", 0),
        ("It can't be Paris.", "Paris", 0),
        ("I'm not sure, but it is Paris.", "Paris", 1),
        ("The answer is A.", "A", 1),
        ("A", "The A", 1),
        ("It is the U.S.A.", "USA", 1),
        ("-5", "5", 0),
        ("minus five", "-5", 1),
        ("It is minus 5.", "-5", 1),
        ("five", "5", 1),
        ("There are 10 or more.", "10", 1),
        ("Paris is the capital, Lyon is not.", "Paris", 1),
        ("The capital is Paris (not Lyon).", "Paris", 1),
        ("The capital is Paris (not Lyon).", "Lyon", 0),
        ("It is table salt, or sodium chloride.", "sodium chloride", 1),
        ("Water (H2O)", "H2O", 1),
        ("3 + 5", "5", 0),
        ("2 + 3 = 5", "5", 1),
        ("It isn't Lyon; it's Paris.", "Paris", 1),
        ("It was Einstein who did it, not Bohr", "Bohr", 0),
        ("Neither Paris nor Lyon", "Paris", 0),
        ("x-1", "x+1", 0),
        ("The answer is x - 1.", "x-1", 1),
        ("No, it is not.", "No", 1),
        ("Never", "never", 1),
        ("None of them", "none", 1),
        ("0.333", "1/3", 0),
        ("1/3", "1/3", 1),
        ("It's 2:30 p.m.", "2:30 pm", 1),
        ("It's 3:30 p.m.", "2:30 pm", 0),
        ("Paris and not Lyon", "Lyon", 0),
        ("It could be Paris, Lyon, or Nice.", "Nice", 0),
        ("It is 3.14", "3.1", 0),
        ("twenty-one", "21", 1),
        ("The year was 1945.", "1945", 1),
        ("In Paris, Texas", "Paris, Texas", 1),
        ("The answer is not Paris, it is Lyon.", "Lyon", 1),
        ("Probably not Paris", "Paris", 0),
        ("It's no longer Bonn", "Bonn", 0),
        ("It used to be Bonn", "Bonn", 1),
        ("Anything except Paris", "Paris", 0),
        ("It is hardly Paris", "Paris", 0),
        ("It's false that it is Paris", "Paris", 0),
        ("It is wrong to say Paris.", "Paris", 0),
        ("without doubt Paris", "Paris", 1),
    ],
)
def test_an_answer_is_right_if_it_says_the_reference_and_does_not_deny_it(
    answer: str, reference: str, score: float
) -> None:
    assert Ask().score(answer, [reference]) == score


def test_marks_of_names_and_formulas_stay_with_their_words() -> None:
    assert words("**C++** and the F# key, x - 1 or O-; well-known input/output - U.S.A.") == [
        "c++", "and", "f#", "key", "x-1", "or", "o-", "well", "known", "input", "output", "usa",
    ]  # fmt: skip
    assert words("a dozen, ½, 10⁶, 5km, 60 mph, 2:30 p.m., the 4th of July 1776") == [
        "12", "0.5", "1000000", "5", "km", "60", "mi/h", "14:30", "1776-07-04",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "piece", ["a-", "1/", "x+", "a ", "1 ", "- ", "$", "a.b.", "jan 1 ", "°", "*", "a*", "the ", "1a"]
)
def test_hostile_text_has_words(piece: str) -> None:
    assert words(piece * 2000) == words(piece * 2000)


@pytest.mark.parametrize(
    ("first", "second"),
    [("first", "1st"), ("The second.", "2nd"), ("the twelfth", "12th"), ("the twenty-first century", "21st century")],
)
def test_ordinals_in_words_and_digits_are_one_answer(first: str, second: str) -> None:
    assert words(first) == words(second) != words("the 4th")


def test_seconds_are_not_ordinals() -> None:
    assert words("a 20-second timer") == words("a 20 s timer")
