"""Searches as models: each request is one search with its own tree, budget and seed, on the decoder that all share.

`reasoning_effort` limits the whole search, `max_completion_tokens` its new tokens, `max_tokens` each text without its
thinking, and `thinking` and `thinking_budget` the thinking of each text. All limits that are given hold: these, the
search's own, and the server's.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tot.api import run_search
from tot.config import SearchConfig
from tot.decoders.budget import Budget
from tot.decoders.constraint import Constraint
from tot.decoders.errors import TaskError
from tot.decoders.request import Message, ToolCall, before_stop
from tot.decoders.serving.completions import check_tokens, thinking_of
from tot.decoders.serving.errors import invalid, unsupported
from tot.decoders.serving.gate import Gate
from tot.decoders.serving.limits import Limits
from tot.decoders.serving.messages_body import MessagesBody
from tot.decoders.serving.metrics import ServerMetrics
from tot.decoders.serving.protocol import ChatBody, Conversation, DecodingFields, TextBody
from tot.decoders.serving.responses_body import ResponsesBody
from tot.decoders.serving.service import AnyBody, Choice, Emit, Piece, Result
from tot.llm.decoders import FILTERS
from tot.running import in_own_thread
from tot.search.base import SearchState
from tot.serving.live import LiveSearches
from tot.serving.searches import ServedSearch
from tot.solution import Solution
from tot.task.checked import CheckedTask
from tot.task.schemas import Schema
from tot.task.task import Task, answer_text
from tot.task.world import HasAct, HasActions, HasAnswer, HasElection
from tot.tree.thought import Thought
from tot.tree.tree import Node

_EFFORTS: Mapping[str | None, Budget] = {
    "none": Budget(tokens=1_000, seconds=10),
    "minimal": Budget(tokens=1_000, seconds=10),
    "low": Budget(tokens=4_000, seconds=30),
    "medium": Budget(tokens=16_000, seconds=120),
    "high": Budget(tokens=64_000, seconds=480),
    "xhigh": Budget(tokens=256_000),
}


class SearchModels:
    """Serves searches as `name:search`, and a single sample as `name` where no decoder does."""

    failed = None

    def __init__(
        self, name: str, searches: Mapping[str, ServedSearch], limits: Limits, runs: LiveSearches | None = None
    ) -> None:
        """`runs` gets the searches, for the live page."""
        self.gate = Gate(limits.max_searches, limits)
        self.name = name
        self.runs = runs
        self._searches = {f"{name}:{search}".removesuffix(":"): one for search, one in searches.items()}
        self.models: Mapping[str, Mapping[str, Any]] = {model: {} for model in (name, *self._searches)}
        self._limits = limits

    def watch(self, metrics: ServerMetrics) -> None:
        metrics.watch_gate("searches", self.gate)
        self.ended = metrics.counter("tot_searches", "Searches that have ended.", ("model", "outcome"))

    def work(self, body: AnyBody) -> ServedRequest:
        """Prepare a request. Raises ServingError or TotError if it is invalid."""
        if isinstance(body, TextBody):
            raise invalid(f"{body.model} is a search: use /v1/chat/completions or /v1/responses", "model")
        for field, about in DecodingFields.model_fields.items():
            if getattr(body, field, about.default) != about.default:
                raise unsupported(field)
        if body.alternatives is not None:
            raise unsupported("logprobs")
        check_tokens(body, self._limits, "max_tokens")
        history, question, turns = _conversation(body)
        if body.form is not None:
            _check_schemas({body.form_field: body.form})
        served_task, served_config = self._searches[body.model]
        tools = tuple(body.tools) if body.tool_choice != "none" else ()
        fields = {"tools": tools, body.form_field: body.form, body.place: turns}
        asked = [name for name, given in fields.items() if given]
        if asked and not _answers_freely(served_task):
            raise unsupported(asked[0])
        begun = [Thought.turn(served_task.thought[-1], *turn) for turn in turns]
        task = served_task.with_prompts(history=history, turns=begun, form=body.form)
        try:
            CheckedTask(task).start(question)
        except TaskError as error:
            raise invalid(str(error), "messages") from None
        most = (body.max_tokens, body.most_tokens, served_config.max_tokens, self._limits.max_tokens_limit)
        options = body.model_dump(include={"temperature", *FILTERS} & body.model_fields_set)
        options["max_tokens"] = min(tokens for tokens in most if tokens is not None)
        options["seed"] = secrets.randbits(53) if body.seed is None else body.seed
        if body.x_tot.until is not None:
            options["until"] = body.x_tot.until
        if body.model_fields_set & {"thinking", "thinking_budget"}:
            options["thinking"] = thinking_of(body, self._limits, counted=False)
        if body.chat_template_kwargs:
            options["template_options"] = body.chat_template_kwargs
        if asked:
            options["generator"] = "turns"
        if tools:
            options["tools"] = tools
            options["generator"] += f":tool_choice={body.tool_choice},parallel_tool_calls={body.parallel_tool_calls}"
        config = SearchConfig.of(served_config, options)
        config.parts(task)  # raises OptionError, for example if `until` is given and the search is not auto
        return ServedRequest(self, body, task, question, config, {"seed": options["seed"]})


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """The search of one request."""

    source: SearchModels
    body: ChatBody | ResponsesBody | MessagesBody
    task: Task
    question: str
    config: SearchConfig
    about: Mapping[str, Any]

    def count(self) -> int:
        raise invalid(f"{self.body.model} is a search, whose prompts depend on its task: name a decoder", "model")

    async def run(self, emit: Emit, seconds: float) -> Result:
        """Search. Thoughts are thinking, and the answer is one piece."""
        source, model, outcome, thoughts = self.source, self.body.model, "failed", list[str]()
        schemas = {f"tools.{i}": Constraint(json_schema=tool.parameters) for i, tool in enumerate(self.body.tools)}
        await asyncio.to_thread(_check_schemas, schemas)  # some milliseconds each

        def show(search: SearchState, nodes: list[Node]) -> None:
            for node in nodes:
                thoughts.append(_as_text(search, node))
                emit(Piece(0, thoughts[-1], thinking=True))

        try:
            solution = await self._solved(seconds, None if model == source.name else {"on_expand": show})
            outcome = "unanswered" if solution.answer is None else "answered"
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        finally:
            source.ended.labels(model, outcome).inc()
        reasoning_tokens = solution.usage.new_tokens  # the answer is one of the thoughts
        if model == source.name:
            calls = (call for calls in solution.tree.calls.values() for call in calls)
            thinking = [part for call in calls for part in call.parts if part.kind == "thinking"]
            thoughts, reasoning_tokens = [part.text for part in thinking], sum(part.tokens for part in thinking)
            for text in thoughts:
                emit(Piece(0, text, thinking=True))
        choice = self._choice(solution, "".join(thoughts))
        if choice.text or not choice.calls:
            emit(Piece(0, choice.text))
        for call in choice.calls:
            emit(Piece(0, "", call=call))
            emit(Piece(0, call.arguments, call=call))
        emit(choice)
        return Result([choice], solution.usage, reasoning_tokens)

    async def _solved(self, seconds: float, hooks: Any) -> Solution:
        """Search in a thread: tokenizing, grading and voting must not delay the replies to other clients."""
        body = self.body
        own = Budget(tokens=body.most_tokens, seconds=body.x_tot.seconds)
        given = (own, Budget(seconds=seconds), _EFFORTS.get(body.effort), self.config.budget)
        limits = {name: [getattr(one, name) for one in given if one is not None] for name in Budget.model_fields}
        least = {name: min((one for one in all_ if one is not None), default=None) for name, all_ in limits.items()}
        config = self.config.model_copy(update={"budget": Budget(**least)})
        search = partial(run_search, self.task, self.question, config, hooks=hooks)
        if self.source.runs is None:
            return await in_own_thread(search())
        with self.source.runs.run(body.model, self.question) as run:
            run.solution = await in_own_thread(search(watch=run.watch))
            return run.solution

    def _choice(self, solution: Solution, thoughts: str) -> Choice:
        """Return the answer or the text so far, up to the first stop string.

        It is empty if the limit on all new tokens cut it and other samples: accepted drafts decide which one got how
        far.
        """
        cut, most, stopped = _truncated(solution), self.body.most_tokens, solution.stopped or ""
        *_, last = (node.thought for node in solution.tree if node.chosen)
        calls: Sequence[ToolCall] = ()
        if cut and most is not None and solution.usage.new_tokens > most:
            text = ""
        elif solution.answer is not None and last is not None and last.messages:  # JSON as the model wrote it
            text = last.messages[0].content
            calls = [call.model_copy(update={"id": f"call_{secrets.token_hex(12)}"}) for call in last.open_calls]
        elif solution.answer is None and cut and not self.config.tools and not stopped.startswith("budget"):
            made = (call for calls in solution.tree.calls.values() for call in calls if call.purpose != "evaluate")
            text = max((call.output.strip() for call in made), key=len, default="")
        else:
            text = "" if solution.answer is None else answer_text(solution.answer)
        about = {name: getattr(solution, name) for name in ("certainty", "solved", "votes", "value", "stopped")}
        about |= {"thoughts": len(solution.tree) - 1, "seconds": round(solution.usage.seconds, 3)}
        about["chosen"] = _chosen(solution, self.task)
        incomplete = cut and (solution.answer is None or stopped.startswith("budget"))  # not by `max_tokens` of a text
        text = before_stop(text, self.body.stop)
        return Choice(0, text, thoughts, cut, incomplete, calls=calls, about=about)


def _conversation(body: Conversation) -> tuple[list[Message], str, list[list[Message]]]:
    """Return the messages before the last one of the user, its text, and the turns of the assistant after it."""
    messages = [message.model_copy(update={"reasoning_content": ""}) for message in body.history]
    number = max((i for i, message in enumerate(messages) if message.role == "user"), default=0)
    turns: list[list[Message]] = []
    for message in messages[number + 1 :]:
        if message.role == "tool" and turns:
            turns[-1].append(message)
        else:
            turns.append([message])
    first, last = messages[number].role, messages[-1].role
    if first != "user" or last not in ("user", "tool") or any(turn[0].role != "assistant" for turn in turns):
        reason = f"the last message has the role {last}, and a search answers a user or results of calls"
        raise invalid(f"{reason}: end with the user's message, or with calls and their results after it", body.place)
    return messages[:number], messages[number].content, turns


def _check_schemas(schemas: Mapping[str, Constraint]) -> None:
    """Raise ServingError, which names the field, for an invalid schema."""
    for field, constraint in schemas.items():
        try:
            Schema(constraint)
        except ValueError as error:
            raise invalid(str(error), field) from None


def _answers_freely(task: Task) -> bool:
    """Return whether any text can be an answer to the task, and also JSON and calls of functions."""
    acts = isinstance(task, HasAct | HasActions | HasAnswer)
    return not acts and len(task.thought) == 1 and type(task).parse_answer is Task.parse_answer


def _truncated(solution: Solution) -> bool:
    """Return whether a limit ended the search before its answer, or the text that is the answer."""
    if solution.answer is None:
        return (solution.stopped or "").startswith(("budget", "the text was truncated"))
    *_, last = (node for node in solution.tree if node.chosen)
    text = solution.tree.state(last).message.strip()
    return last.thought is not None and last.thought.truncated and text == answer_text(solution.answer).strip()


def _chosen(solution: Solution, task: Task) -> str | None:
    """Return how the answer was chosen; None without an answer."""
    if solution.answer is None or solution.solved:
        return solution.verdict if solution.solved else None
    if solution.votes is None:
        return "value" if len(solution.tree.leaves()) > 1 else "only sample"
    alone = solution.votes[0] == 1 and isinstance(task, HasElection) and isinstance(solution.answer, str)
    return "similarity" if alone else "votes"


def _as_text(search: SearchState, node: Node) -> str:
    """Return a thought with its place in the tree, such as "[1.2]": the second thought after the first."""
    place = ".".join(str(step.index + 1) for step in search.tree.path(node)[1:])
    thought = node.thought
    text = "" if thought is None else thought.text.strip()
    if thought is not None and thought.observation is not None and thought.observation.text.strip() not in text:
        text += f"\n→ {thought.observation.text.strip()}"
    return f"[{place}] {text}\n\n"
