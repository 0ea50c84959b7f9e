"""RAP (Hao et al., 2023): MCTS with the generator and the evaluator that suit a task, by name "rap"."""

from __future__ import annotations

from typing import Any, ClassVar

from tot.evaluators.combine import Combine
from tot.evaluators.heuristic import Confidence, Prior
from tot.evaluators.likelihood import Likelihood
from tot.generators.enumerate import Enumerate
from tot.generators.sample import Sample
from tot.search.mcts import MCTS
from tot.task import Task


class RAP(MCTS):
    """MCTS with greedy rollouts, where fast rewards stand for Q until a child is visited.

    With a world (Blocksworld): the action's log-likelihood and the log of the model's own judgement of it, half each,
    plus the task's goal reward. By sub-questions (GSM8K): the likelihood of Yes when asked whether the step is useful,
    and the share of eight sampled sub-answers that agree, as r_a^0.5 * r_b^0.5. Both ask the template `self_eval`.
    """

    few_shot: ClassVar[bool] = True

    def recipe(self, task: Task, generator: Any) -> dict[str, Any]:
        labels = task.labels or {"Yes": 1.0, "No": 0.0}
        judged = Likelihood(template="self_eval", labels=labels)
        given = {name: getattr(self, name) for name in self.model_fields_set}
        if "actions" in task.defines:
            options: dict[str, Any] = {"thoughts": None, "rollout": "greedy", "cum_reward": "sum", "calc_q": "mean"}
            return {
                "search": MCTS(**{**options, **given}),
                "generator": generator if isinstance(generator, Enumerate) else Enumerate(),
                "evaluator": Combine(evaluators=(Prior(), judged), weights=(0.5, 0.5), rule="log"),
            }
        options = {"thoughts": 4, "rollout": "greedy", "cum_reward": "mean", "calc_q": "max", "fast": judged}
        return {
            "search": MCTS(**{**options, **given}),
            "generator": Sample(samples=8),
            "evaluator": Combine(evaluators=(judged, Confidence()), weights=(0.5, 0.5), rule="product"),
        }
