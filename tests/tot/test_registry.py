"""Searches, generators, evaluators and tasks by name, with options in the text; unknown names are rejected."""

from __future__ import annotations

import asyncio
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tot import (
    ABMCTS,
    BFS,
    DFS,
    MCTS,
    Auto,
    BestFirst,
    BestOfN,
    ChainOfThought,
    Classify,
    Combine,
    Confidence,
    Continue,
    Enumerate,
    Explain,
    Heuristic,
    Likelihood,
    LogProb,
    Measured,
    Prior,
    Propose,
    Random,
    Refine,
    Sample,
    SelfConsistency,
    Turns,
    Value,
    Vote,
    load_task,
    solve,
)
from tot.api import run_search
from tot.config import SearchConfig
from tot.decoders import OptionError, TaskError
from tot.registry import EVALUATORS, GENERATORS, SEARCHES, named, parts_of, spec_of
from tot.search.baselines import Act
from tot.search.mcts import RAP

KNOWN = {"search": SEARCHES, "generator": GENERATORS, "evaluator": EVALUATORS}


@pytest.mark.parametrize(
    ("kind", "text", "meant"),
    [
        ("search", "ab-mcts:iterations=9", ABMCTS(iterations=9)),
        ("search", "act", Act()),
        ("search", "auto", Auto()),
        ("search", "bfs", BFS()),
        ("search", "dfs", DFS()),
        ("search", "best-first", BestFirst()),
        ("search", "mcts", MCTS()),
        ("search", "rap", RAP()),
        ("search", "cot", ChainOfThought()),
        ("search", "self-consistency", SelfConsistency()),
        ("search", "best-of-n", BestOfN()),
        ("search", "cot:solutions=chain+program", ChainOfThought(solutions=("chain", "program"))),
        ("search", "refine:thoughts=3", Refine(thoughts=3)),
        ("generator", "continue", Continue()),
        ("generator", "sample", Sample()),
        ("generator", "propose", Propose()),
        ("generator", "turns:tool_choice=required", Turns(tool_choice="required")),
        ("generator", "enumerate", Enumerate()),
        ("evaluator", "logprob:window=5", LogProb(window=5)),
        ("evaluator", "likelihood", Likelihood()),
        ("evaluator", "value", Value()),
        ("evaluator", "classify", Classify()),
        ("evaluator", "vote", Vote()),
        ("evaluator", "explain", Explain()),
        ("evaluator", "heuristic", Heuristic()),
        ("evaluator", "measured", Measured()),
        ("evaluator", "prior", Prior()),
        ("evaluator", "confidence", Confidence()),
        ("evaluator", "random", Random()),
        ("search", "mcts:iterations=20,exploration=2", MCTS(iterations=20, exploration=2)),
        ("search", " mcts : iterations = 20 , rule=puct ", MCTS(iterations=20, rule="puct")),
        ("search", "mcts:rollout=none,thoughts=none", MCTS(rollout="none", thoughts=None)),
        ("search", "mcts:fast=none", MCTS(fast=None)),
        ("search", "bfs:thoughts=None,aggregate=vote", BFS(thoughts=None, aggregate="vote")),
        ("search", "bfs:", BFS()),
        ("search", "dfs:threshold=-0.5,depth=2", DFS(threshold=-0.5, depth=2)),
        ("search", "best-first:rank=prior,batch=4", BestFirst(rank="prior", batch=4)),
        ("generator", "sample:thoughts=8,samples=3,temperature=1", Sample(thoughts=8, samples=3, temperature=1)),
        ("generator", "enumerate:thoughts=none,prior=random", Enumerate(prior="random")),
        ("evaluator", "value:samples=3,template=judge", Value(samples=3, template="judge")),
        ("evaluator", "vote:samples=2", Vote(samples=2)),
    ],
)  # fmt: skip
def test_a_text_names_an_object_with_options(kind: str, text: str, meant: Any) -> None:
    result = named(text, KNOWN[kind])
    assert type(result) is type(meant)
    assert result == meant
    spec = spec_of(meant)
    assert spec is not None
    assert named(spec, KNOWN[kind]) == meant


def test_every_known_name_is_covered_above() -> None:
    (mark,) = [m for m in test_a_text_names_an_object_with_options.pytestmark if m.name == "parametrize"]
    covered = {(kind, text.partition(":")[0].strip()) for kind, text, _ in mark.args[1]}
    assert covered == {(kind, name) for kind, known in KNOWN.items() for name in known}


def test_an_installed_plug_in_is_known_to_programs_and_not_to_the_tests(tmp_path: Path) -> None:
    """Only another process has it installed; there, the test above covers the built-in names."""
    info = tmp_path / "mine-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[tot.searches]\nmine = mine:Mine\n[tot.decoders]\nmine = mine:Mine\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    known = "from tot.registry import SEARCHES; print('mine' in SEARCHES)"
    said = subprocess.run([sys.executable, "-c", known], env=environment, capture_output=True, text=True, check=True)
    assert said.stdout == "True\n"
    test = [f"{__file__}::test_every_known_name_is_covered_above", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run([sys.executable, "-m", "pytest", *test], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("search", "bsf", r"unknown search 'bsf' \(did you mean bfs\?\): choose one of ab-mcts, act, auto, "),
        ("search", "halving:drafts=4", "search 'halving' was removed: choose ab-mcts or refine"),
        ("search", "", r"unknown search '': choose one of ab-mcts, act"),
        ("generator", "sampel:x=2", r"unknown generator 'sampel' \(did you mean sample\?\): choose one of continue, "),
        ("evaluator", "judge", r"unknown evaluator 'judge': choose one of classify, confidence, "),
        ("search", "bfs:width=2", r"search bfs, option width: .* \(its options: depth, aggregate, thoughts, "),
        ("search", "bfs:breadth=0", r"search bfs, option breadth: .*greater than or equal to 1 \(its options: "),
        ("search", "bfs:breadth=many", r"search bfs, option breadth: .*valid integer"),
        ("search", "bfs:breadth", r"search 'bfs:breadth': 'breadth' is not an option: write bfs:option=value,"),
        ("search", "mcts:rule=best", r"search mcts, option rule: Input should be 'uct' or 'puct'"),
        ("search", "mcts:exploration=inf", r"search mcts, option exploration: "),
        ("generator", "enumerate:prior=none", r"generator enumerate, option prior: Input should be 'model', 'uniform'"),
        ("search", "dfs:goals=2", r"search dfs, option goals: was removed: the search ends at its first goal"),
        ("evaluator", "reward-model:model=x", r"evaluator .* was removed: write an evaluator that calls it"),
        ("search", "mcts:fast=logprob", r"option fast: Input should be 'evaluator'"),  # or an object
    ],
)  # fmt: skip
def test_an_unknown_name_is_rejected_with_the_choices(kind: str, text: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        named(text, KNOWN[kind])


class Own:
    """A user-defined generator."""

    async def propose(self, ctx: Any, nodes: Any, count: Any) -> Any:
        return [[] for _ in nodes]


def test_an_object_is_used_as_is_and_accepts_no_other_options() -> None:
    search, own = BFS(breadth=7), Own()
    assert named(search, SEARCHES) is search
    assert named(own, GENERATORS) is own
    assert named(search, SEARCHES, depth=None) is search
    with pytest.raises(OptionError, match=r"depth=3 can't be set on a search object: give BFS\(depth=3\)"):
        named(search, SEARCHES, depth=3)
    with pytest.raises(OptionError, match="breadth=3 can't be set on a search object: leave it out"):
        named(MCTS(), SEARCHES, breadth=3)


# -- the parts of a run -----------------------------------------------------------------------------------------


def test_defaults_come_from_the_task(letters: Any) -> None:
    own = {"search": "dfs:depth=2", "generator": "propose", "evaluator": "value:samples=2"}
    task = type("Own", (letters,), own)()
    assert parts_of(task) == {"search": DFS(depth=2), "generator": Propose(), "evaluator": Value(samples=2)}
    assert parts_of(task, search="bfs", evaluator=Prior()) == {
        "search": BFS(),
        "generator": Propose(),
        "evaluator": Prior(),
    }
    assert parts_of(letters()) == {"search": BFS(), "generator": Sample(), "evaluator": Likelihood()}


def test_rap_sets_search_generator_and_evaluator(letters: Any) -> None:
    judged = Likelihood(template="self_eval", labels={"Yes": 1.0, "No": 0.0})
    parts = parts_of(letters(), search="rap")
    assert parts["search"] == MCTS(thoughts=4, rollout="greedy", cum_reward="mean", calc_q="max", fast=judged)
    assert parts["generator"] == Sample(samples=8)
    assert parts["evaluator"] == Combine(evaluators=(judged, Confidence()), weights=(0.5, 0.5), rule="product")


def test_rap_accepts_options_and_may_be_the_search_of_a_task(letters: Any) -> None:
    whole = parts_of(letters(), search="rap")
    shorter = whole["search"].model_copy(update={"iterations": 3, "depth": 5})
    assert parts_of(letters(), search="rap:iterations=3,depth=5") == whole | {"search": shorter}
    assert parts_of(type("Own", (letters,), {"search": "rap"})()) == whole
    with pytest.raises(OptionError, match=r"search rap, option breadth: .* \(its options: depth, .*iterations"):
        parts_of(letters(), search="rap:breadth=2")
    with pytest.raises(
        OptionError, match=r"unknown search 'rip'.*: choose one of .*, mcts, rap, refine, self-consistency"
    ):
        parts_of(letters(), search="rip")


# -- tasks ------------------------------------------------------------------------------------------------------

RIDDLE = """
from tot import State, Task

class Riddle(Task):
    depth = 2

class Harder(Riddle):
    name = "harder_riddle"

not_a_task = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A task file with its templates in a folder beside it."""
    (tmp_path / "riddle").mkdir()
    for name in ("thought", "value", "answer"):
        (tmp_path / "riddle" / f"{name}.jinja").write_text(f"{name} of {{{{ question }}}}")
    (tmp_path / "my_riddles.py").write_text(RIDDLE)
    return tmp_path / "my_riddles.py"


def test_a_task_is_an_object_a_class_or_a_name(letters: Any) -> None:
    task = letters()
    assert load_task(task) is task
    assert type(load_task(letters)) is letters
    assert [type(load_task(name)).__name__ for name in ("game24", "gsm8k", "blocksworld")] == [
        "Game24",
        "GSM8K",
        "Blocksworld",
    ]


def test_a_task_in_a_file_is_solved(file: Path, scripted: Any) -> None:
    solution = solve(f"{file}:Riddle", "what?", decoder=scripted({"value of what?": "7"}), evaluator="value")
    assert (solution.value, solution.answer) == (7, "answer of what?")


@pytest.mark.parametrize("name", ["Ridle", "not_a_task", "State", ""])
def test_a_missing_class_is_rejected_with_the_classes_of_the_file(file: Path, name: str) -> None:
    message = rf"unknown task in .*my_riddles\.py '{name}'.*: choose one of Harder, Riddle$"
    with pytest.raises(OptionError, match=message):
        load_task(f"{file}:{name}")


def test_a_file_that_raises_is_named_with_its_error(file: Path) -> None:
    for text, message in (
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("def", "SyntaxError: .*"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("raise SystemExit(3)", "SystemExit: 3"),
    ):
        file.write_text(text)
        with pytest.raises(TaskError, match=rf"my_riddles\.py can't be run: {message}"):
            load_task(f"{file}:Riddle")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("absent.py:Riddle", r"absent\.py: there is no such file; give path/to/file\.py:Name"),
        ("absent.py", r"absent\.py: add a name in the file, as in absent\.py:Name"),
        ("gam24", r"unknown task 'gam24' \(did you mean game24\?\): choose one of .*game24.*; or path/to/file\.py"),
        ("", r"unknown task '': choose one of .*blocksworld"),
        ("x" * 300, r"unknown task 'x+'"),
        ("game24:Game24", r"unknown task 'game24:Game24'"),
    ],
)  # fmt: skip
def test_a_missing_task_is_rejected(spec: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        load_task(spec)


class Half:
    def evaluate(self, ctx: Any, nodes: Any) -> Any:
        return []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"search": 3}, "search=3 has no method 'start': give a search, or the name of one"),
        ({"search": BFS}, r"search=BFS is a class: give an object of it, BFS\(\.\.\.\)"),
        ({"generator": 5}, "generator=5 has no method 'propose'"),
        ({"evaluator": Likelihood}, "evaluator=Likelihood is a class"),
        ({"evaluator": Half()}, "evaluator=.*Half.* has no method 'key'"),
        ({"budget": 3}, "budget = 3: Input should be a valid dictionary or instance of Budget"),
    ],
)
def test_invalid_parts_and_budgets_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        solve("game24", "1 2 3 4", model=None, **options)


# -- parts in files ---------------------------------------------------------------------------------------------

PARTS = """
from tot import DFS, Evaluator, Generator
from tot.decoders import Completion, Usage

class Narrow(DFS):
    thoughts: int = 1

class Twins(Generator):
    async def propose(self, ctx, nodes, count):
        return [[*await ctx.ask("thought", node, 2), "mine"] for node in nodes]

class Longest(Evaluator):
    scale: float = 1.0

    async def evaluate(self, ctx, nodes):
        return [self.scale * len(node.thought.text) for node in nodes]

class Echo:
    def generate(self, requests):
        return [
            Completion(f"{one.prompt[-1].content} {i}", (7,), 0.0, "eos", Usage(new_tokens=3))
            for one in requests for i in range(one.sampling.n)
        ]
"""


@pytest.fixture
def parts(tmp_path: Path) -> str:
    (tmp_path / "my_parts.py").write_text(PARTS)
    return str(tmp_path / "my_parts.py")


def test_searches_generators_evaluators_and_decoders_may_be_in_a_file(letters: Any, parts: str) -> None:
    given = {
        "search": f"{parts}:Narrow:depth=2",
        "generator": f"{parts}:Twins",
        "evaluator": f"{parts}:Longest:scale=2",
    }
    chosen = parts_of(letters(), **given)
    assert (type(chosen["search"]).__name__, chosen["search"].depth, chosen["evaluator"].scale) == ("Narrow", 2, 2.0)
    solution = solve(letters(), "q", decoder=f"{parts}:Echo", **{**given, "search": BFS(thoughts=2, depth=2)})
    grown = [node for node in solution.tree if node.thought]
    assert [(node.thought.text, node.value, node.usage.new_tokens) for node in grown if node.thought] == [
        ("grow 0", 12.0, 3),
        ("grow 1", 12.0, 3),
        ("mine", 8.0, 0),
    ]
    assert grown[0].thought is not None
    assert grown[0].thought.drawn["thought"].tokens == (7,)
    assert solution.tree.calls[grown[0].id][0].template == "thought"


def test_a_decoder_in_a_file_is_created_once(letters: Any, parts: str, tmp_path: Path) -> None:
    counted = Path(parts).read_text()
    counted = counted.replace("class Echo:", f"open({str(tmp_path / 'runs')!r}, 'a').write('run ')\nclass Echo:")
    counted = counted.replace(
        "    def generate(",
        f"    def __init__(self):\n        open({str(tmp_path / 'made')!r}, 'a').write('made ')\n\n    def generate(",
    )
    Path(parts).write_text(counted)
    seen: list[Any] = []
    options = {"decoder": f"{parts}:Echo", "search": BFS(thoughts=2, depth=2), "evaluator": "random"}
    search = run_search(
        letters(), "q", SearchConfig.of(None, options), watch=lambda run: seen.append(run.backend._decoders)
    )
    asyncio.run(search)
    assert [(tmp_path / name).read_text() for name in ("runs", "made")] == ["run ", "made "]
    assert len({id(one) for one in seen[0].values()}) == 1
    assert seen[0].keys() == {"generate", "evaluate", "answer"}
    config = SearchConfig.of(None, {"decoder": f"generate={parts}:Echo,evaluate={parts}:Echo"})
    assert config.model.decoders["generate"] is config.model.decoders["evaluate"]
    assert "decoders" not in vars(pickle.loads(pickle.dumps(config)).model)
    assert SearchConfig.of(config, {"seed": 3}).model is config.model


def test_a_temperature_that_was_given_is_in_the_text_even_if_it_is_the_default() -> None:
    assert spec_of(Sample(temperature=0.7)) == "sample:temperature=0.7"
    assert spec_of(Sample()) == "sample"


class Unnamed(BFS):
    """A search without a name."""


COMBINED = Combine(evaluators=(Prior(),), weights=(1.0,))


@pytest.mark.parametrize("part", [Unnamed(thoughts=2), COMBINED, MCTS(fast=COMBINED)])
def test_an_object_that_no_text_can_make_has_no_text(part: BFS | Combine | MCTS) -> None:
    assert spec_of(part) is None
