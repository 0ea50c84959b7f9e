"""Things by name: tasks, searches, thought generators and state evaluators, as the command line and tasks spell them.

A name may carry options: "mcts:iterations=20,exploration=2".
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from tot.decoders.errors import OptionError, TaskError, unknown, validated
from tot.evaluators.classify import Classify
from tot.evaluators.combine import Combine
from tot.evaluators.heuristic import Confidence, Heuristic, Prior, Random
from tot.evaluators.likelihood import Likelihood
from tot.evaluators.rationale import Explain
from tot.evaluators.reward_model import RewardModel
from tot.evaluators.value import Value
from tot.evaluators.vote import Vote
from tot.generators.enumerate import Enumerate
from tot.generators.propose import Propose
from tot.generators.sample import Sample
from tot.search import BFS, DFS, MCTS, BestFirst, BestOfN, ChainOfThought, SelfConsistency
from tot.task import Task

SEARCHES: dict[str, type[BaseModel]] = {
    "bfs": BFS,
    "dfs": DFS,
    "best-first": BestFirst,
    "mcts": MCTS,
    "cot": ChainOfThought,
    "self-consistency": SelfConsistency,
    "best-of-n": BestOfN,
}
GENERATORS: dict[str, type[BaseModel]] = {"sample": Sample, "propose": Propose, "enumerate": Enumerate}
EVALUATORS: dict[str, type[BaseModel]] = {
    "likelihood": Likelihood,
    "value": Value,
    "classify": Classify,
    "explain": Explain,
    "vote": Vote,
    "heuristic": Heuristic,
    "prior": Prior,
    "confidence": Confidence,
    "random": Random,
    "reward-model": RewardModel,
}

_T = TypeVar("_T")


def named(kind: str, spec: str | _T, known: Mapping[str, type[BaseModel] | BaseModel], **options: Any) -> Any:
    """The object that a text such as "mcts:iterations=20" names; an object is itself.

    A known name stands for a class, or for an object, which options change. `options` are set besides those in the
    text, where they are not None. Raises OptionError for a name or an option that is not known.
    """
    wanted = {option: value for option, value in options.items() if value is not None}
    if isinstance(spec, BaseModel) and wanted:
        text = ",".join(f"{option}={value}" for option, value in wanted.items())
        raise OptionError(
            f"{text} can't be set here: the {kind} comes ready made; name one, such as {next(iter(known))}"
        )
    if not isinstance(spec, str):
        return _with_fast(_checked(kind, spec))
    name, _, text = spec.partition(":")
    found = known.get(name.strip())
    if found is None:
        raise OptionError(unknown(kind, name.strip(), known))
    cls, given = (found, {}) if isinstance(found, type) else (type(found), dict(found))
    for pair in filter(None, text.split(",")):
        option, equals, value = (part.strip() for part in pair.partition("="))
        if not equals:
            raise OptionError(f"{kind} {spec!r}: {pair!r} is no option: write {name}:option=value,option=value")
        given[option] = None if value.lower() == "none" and option != "rollout" else value
    given |= wanted
    return _with_fast(validated(cls, given, f"{kind} {name}"))


def _checked(kind: str, part: Any) -> Any:
    """An object that has the methods of its kind. Raises OptionError for others, classes among them."""
    needed = {"search": ("start", "steps"), "generator": ("propose",), "evaluator": ("evaluate", "key")}[kind]
    if isinstance(part, type):
        raise OptionError(f"{kind}={part.__name__} is a class: give an object of it, {part.__name__}(...)")
    missing = [method for method in needed if not callable(getattr(part, method, None))]
    if missing:
        raise OptionError(f"{kind}={part!r} has no method {missing[0]!r}: give a {kind}, or the name of one")
    return part


def _with_fast(part: Any) -> Any:
    """MCTS with the evaluator that its `fast` names."""
    fast = getattr(part, "fast", None)
    if fast is not None and not isinstance(fast, str):
        _checked("evaluator", fast)
    if not isinstance(fast, str) or fast == "evaluator":
        return part
    return part.model_copy(update={"fast": named("evaluator", fast, EVALUATORS)})


def parts_of(
    task: Task,
    search: Any = None,
    generator: Any = None,
    evaluator: Any = None,
    *,
    search_options: Mapping[str, Any] | None = None,
    generator_options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The search, generator and evaluator that texts, objects or None (the task's own) stand for.

    The search "rap" sets all three. The options are set besides those in the texts, where they are not None. Raises
    OptionError for what is not known.
    """
    search = search or task.search
    recipe: dict[str, Any] = {"search": MCTS, "generator": task.generator, "evaluator": task.evaluator}
    if isinstance(search, str) and search.partition(":")[0].strip() == "rap":
        recipe = rap(task)
    return {
        "search": named("search", search, {**SEARCHES, "rap": recipe["search"]}, **search_options or {}),
        "generator": named("generator", generator or recipe["generator"], GENERATORS, **generator_options or {}),
        "evaluator": named("evaluator", evaluator or recipe["evaluator"], EVALUATORS),
    }


def rap(task: Task | type[Task] | str) -> dict[str, Any]:
    """RAP (Hao et al., 2023) for a task: options of `solve`, `solve(task, question, **rap(task))`.

    MCTS with greedy rollouts, where fast rewards stand for Q until a child is visited. With a world (Blocksworld): the
    action's log-likelihood and the log of the model's own judgement of it, half each, plus the task's goal reward. By
    sub-questions (GSM8K): the likelihood of Yes when asked whether the step is useful, and the share of eight sampled
    sub-answers that agree, as r_a^0.5 * r_b^0.5. Both ask the task's template `self_eval`.
    """
    task = load_task(task)
    labels = task.labels or {"Yes": 1.0, "No": 0.0}
    judged = Likelihood(template="self_eval", labels=labels)
    if "actions" in task.defines:
        generator = named("generator", task.generator, GENERATORS)
        return {
            "search": MCTS(thoughts=None, rollout="greedy", cum_reward="sum", calc_q="mean"),
            "generator": generator if isinstance(generator, Enumerate) else Enumerate(),
            "evaluator": Combine(evaluators=(Prior(), judged), weights=(0.5, 0.5), rule="log"),
        }
    return {
        "search": MCTS(thoughts=4, rollout="greedy", cum_reward="mean", calc_q="max", fast=judged),
        "generator": Sample(samples=8),
        "evaluator": Combine(evaluators=(judged, Confidence()), weights=(0.5, 0.5), rule="product"),
    }


def load_task(task: Task | type[Task] | str) -> Task:
    """A task object from an object, a class, the name of an installed one, or "path/to/file.py:ClassName".

    Raises OptionError naming the choices, and TaskError for a file that can't be run.
    """
    if isinstance(task, Task):
        return task
    if isinstance(task, type) and issubclass(task, Task):
        return task()
    path, colon, name = str(task).rpartition(":")
    if colon and path.endswith(".py"):
        return _from_file(Path(path), name)
    if str(task).endswith(".py"):
        raise OptionError(f"{task}: name the class in it, as in {task}:MyTask")
    installed = {entry.name: entry for entry in entry_points(group="tot.tasks")}
    if task not in installed:
        raise OptionError(unknown("task", str(task), installed) + "; or path/to/file.py:ClassName")
    cls: type[Task] = installed[task].load()
    return cls()


def _from_file(path: Path, name: str) -> Task:
    """The task class `name` in a Python file, which is run: it is the user's own program."""
    if not path.is_file():
        raise OptionError(f"{path}: there is no such file; give path/to/file.py:ClassName")
    spec = importlib.util.spec_from_file_location(f"tot_task_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where `inspect` looks for the file that a class is from
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever a user's file raises
        raise TaskError(f"{path} can't be run: {type(error).__name__}: {error}") from error
    tasks = {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, Task) and value is not Task
    }
    if name not in tasks:
        raise OptionError(unknown(f"task in {path}", name, tasks))
    return tasks[name]()
