"""Answers: the answers of complete states, from the states or from the model, and their vote."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from tot.decoders.errors import TaskError
from tot.decoders.request import Message
from tot.llm.backend import Backend
from tot.llm.context import Context
from tot.llm.replies import Reply
from tot.search.auto import expected_gain, samples_of
from tot.search.base import SearchState, by_value
from tot.search.votes import Ballot
from tot.task.task import Task, answer_text
from tot.task.world import HasAnswer, HasMeasured
from tot.tree.tree import Node


@dataclass(frozen=True, slots=True)
class Leader:
    """The answer that a search would give now."""

    answer: str
    certainty: float | None
    """Probability that it is right, as in the solution; None if it is not known."""
    share: float | None
    """Its share of the votes; None without a vote."""


class Answers:
    """The answers of one search."""

    def __init__(self, search: SearchState, context: Context) -> None:
        """`context` asks the model for answers."""
        self.search = search
        self.votes: tuple[int, int] | None = None
        """Votes for the answer, and all votes."""
        self.ballots: list[Ballot] = []
        """The vote of each complete solution with an answer, in order; known after `elect`."""
        self._elected: Hashable = None
        self.truncated = False
        """Whether the token limit ended the text of an answer."""
        self._context = context
        self._task = search.task

    @property
    def asks(self) -> bool:
        """Whether the model is asked for answers. States that contain their answers need no answer template."""
        return not isinstance(self._task, HasAnswer) or "answer" in self._task.prompts

    @property
    def candidates(self) -> list[Node]:
        """The nodes whose answers vote, or the one to answer from."""
        search = self.search
        if search.options.aggregate == "best":
            return [search.best]
        return search.complete() if search.solved is None else [search.solved]

    def choose_measured(self) -> None:
        """Without a vote, answer from the state with the highest measured value, if thoughts are measured."""
        search = self.search
        if not isinstance(self._task, HasMeasured) or search.options.aggregate != "best" or search.solved is not None:
            return
        values = {node.id: search.checked.measured(search.tree.state(node)) for node in search.tree}
        best = max((value for value in values.values() if value is not None), default=None)
        if best is not None and values[search.best.id] != best:
            search.best = next(node for node in search.tree if values[node.id] == best)
            if search.best.value is None:  # the root, which no search evaluates
                search.best.value = best

    def missing(self, nodes: Sequence[Node], answers: Sequence[Any | None], stopped: bool) -> list[int]:
        """Return the indices of the nodes whose answers the model must be asked for."""
        if not self.asks:
            return []
        whole = self.search.checked.is_whole
        return [
            i
            for i, (node, answer) in enumerate(zip(nodes, answers, strict=True))
            if answer is None and not whole(node.thought) and self._can_ask(node, stopped)
        ]

    def _can_ask(self, node: Node, stopped: bool) -> bool:
        """Return whether the model can be asked for the answer at a node.

        It can't at the root if the search was stopped, or if the search has no thought and the template needs one.
        """
        if node.parent is not None:
            return True
        if self.search.refused:
            return False
        if stopped or not (node.parse_failures or self.search.stopped):
            return not stopped
        try:
            self._context.prompt("answer", self._context.state(node))
        except TaskError:
            return False
        return True

    async def ask(self, nodes: Sequence[Node]) -> list[Reply]:
        """Ask the model for the answers at some nodes."""
        return await self._context.each(nodes, self._ask)

    async def _ask(self, node: Node) -> Reply:
        if choices := self.search.checked.choices(self._context.state(node)):
            return await self._context.score("answer", node, choices, close=False)
        return (await self._context.ask("answer", node, temperature=0.0))[0]

    def parse(self, reply: Reply) -> Any | None:
        """Return the answer in a reply of the model, or None."""
        if reply.cut:
            return None
        checked = self.search.checked
        if reply.request.choices:
            return checked.read("answer", reply.request.choices[reply.logprobs.index(max(reply.logprobs))].strip())
        self.truncated |= reply.truncated
        # The reply continues the prefix's last line, which may announce the answer ("The answer is").
        last = reply.request.prompt[-1]
        prefix = ""
        if isinstance(last, Message) and last.role == "assistant" and checked.schema("answer") is None:
            prefix = last.content.rpartition("\n")[2] + " "
        return checked.answer_in(prefix + reply.completion.text, reply.truncated)

    def elect(self, nodes: Sequence[Node], answers: Sequence[Any | None]) -> Any | None:
        """Return the answer with the most votes; None without any. `search.best` becomes the best state with it.

        Without a vote, return the only answer.
        """
        search = self.search
        answered = [(node, answer) for node, answer in zip(nodes, answers, strict=True) if answer is not None]
        if not answered:
            return None
        if search.options.aggregate == "best":
            ((node, answer),) = answered
            node.answer = answer_text(answer)
            return answer
        self.ballots, winners = search.options.elect(search, answered)
        self._elected = self.ballots[winners[0]].answer
        winner = [answered[i] for i in winners]
        search.best = by_value([node for node, _ in winner])[0]
        total = math.fsum(ballot.weight for ballot in self.ballots)
        for (node, answer), ballot in zip(answered, self.ballots, strict=True):
            node.answer = answer_text(answer)
            if total > 0:
                node.share = math.fsum(one.weight for one in self.ballots if one.answer == ballot.answer) / total
        if len(nodes) > 1:
            self.votes = len(winner), len(answered)
        return next(answer for node, answer in winner if node is search.best)

    def leading(self) -> Leader | None:
        """Return the answer that the search would give without further calls; None without one."""
        search = self.search
        answered = [(node, answer) for node in self.candidates if (answer := search.answer_at(node)) is not None]
        if not answered:
            return None
        if search.solved is not None or search.options.aggregate == "best":
            ((node, answer),) = answered
            verified = node is search.solved and self._task.verdict == Task.verdict
            return Leader(answer_text(answer), 1.0 if verified else None, None)
        ballots, winners = search.options.elect(search, answered)
        total = math.fsum(ballot.weight for ballot in ballots)
        certainty = self._probability(ballots, ballots[winners[0]])
        share = math.fsum(ballots[i].weight for i in winners) / total if total > 0 and len(answered) > 1 else None
        return Leader(answer_text(answered[winners[0]][1]), certainty, share)

    def of_best(self) -> Any | None:
        """Return the answer that the best state contains, without asking the model."""
        search, best = self.search, self.search.best
        answer = search.answer_at(best)
        executed = best.thought is None or best.thought.tool_calls or search.checked.is_executed(best.thought)
        if answer is None and best.thought is not None and self.asks and not executed:
            truncated = self.truncated or best.thought.truncated
            return search.checked.answer_in(search.tree.state(best).text, truncated)
        return answer

    def certainty(self, solved: bool) -> float | None:
        """Return the probability that the answer is right; None without a vote or a calibration."""
        if solved and self._task.verdict == Task.verdict:  # another verdict is about a part, such as the examples
            return 1.0
        leader = next((ballot for ballot in self.ballots if ballot.answer == self._elected), None)
        return None if leader is None else self._probability(self.ballots, leader)

    def gain(self, certainty: float | None) -> float | None:
        """Return how much one more sample is expected to raise a certainty; None if it is not calibrated."""
        calibrated = self.search.voting in self.search.resources.calibrations and self.search.options.whole
        return expected_gain(self.search, certainty) if calibrated and certainty is not None else None

    def _probability(self, ballots: Sequence[Ballot], leader: Ballot) -> float | None:
        """Return the probability that the leader of a vote is right; None if its model has no calibration.

        None also if a part of the task, such as its examples, verified the only answer.
        """
        search = self.search
        found = search.resources.calibrations.get(search.voting)
        if found is None or not search.options.whole or search.solved is not None:
            return None
        return found.probabilities(ballots, samples_of(search))[leader.answer]

    def truncation(self, max_tokens: int | None, backend: Backend) -> str | None:
        """Return advice if thinking, a token limit or rejected texts left a solution without an answer, else None."""
        if lost := backend.lost:
            end = "the text was truncated" if lost.keys() & {"length", "repetition"} else "the model ended its text"
            return (
                f"{end} in its thinking, before an answer ({lost.total()} of {backend.calls} texts): give it "
                "another budget (--thinking), or turn its thinking off (--thinking off)"
            )
        if refused := self.search.refused:
            return f"{refused} (rejected texts: {sum(node.parse_failures for node in self.search.tree)})"
        thoughts = [node.thought for node in self.search.tree if node.thought is not None]
        if not self.truncated and not any(thought.ended and thought.truncated for thought in thoughts):
            return None
        if max_tokens is not None:
            return f"the text was truncated at max_tokens={max_tokens}, before its answer: raise it (--max-tokens)"
        return "the text was truncated at the task's token limit, before its answer: raise max_tokens in Task.sampling"
