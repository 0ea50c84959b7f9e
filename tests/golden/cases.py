"""The runs whose trees are recorded, by group, and the texts that their scripted decoders write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tot import MCTS, Combine, Likelihood, LogProb, Random

NUMBERS = "5 5 14 20"
STOCK = "A shop sells pencils at 3 for $2. How much do 12 pencils cost?\nA) $6\nB) $8\nC) $12\nD) $18\nE) $24"
TULIPS = "A gardener plants 7 rows of 9 tulips. Rabbits eat 15 of them. How many tulips are left?"
SURD = "Simplify $\\sqrt{48} + \\sqrt{27}$."
BLOCKS = (
    "(define (problem b) (:domain blocksworld-4ops) (:objects a b c d) (:init (clear b) (clear d) (handempty) (on b a) "
    "(on d c) (ontable a) (ontable c)) (:goal (and (on a d))))"
)
LINES = "The tuba was full of marbles. My uncle votes for soup. The lift goes sideways. She forgave the clock."
RUNS = 'def runs(text: str) -> int:\n    """Count the runs of a text.\n\n    >>> runs("aab")\n    2\n    """'
ADVENTURES = f"{Path(__file__).parents[2] / 'benchmarks' / 'textworld.py'}:TextWorld"
GAME = "rooms=2 objects=4 quest=3 seed=5"
TEN = "Return a number close to 10."
JUDGED = ["Yes", "No", "8", "3", "sure", "likely", "impossible", "2", "1", "The best choice is 1.", "I cannot say."]
PROSE = [
    "The plan begins with a tuba.\n\nThen the uncle votes.",
    "A lift goes sideways, and the tuba plays.",
    "She forgave the clock.\n\nIt had stopped.",
    "Soup was served.\nThe tuba played.",
]
WRITTEN: dict[str, list[str]] = {
    "words": [
        "There are 7 * 9 = 63 tulips in the rows.\n\nThen the rabbits come.",
        "Rabbits eat 15 of the 63, so 48 are left. The answer is 48.\n\n",
        "First we multiply: 7 * 9 = 63.\n\nThen 63 - 15 = 48.\n\nThe answer is \\boxed{48}.",
        "We count the rows.\nEach has 9 tulips.\n\nSo there are 63.",
        "15 are eaten.\n\nIt leaves 50. The answer is \\boxed{50}.",
        "How many do the rabbits eat?",
        "calculator(7 * 9)\n",
        "Hmm.",
    ],
    "calls": [
        '[{"name": "calculator", "arguments": {"expression": "7 * 9"}}]',
        'Rabbits eat 15.\n[{"name": "calculator", "arguments": {"expression": "63 - 15"}}]',
        '[{"name": "calculator", "arguments": {"expression": 63}}]',
        "So 48 are left. The answer is \\boxed{48}.",
    ],
    "questions": [
        "How many tulips are planted?",
        "How many do the rabbits eat?",
        "Now we can answer the question: How many tulips are left?",
        "2. How many are there in a row?\n3. How many do the rabbits eat?\n\n",
        "",
    ],
    "answers": [
        "7 * 9 = 63 tulips are planted. The answer is 63.",
        "They eat 15. The answer is 15.\n\n",
        "63 - 15 = 48 are left. The answer is 48.",
        "I do not know.",
        "It is 50. The answer is 50.",
    ],
    "formulas": [
        "We write $\\sqrt{48} = 4\\sqrt{3}$.\n\nAnd $\\sqrt{27} = 3\\sqrt{3}$.",
        "The sum is $7\\sqrt{3}$. The answer is $7\\sqrt{3}$.",
        "So the result is \\boxed{7\\sqrt{3}}.",
        "It is $\\boxed{\\sqrt{147}}$.",
        "What is $\\sqrt{27}$?",
    ],
    "choices": [
        "12 pencils are 4 times 3 pencils.\n\nThey cost 4 * 2 = 8.",
        "Each costs $2, so $24. Answer: E",
        "The answer is B.",
        "4 times $2 is $8, so (B).\n\nAnswer: B",
        "We divide 12 by 3.\n\nThat is 4.",
    ],
    "prose": PROSE,
    "blocks": ["unstack b from a", "put down b", "(unstack d c)\n(put-down d)", "stack b on d", "pick up a", "wait"],
    "facts": ["Paris", "The capital of France is Paris.", "It is Lyon.\n\nNo, Paris.", "Let me think.\n\nParis."],
    "code": [
        "```python\ndef runs(text):\n    return len(text)\n```",
        "```python\ndef runs(text):\n    return sum(a != b for a, b in zip(text, ' ' + text))\n```",
        "```python\ndef runs(text):\n    return text.nothing\n```",
        "I cannot.",
    ],
    "tens": [f"```python\ndef number():\n    return {number}\n```" for number in ("4", "9", "12", "1 / 0", "9.5")],
    "programs": ["```python\nprint(7 * 9 - 15)\n```", "```python\nprint(7 * 9)\n```", "So it is \\boxed{48}."],
}
Run = tuple[str, str, str, dict[str, Any]]
"""Task, question, kind of texts and options of `solve`."""


def _words(search: Any, **options: Any) -> Run:
    return "gsm8k", TULIPS, "words", {"search": search, "prompts": "papers", **options}


_TURNS = {"search": "bfs:thoughts=3,breadth=2,depth=4", "generator": "turns", "prompts": "chat"}


def _chat(search: str, **options: Any) -> Run:
    return "gsm8k", TULIPS, "words", {"search": search, "prompts": "chat", "generator": "continue", **options}


def _numbers(search: str, **options: Any) -> Run:
    return "game24", NUMBERS, "moves", {"search": search, "prompts": "papers", **options}


def _blocks(search: str, **options: Any) -> Run:
    return "blocksworld", BLOCKS, "blocks", {"search": search, "prompts": "papers", **options}


def _judged(evaluator: Any, **options: Any) -> Run:
    return _words("bfs:thoughts=3,breadth=2,depth=3", evaluator=evaluator, **options)


_SHORT = {"search": "bfs:thoughts=2,breadth=2,depth=3"}
GROUPS: dict[str, dict[str, Run]] = {
    "bfs": {
        "greedy": _words("bfs:thoughts=3,breadth=2,depth=3"),
        "sample": _words("bfs:thoughts=3,breadth=2,depth=3,select=sample", evaluator="value"),
        "all": _chat("bfs:thoughts=2,select=all,depth=4", evaluator="logprob"),
        "moves": _numbers("bfs:thoughts=none,breadth=3", generator="propose", evaluator="classify"),
        "budget": _words("bfs:thoughts=3,breadth=2", budget={"nodes": 5}),
    },
    "dfs": {
        "words": _words("dfs:thoughts=2,depth=3"),
        "threshold": _numbers("dfs:thoughts=3,threshold=0.5", generator="propose", evaluator="classify", max_tokens=40),
    },
    "best-first": {
        "cost": _blocks("best-first:rank=cost", model=None, generator="enumerate:prior=uniform"),
        "prior": _numbers("best-first:rank=prior,batch=2,thoughts=4", generator="enumerate", budget={"nodes": 20}),
        "value": _words("best-first:rank=value,thoughts=2,depth=3", evaluator="value", budget={"nodes": 12}),
    },
    "mcts": {
        "uct": _words("mcts:iterations=8,thoughts=3,depth=4"),
        "puct": _blocks("mcts:iterations=8,thoughts=none,rule=puct,depth=4", generator="enumerate", evaluator="prior"),
        "max": _chat("mcts:iterations=6,thoughts=2,calc_q=max,cum_reward=sum", evaluator="likelihood"),
        "rollout": _words(
            MCTS(iterations=4, thoughts=2, rollout="greedy", fast=Random(), depth=4),
            evaluator="value",
        ),
    },
    "rap": {
        "words": ("gsm8k", TULIPS, "words", {"search": "rap:iterations=4,depth=3", "prompts": "papers"}),
        "blocks": ("blocksworld", BLOCKS, "blocks", {"search": "rap:iterations=4,depth=4", "prompts": "papers"}),
    },
    "ab-mcts": {
        "gaussian": _words("ab-mcts:iterations=10,together=1", evaluator="value"),
        "two models": _words(
            "ab-mcts:iterations=8,together=1", evaluator="value", decoder={"generate": 0, "escalate": 1}
        ),
    },
    "refine": {"prose": ("creative_writing", LINES, "prose", {"search": "refine:thoughts=3", "generator": "sample"})},
    "baselines": {
        "act": _chat("act", evaluator="random"),
        "act in a world": _blocks("act:depth=5", generator="sample"),
        "cot": _words("cot"),
        "best of n": _words("best-of-n:samples=4"),
        "best of n, chat": _chat("best-of-n:samples=3", evaluator="logprob:window=4"),
    },
    "self-consistency": {
        "vote": _words("self-consistency:samples=5"),
        "weighted": _chat("self-consistency:samples=4,weighted=true", evaluator="logprob"),
        "best": _words("self-consistency:samples=4,aggregate=best,weighted=true", evaluator="value"),
    },
    "auto": {
        "until": _chat("auto:samples=6,until=0.8,together=2,solutions=chain"),
        "two models": _chat("auto:samples=4,together=2,solutions=chain", decoder={"generate": 0, "escalate": 1}),
    },
    "generators": {
        "sample": _words("bfs:thoughts=2,breadth=1,depth=3", generator="sample:samples=3", evaluator="confidence"),
        "propose": _words("bfs:thoughts=3,breadth=2,depth=3", generator="propose", evaluator="vote"),
        "continue, lines": _chat(
            "bfs:thoughts=2,breadth=2,depth=4", generator="continue:until=line", evaluator="value"
        ),
        "continue, sentences": _chat("act", generator="continue:until=sentence,tokens=20", evaluator="random"),
        "turns": ("gsm8k", TULIPS, "calls", {**_TURNS, "tools": ["calculator"], "evaluator": "random"}),
        "enumerate": _blocks("bfs:thoughts=2,breadth=2,depth=4", generator="enumerate:temperature=3,thoughts=3"),
        "at random": _blocks("bfs:breadth=2,depth=3", generator="enumerate:prior=random", evaluator="heuristic"),
    },
    "evaluators": {
        "classify": _judged("classify"),
        "combine": _judged(lambda: _combined()),
        "explain": _judged("explain"),
        "heuristic": _blocks("bfs:breadth=2,depth=3", generator="enumerate:prior=uniform", evaluator="heuristic"),
        "likelihood": _judged("likelihood", prompts="chat", generator="continue"),
        "logprob": _judged("logprob"),
        "prior": _blocks("bfs:breadth=2,depth=3", generator="enumerate", evaluator="prior"),
        "random": _judged("random"),
        "value": _judged("value:samples=3,temperature=1"),
        "vote": _judged("vote:samples=3"),
    },
    "tasks": {
        "ask": ("ask", "What is the capital of France?", "facts", {"prompts": "chat"}),
        "ask, tree": ("ask", "What is the capital of France?", "facts", {**_SHORT, "prompts": "papers"}),
        "blocksworld": _blocks("bfs:thoughts=2,breadth=2,depth=3", prompts="chat", generator="sample"),
        "blocksworld_direct": ("blocksworld_direct", BLOCKS, "blocks", {"search": "cot", "prompts": "papers"}),
        "creative_writing": ("creative_writing", LINES, "prose", {"prompts": "papers"}),
        "creative_writing, chat": ("creative_writing", LINES, "prose", {**_SHORT, "prompts": "chat"}),
        "game24": ("game24", NUMBERS, "moves", {**_SHORT, "generator": "propose", "prompts": "chat"}),
        "gsm8k": ("gsm8k", TULIPS, "words", {"search": "self-consistency:samples=4", "prompts": "chat"}),
        "math": ("math", SURD, "formulas", {**_SHORT, "prompts": "chat"}),
        "math, papers": ("math", SURD, "formulas", {"search": "self-consistency:samples=4", "prompts": "papers"}),
        "multiple_choice": ("multiple_choice", STOCK, "choices", {"prompts": "papers"}),
        "multiple_choice, chat": ("multiple_choice", STOCK, "choices", {"prompts": "chat"}),
        "reasoning-gym": ("reasoning-gym", TULIPS, "words", {"search": "self-consistency:samples=4"}),
    },
    "textworld": {
        "heuristic": (ADVENTURES, GAME, "blocks", {"search": "mcts:thoughts=none,iterations=4,rule=puct,depth=4"}),
    },
    "programs": {  # one at a time: thoughts that run together are numbered in the order of their ends
        "code": ("code", RUNS, "code", {"search": "ab-mcts:iterations=5,together=1"}),
        "code, tree": ("mbpp", RUNS, "code", {"search": "bfs:thoughts=1,breadth=1"}),
        "humaneval": ("humaneval", RUNS, "code", {"search": "cot"}),
        "gsm8k": (
            "gsm8k",
            TULIPS,
            "programs",
            {"search": "self-consistency:samples=4,solutions=program", "prompts": "chat"},
        ),
        "optimize": ("optimize", TEN, "tens", {"search": "ab-mcts:iterations=5,together=1"}),
        "optimize, refine": ("optimize", TEN, "tens", {"search": "refine:thoughts=1"}),
    },
}


def _combined() -> Combine:
    return Combine(evaluators=(Likelihood(), LogProb()), weights=(0.5, 2.0), rule="product")
