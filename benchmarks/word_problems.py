"""Word problems made up from templates, with solutions in steps, to train and measure small models on.

`tot instances benchmarks/word_problems.py:WordProblems` writes them to a file of questions for `gsm8k`.
"""

from __future__ import annotations

import random
from typing import Any

from tot.tasks.gsm8k import GSM8K

_PEOPLE = {"Ana": "she", "Bela": "he", "Chidi": "he", "Dora": "she", "Emil": "he", "Farah": "she", "Goran": "he"}
_THINGS = ("apples", "beads", "cards", "coins", "marbles", "pencils", "shells", "stamps", "stickers", "tickets")
_MOST = 300
"""At this count and above, no event adds things."""


class WordProblems(GSM8K):
    """GSM8K, with made-up questions."""

    def instance(self, seed: int) -> dict[str, Any]:
        return word_problem(seed)


def word_problem(seed: int) -> dict[str, Any]:
    """Return a question of one to three events, its answer, and a solution that continues GSM8K's `chain` template."""
    chance = random.Random(seed)
    (name, pronoun), things = chance.choice([*_PEOPLE.items()]), chance.choice(_THINGS)
    count = chance.randrange(5, 60)
    story = [f"{name} has {count} {things}."]
    steps: list[tuple[str, str, int]] = []
    for _ in range(chance.randint(1, 3)):
        first, second = chance.randrange(2, 10), chance.randrange(2, 10)
        events = {"finds", "buys", "wins"} if count < _MOST else {"loses"}
        events |= {"loses"} if count > 1 else set()
        events |= {"shares"} if count % first == 0 else set()
        event = chance.choice(sorted(events))
        if event == "loses":
            lost = chance.randrange(1, count)
            story.append(f"Then {pronoun} loses {lost} of them.")
            steps.append(("are left", f"{count} - {lost}", count := count - lost))
        elif event == "finds":
            found = chance.randrange(2, 50)
            story.append(f"Then {pronoun} finds {found} more.")
            steps.append((f"does {name} have then", f"{count} + {found}", count := count + found))
        elif event == "wins":
            story.append(f"Then {pronoun} wins as many as {pronoun} already has.")
            steps.append((f"does {name} have then", f"{count} * 2", count := count * 2))
        elif event == "buys":
            story.append(f"Then {pronoun} buys {first} bags with {second} {things} each.")
            steps.append(("are in the bags", f"{first} * {second}", bought := first * second))
            steps.append((f"does {name} have then", f"{count} + {bought}", count := count + bought))
        else:
            story.append(f"Then {pronoun} puts them into {first} equal piles and keeps one pile.")
            steps.append(("are in one pile", f"{count} / {first}", count := count // first))
    story.append(f"How many {things} does {name} have in the end?")
    solution = "".join(
        f"Sub-question {number}: How many {things} {asked}?\n"
        f"Sub-answer {number}: {formula} = {result} {things}. The answer is {result}.\n"
        for number, (asked, formula, result) in enumerate(steps, 1)
    )
    return {
        "question": " ".join(story),
        "answer": str(count),
        "solution": f"{solution.removeprefix('Sub-question 1:')}The answer is {count}.",
    }
