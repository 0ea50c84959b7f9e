"""Trees of every built-in search, generator, evaluator and task, with a decoder whose replies are scripted."""

from __future__ import annotations

import hashlib
import json
import math
import random
import re
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.golden.cases import GROUPS, JUDGED, NUMBERS, TULIPS, WRITTEN, Run
from tot import evaluate, solve
from tot.decoders import Completion, Request, Usage
from tot.decoders.request import ChoiceLogprob, ToolCall
from tot.decoders.tools import OWN


class Script:
    """A decoder that draws a reply from a list, by the prompt, the seed and the number of the sample alone."""

    def __init__(self, texts: str, name: str = "script") -> None:
        self.name = name
        self.model = None if name == "script" else name
        self.requests: list[Request] = []
        self._write: Callable[[str, random.Random], str] = moves if texts == "moves" else partial(replies, texts)
        self._lock = threading.Lock()

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        with self._lock:
            self.requests += requests
        return [self._reply(request, sample) for request in requests for sample in range(request.sampling.n)]

    def read_calls(self, completion: Completion) -> tuple[str, list[ToolCall]]:
        return OWN.parse(completion.text)

    def _reply(self, request: Request, sample: int) -> Completion:
        prompt = said(request)
        draw = random.Random(f"{self.name} {prompt} {request.sampling.seed} {sample}")
        usage = Usage(prompt_tokens=0 if sample else len(prompt.split()))
        scores = tuple(ChoiceLogprob(-1 - 3 * draw.random(), 1) for _ in request.choices)
        if request.choices and request.answer_trigger is None:
            return Completion("", (), 0.0, "stop", usage, scores)
        text = draw.choice(JUDGED) if request.purpose == "evaluate" else self._write(prompt, draw)
        text, reason = stopped(text, request)
        words = text.split()
        drawn = tuple(-draw.random() for _ in words)
        tokens = tuple(len(word) for word in words)
        usage += Usage(new_tokens=len(words))
        return Completion(text, tokens, math.fsum(drawn), reason, usage, scores, logprobs=drawn)  # type: ignore[arg-type]


def replies(texts: str, prompt: str, draw: random.Random) -> str:
    """Return a reply of a kind. Sub-questions and sub-answers of GSM8K have their own."""
    asked = prompt.splitlines()[-1]
    kinds = {"Sub-question": "questions", " 1.": "questions", "Sub-answer": "answers"}
    return draw.choice(WRITTEN[next((name for part, name in kinds.items() if part in f" {asked}"), texts)])


def stopped(text: str, request: Request) -> tuple[str, str]:
    """Return a text up to the first stop string, and the reason of its end."""
    found = [(text.find(stop), stop) for stop in request.sampling.stop if stop in text]
    if not found:
        return text, "eos"
    at, stop = min(found)
    if not request.sampling.keep_stop:
        return text[:at], "stop"
    rest = text[at + len(stop) :]
    return text[: len(text) - len(rest.lstrip())], "stop"


def moves(prompt: str, draw: random.Random) -> str:
    """Return moves of Game of 24 with the numbers that the prompt names last."""
    left = re.findall(r"(?:left:?|Numbers:|from) ((?:\d+ ){1,3}\d+)", prompt) or [NUMBERS]
    numbers = [int(number) for number in left[-1].split()]
    lines = []
    for number in range(1, 4):
        a, b = draw.sample(numbers, 2)
        sign = draw.choice("+-*")
        result = {"+": a + b, "-": a - b, "*": a * b}[sign]
        lines.append(f"{a} {sign} {b} = {result}\n")
        if number > 1:
            lines[-1] = f"{number}. {lines[-1]}"
    return " " + "".join(lines)


def said(request: Request) -> str:
    """Return a prompt as text."""
    if isinstance(request.prompt, str):
        return request.prompt
    return "\n".join(one if isinstance(one, str) else f"{one.role}: {one.content}" for one in request.prompt)  # type: ignore[union-attr]


def digest(value: Any, length: int = 6) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:length]


def kind(request: Request) -> str:
    """Return the purpose of a request and its sampling as text."""
    s = request.sampling
    fields = [request.purpose, f"n={s.n}", f"t={s.temperature:g}", f"max={s.max_tokens}"]
    fields += [
        f"{name}={getattr(s, name):g}"
        for name, none in (("top_k", 0), ("top_p", 1), ("min_p", 0))
        if getattr(s, name) != none
    ]
    fields += [f"stop={digest(s.stop)}"] if s.stop else []
    fields += [f"keep, drawn={s.drawn}"] if s.keep_stop else []
    fields += [f"choices={digest(request.choices)}"] if request.choices else []
    fields += [f"trigger={request.answer_trigger!r}"] if request.answer_trigger else []
    return " ".join(fields)


def calls(decoder: Script) -> dict[str, Any]:
    """Return the kinds of all requests with their numbers, and hashes of their prompts and seeds, in sorted order."""
    requests = decoder.requests
    return {
        "kinds": dict(sorted(Counter(map(kind, requests)).items())),
        "prompts and seeds": " ".join(
            sorted(f"{digest(said(one), 4)}-{digest(one.sampling.seed, 4)}" for one in requests)
        ),
    }


FIELDS = ("value", "prior", "confidence", "fast", "reward", "visits", "q", "share", "cost")
FLAGS = ("terminal", "goal", "verified", "pruned", "chosen")
USAGE = ("prompt_tokens", "new_tokens")
COUNTS = (*USAGE, "merged", "rejected", "parse_failures")


def short(text: str) -> str:
    """Return a text of at most 24 characters, or its beginning and its hash."""
    return repr(text) if len(text) <= 24 else f"{text[:16]!r}~{digest(text)}"


def number(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def line(tree: Any, node: Any) -> str:
    """Return a node as text: its place, thought, values, flags and costs."""
    fields = [tree.place(node)]
    if node.thought is not None:
        fields.append(short(node.thought.text))
        fields += ["ended"] if node.thought.ended else []
        fields += ["truncated"] if node.thought.truncated else []
        fields += [f"observed {short(node.thought.observation.text)}"] if node.thought.observation else []
    fields += [f"{name}={number(value)}" for name in FIELDS if (value := getattr(node, name)) not in (None, 0)]
    fields += [name for name in FLAGS if getattr(node, name)]
    fields += [f"answer={short(str(node.answer))}"] if node.answer is not None else []
    fields += [f"world={digest(json.dumps(node.world, sort_keys=True))}"] if node.world is not None else []
    return " ".join([*fields, "/".join(str(getattr(node.usage if name in USAGE else node, name)) for name in COUNTS)])


def outcome(solution: Any, decoders: Sequence[Script]) -> dict[str, Any]:
    """Return a solution as JSON data."""
    tree, usage = solution.tree, solution.usage
    nodes = sorted(tree, key=lambda node: [step.index for step in tree.path(node)])
    about = {
        "answer": short(str(solution.answer)) if solution.answer is not None else None,
        "solved": solution.solved,
        "value": None if solution.value is None else number(solution.value),
        "stopped": solution.stopped,
        "votes": solution.votes,
        "certainty": None if solution.certainty is None else number(solution.certainty),
        "measured": solution.measured,
    }
    return {
        **{name: value for name, value in about.items() if value not in (None, False)},
        "counts": [solution.calls, solution.parse_failures, solution.rejected, usage.prompt_tokens, usage.new_tokens],
        "nodes": [line(tree, node) for node in nodes],
        **({"links": [f"{tree.place(a)} {tree.place(b)}" for a, b, _ in tree.links()]} if tree.links() else {}),
        **{f"calls of {one.name}": calls(one) for one in decoders if one.requests},
    }


def record(group: str, folder: Path) -> dict[str, Any]:
    """Return the outcomes of the runs of a group."""
    return {name: outcome(*_solve(run, folder)) for name, run in GROUPS[group].items()}


def _solve(run: Run, folder: Path) -> tuple[Any, list[Script]]:
    task, question, texts, options = run
    decoders = [Script(texts), Script(texts, "large")]
    given = options.get("decoder", {"generate": 0})
    options = {"max_tokens": 60, "seed": 1, "decoder": {name: decoders[i] for name, i in given.items()}} | {
        name: value() if callable(value) else value for name, value in options.items() if name != "decoder"
    }
    if "model" in options:
        del options["decoder"]
    elif len(options["decoder"]) == 1:
        options["decoder"] = decoders[0]
    if task == "optimize":
        (folder / "start.py").write_text("def number():\n    return 1\n")
        (folder / "score.py").write_text("from candidate import number\nprint(-abs(10 - number()))\n")
        task = f"optimize:score={folder / 'score.py'},start={folder / 'start.py'}"
    return solve(task, question, **options), decoders


def evaluation(folder: Path) -> dict[str, Any]:
    """Return the samples and the results of an evaluation of four questions, twice each."""
    data = folder / "data.jsonl"
    rows = [{"question": f"{TULIPS} Row {row}.", "answer": "48"} for row in range(4)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    decoder = Script("words")
    options = {"search": "bfs:thoughts=2,breadth=2,depth=3", "prompts": "papers", "repeats": 2, "seed": 3}
    results = evaluate("gsm8k", data, out=folder / "results", decoder=decoder, **options)
    samples = [json.loads(text) for text in (folder / "results" / "samples.jsonl").read_text().splitlines()]
    names = ("id", "answer", "reference", "score")
    found = sorted([*(sample[name] for name in names), *sample["usage"].values()] for sample in samples)
    score = results.score
    assert score is not None
    return {"samples": [" ".join(map(str, one)) for one in found], "score": score.mean, "calls": calls(decoder)}
