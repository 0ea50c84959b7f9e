"""Reasoning with trees of thoughts on language models that you run yourself.

    from tot import solve, BFS
    solution = solve("gsm8k", "Natalia sold clips to 48 …", model="smollm2-135m", search=BFS(thoughts=3, breadth=3))

Names are imported when first used: `import tot` is cheap, and `tot.decoders` stands without the search layer.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tot.checkpoint import Checkpoint
    from tot.config import SearchConfig
    from tot.context import Context
    from tot.decoders.budget import Budget
    from tot.decoders.decoder import load_decoder
    from tot.decoders.errors import TotError
    from tot.decoders.open_models import close_models
    from tot.evaluation.run import evaluate
    from tot.evaluators.base import Evaluator
    from tot.evaluators.combine import Combine
    from tot.evaluators.heuristic import Confidence, Heuristic, Prior, Random
    from tot.evaluators.likelihood import Explain, Likelihood
    from tot.evaluators.reward_model import RewardModel
    from tot.evaluators.value import Classify, Value
    from tot.evaluators.vote import Vote
    from tot.generators.base import Generator
    from tot.generators.enumerate import Enumerate
    from tot.generators.propose import Propose
    from tot.generators.sample import Sample
    from tot.registry import load_task, rap
    from tot.search import BFS, DFS, MCTS, BestFirst, BestOfN, ChainOfThought, Search, SelfConsistency
    from tot.search.state import SearchState
    from tot.solver import Solution, asolve, solve
    from tot.state import State, Thought
    from tot.steps import Evaluate, Evaluation, Expand, Proposal, Reply
    from tot.task import Task
    from tot.tree import Node, ThoughtTree

_HOME = {
    "context": ("Context",),
    "evaluators.base": ("Evaluator",),
    "evaluators.combine": ("Combine",),
    "evaluators.heuristic": ("Confidence", "Heuristic", "Prior", "Random"),
    "evaluators.likelihood": ("Explain", "Likelihood"),
    "evaluators.value": ("Classify", "Value"),
    "evaluators.vote": ("Vote",),
    "config": ("SearchConfig",),
    "decoders.budget": ("Budget",),
    "decoders.decoder": ("load_decoder",),
    "decoders.errors": ("TotError",),
    "decoders.open_models": ("close_models",),
    "evaluation.run": ("evaluate",),
    "registry": ("load_task", "rap"),
    "evaluators.reward_model": ("RewardModel",),
    "search": ("BFS", "DFS", "MCTS", "BestFirst", "BestOfN", "ChainOfThought", "Search", "SelfConsistency"),
    "search.state": ("SearchState",),
    "steps": ("Evaluate", "Evaluation", "Expand", "Proposal", "Reply"),
    "solver": ("Solution", "asolve", "solve"),
    "state": ("State", "Thought"),
    "task": ("Task",),
    "generators.base": ("Generator",),
    "generators.enumerate": ("Enumerate",),
    "generators.propose": ("Propose",),
    "generators.sample": ("Sample",),
    "checkpoint": ("Checkpoint",),
    "tree": ("Node", "ThoughtTree"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "BFS",
    "DFS",
    "MCTS",
    "BestFirst",
    "BestOfN",
    "Budget",
    "ChainOfThought",
    "Checkpoint",
    "Classify",
    "Combine",
    "Confidence",
    "Context",
    "Enumerate",
    "Evaluate",
    "Evaluation",
    "Evaluator",
    "Expand",
    "Explain",
    "Generator",
    "Heuristic",
    "Likelihood",
    "Node",
    "Prior",
    "Proposal",
    "Propose",
    "Random",
    "Reply",
    "RewardModel",
    "Sample",
    "Search",
    "SearchConfig",
    "SearchState",
    "SelfConsistency",
    "Solution",
    "State",
    "Task",
    "Thought",
    "ThoughtTree",
    "TotError",
    "Value",
    "Vote",
    "asolve",
    "close_models",
    "evaluate",
    "load_decoder",
    "load_task",
    "rap",
    "solve",
]


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{module}"), name)
