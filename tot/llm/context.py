"""Context: the interface of thought generators and state evaluators to the model.

It renders templates, derives the seed of every call from its content, and caches evaluations of equal states.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import re
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, TypeVar

from pydantic import JsonValue

from tot.decoders.constraint import Constraint
from tot.decoders.request import Completion, Message, Purpose, Request, Sampling, ThinkingOptions
from tot.llm.backend import Backend
from tot.llm.replies import Evaluation, Reply, is_cut
from tot.task.checked import CheckedTask
from tot.tree.thought import State, Thought
from tot.tree.tree import Node, ThoughtTree

_T = TypeVar("_T")
_ANSWER_TOKENS = 32
"""Maximum length of the answer after a trigger, in tokens."""
_AUTO = ThinkingOptions()
_MESSAGE_TOKENS = 512
"""Default maximum length of a message that is written in pieces, in tokens."""


class Context:
    """The model and the tree of a search, for one purpose: "generate", "evaluate", "answer" or "escalate"."""

    def __init__(
        self,
        task: CheckedTask,
        tree: ThoughtTree,
        backend: Backend,
        *,
        seed: int = 0,
        max_tokens: int | None = None,
        thinking: ThinkingOptions = _AUTO,
        template_options: Mapping[str, JsonValue] | None = None,
    ) -> None:
        self.task = task
        """The task. Its methods raise TaskError if they fail."""
        self.tree = tree
        self.purpose: Purpose = "generate"
        self.turn = 0
        """How often the nodes have been expanded before: each turn has its own seeds."""
        self.filters = dict(backend.filters.get("generate", {}))
        """Sampling filters (top_k, top_p, min_p), unless the task overrides them for a template."""
        self._backend = backend
        self._seed = seed
        self._question = self.state(tree.root).question
        self._max_tokens = max_tokens
        self._thinking = thinking
        self._template_options = dict(template_options or {})
        self.evaluations: dict[Hashable, Evaluation] = {}
        self.evaluating: dict[Hashable, asyncio.Future[None]] = {}
        """The end of each running evaluation."""

    def to(self, purpose: Purpose, turn: int | None = None) -> Context:
        """Return this context for another purpose, and another turn of expanding the same nodes."""
        other = copy(self)
        other.turn = self.turn if turn is None else turn
        if purpose != self.purpose:
            other.purpose = purpose
            other.filters = dict(self._backend.filters.get(purpose, self.filters))
        return other

    def state(self, node: Node) -> State:
        return self.tree.state(node)

    def actions(self, node: Node) -> list[str]:
        """Return the task's legal actions at a node."""
        return list(self.task.actions(self.state(node)))

    def heuristic(self, node: Node) -> float:
        """Return the task's estimate of the remaining cost."""
        return self.task.heuristic(self.state(node))

    def measured(self, node: Node) -> float | None:
        """Return the value that executing a node's thought has measured."""
        return self.task.measured(self.state(node))

    def answer_in(self, text: str, truncated: bool = False, template: str = "answer") -> Any | None:
        """Return the answer in a model's text for a template, or None."""
        return self.task.answer_in(text, truncated, template)

    def random(self, *about: object) -> random.Random:
        """Return a random generator seeded only by the run's seed, the question and `about`."""
        return random.Random(derive(self._seed, self.state(self.tree.root).question, *about))

    async def ask(
        self,
        template: str,
        node: Node,
        n: int = 1,
        *,
        temperature: float = 0.7,
        max_tokens: int | None = None,
        call: int = 0,
        begun: Thought | None = None,
        until: Sequence[str] = (),
        about: str = "",
        legal: Sequence[str] = (),
        tools: Mapping[str, Any] | None = None,
        **variables: Any,
    ) -> list[Reply]:
        """Return n samples of `template`, rendered for a node. Evaluators' templates see the last thought's parts.

        If the task has a schema for the template, only texts that meet it are sampled, after the template's trigger.

        Requests made concurrently are sent in one batch: see `each`.

        Args:
            template: Name of the template.
            node: The node to render the template for.
            n: Number of samples.
            temperature: Used unless the task's `sampling` sets it.
            max_tokens: Used unless the task's `sampling` sets it.
            call: Number that distinguishes calls with the same template about one node. Each has its own seed.
            begun: A thought whose first templates have been completed.
            until: Continue the thoughts so far as one message, up to the first of these strings or `max_tokens`.
                Following the first children gives the message that would be decoded without cuts.
            about: Text to append to the user's message.
            legal: The only texts to sample, in place of the schema's.
            tools: Fields of the request with the functions that the model may call, which are in `Reply.turn`.
            variables: Other variables of the template.
        """
        state, task = self.state(node), self.task
        prompt = with_text(self.prompt(template, state, begun, **variables), about)
        thoughts = (*state.thoughts, *filter(None, [begun]))
        seed = self._derive_seed(template, node, prompt, call, continues=bool(until))
        constraint = None if until else self._constraint(template, prompt, legal)
        if tools and constraint is not None and constraint.json_schema is None:
            constraint = None  # only JSON can be the form of texts beside calls; other forms are checked later
        sampling = self._sampling(template, temperature, seed, n, max_tokens if constraint is None else None)
        if until:
            room = max(self.room(template, thoughts), 1)
            piece = {"max_tokens": min(room, max_tokens or room), "stop": (*sampling.stop, *until), "keep_stop": True}
            sampling = sampling.model_copy(update={**piece, "drawn": sampled_tokens(thoughts)})
        steps: tuple[str, ...] = ()
        trigger = None
        if constraint is not None and not tools:
            trigger = task.triggers.get(template)
        if self.purpose in ("generate", "escalate"):
            steps = tuple(task.steps(template, state))
            # Chat models announce their answers themselves, so only a decoder that cuts rationales needs the trigger.
            cut = task.prompts.kind == "papers" or self._backend.cuts_rationales(self.purpose)
            if cut and not tools:
                trigger = task.triggers.get(template)
        request = Request(
            prompt=prompt,
            sampling=sampling,
            purpose=self.purpose,
            steps=steps,
            template_options=self._template_options,
            constraint=constraint,
            **(tools or {}),
        )
        if trigger is not None:  # the text before the trigger is a rationale
            sampling = sampling.model_copy(update={"stop": (*sampling.stop, trigger)})
            room = sampling.max_tokens if constraint is not None else min(_ANSWER_TOKENS, sampling.max_tokens)
            changes = {"sampling": sampling, "answer_trigger": trigger, "answer_tokens": room}
            request = request.model_copy(update=changes)
        read = self._backend.call_reader(self.purpose) if tools else lambda completion: (completion.text, ())
        completions = await self._backend.complete(request)
        unread = [self._unread(template, one) for one in completions]
        if any(unread):
            whole = await self._backend.complete(request.model_copy(update={"whole_rationale": True}))
            completions = [
                replace(new, usage=old.usage + new.usage) for old, new in zip(completions, whole, strict=True)
            ]
        return [
            Reply(template, request, completion, self.decoder, int(failed), read(completion))
            for completion, failed in zip(completions, unread, strict=True)
        ]

    async def score(
        self,
        template: str,
        node: Node,
        labels: Sequence[str],
        *,
        end: str = "",
        close: bool = True,
        trigger: str | None = None,
        temperature: float = 0.0,
        max_tokens: int | None = None,
    ) -> Reply:
        """Return the log-probability of each label plus `end` after the prompt; no label is decoded.

        `close` also scores the end of the turn, because "1" is a prefix of "10". With a `trigger`, the model first
        writes an explanation; the labels follow it and the trigger.
        """
        prompt = self.prompt(template, self.state(node))
        seed = self._derive_seed(template, node, prompt)
        sampling = Sampling(seed=seed)
        if trigger is not None:
            sampling = self._sampling(template, temperature, seed, 1, max_tokens)
        request = scoring(prompt, labels, sampling, self.purpose, end=end, close=close, trigger=trigger)
        request = request.model_copy(update={"template_options": self._template_options})
        (completion,) = await self._backend.complete(request)
        return Reply(template, request, completion, self.decoder)

    def room(self, template: str, thoughts: Sequence[Thought]) -> int:
        """Return the remaining tokens of a message for `template` that begins with these thoughts.

        Thinking does not count: it has a budget of its own.
        """
        sampling = self._sampling(template, 0.0, 0, 1, _MESSAGE_TOKENS)
        begin = max((i for i, thought in enumerate(thoughts, 1) if thought.thinking), default=0)
        return sampling.max_tokens - sampled_tokens(thoughts[begin:])

    async def each(self, nodes: Sequence[_T], work: Callable[[_T], Awaitable[Any]]) -> list[Any]:
        """Run `work` for all `nodes` concurrently and return the results. Their requests are sent in one batch."""
        return list(await asyncio.gather(*map(work, nodes)))

    def prompt(
        self, template: str, state: State, begun: Thought | None = None, /, **variables: Any
    ) -> tuple[Message, ...]:
        """Render a template for a state. Texts that the model wrote keep the tokens that it sampled.

        Turns of the assistant are messages of their own, after the rendered ones.
        """
        if self.purpose == "evaluate":
            parts = state.thoughts[-1].outputs if state.thoughts else {}
            return self.task.prompt(template, state, **{**parts, **variables})
        begun = begun and self.task.typed(begun)
        turns = [message for thought in state.thoughts for message in thought.messages]
        pieces = tuple(thought for thought in state.thoughts if not thought.messages)
        state = state.model_copy(update={"thoughts": pieces})
        prompt = self.task.prompt(template, state, **{**(begun.outputs if begun else {}), **variables})
        end = len(prompt) - (prompt[-1].role == "assistant")
        return as_written((*prompt[:end], *turns, *prompt[end:]), (*pieces, *filter(None, [begun])))

    @property
    def loaded(self) -> Any:
        """The LoadedModel of the decoder, or None if it does not run locally."""
        return self._backend.loaded(self.purpose)

    @property
    def decoder(self) -> str | None:
        """The name of the decoder."""
        return self._backend.name(self.purpose)

    def _derive_seed(
        self, template: str, node: Node, prompt: Sequence[Message], call: int = 0, continues: bool = False
    ) -> int:
        """Derive a call's seed.

        The seed of an evaluation depends on the prompt, so that equal states get equal values. Other seeds depend on
        the node's position; a first child that continues a message has its parent's seed.
        """
        if self.purpose == "evaluate":
            about = [message.model_dump(include={"role", "content"}) for message in prompt]
            return derive(self._seed, self._question, about, *([call] if call else []))
        place = self.tree.place(node)
        if continues:
            place = re.sub(r"(?:\.0)+$", "", place)
        if self.purpose == "answer":
            return derive(self._seed, self._question, place, "answer")
        turn = [self.turn] if self.turn else []
        return derive(self._seed, self._question, place, self.purpose, template, call, *turn)

    def _sampling(self, template: str, temperature: float, seed: int, n: int, max_tokens: int | None) -> Sampling:
        room = {} if max_tokens is None else {"max_tokens": max_tokens}
        options: dict[str, Any] = {**room, **self.filters, **self.task.sampling.get(template, {})}
        if self._max_tokens is not None:
            options["max_tokens"] = min(self._max_tokens, int(options.get("max_tokens", self._max_tokens)))
        about = {"temperature": temperature, "thinking": self._thinking, **options, "seed": seed, "n": n}
        return Sampling(**about)

    def _constraint(self, template: str, prompt: Sequence[Message], legal: Sequence[str]) -> Constraint | None:
        """Return the constraint on the texts of a template. Choices that continue a text end with their line."""
        schema = self.task.schema(template)
        constraint = None if schema is None else schema.constraint
        if legal:
            constraint = Constraint(choices=tuple(legal))
        prefix = prompt[-1].content if prompt[-1].role == "assistant" else ""
        before = self.task.triggers.get(template) or prefix
        if not before or constraint is None or constraint.choices is None:
            return constraint
        space = "" if before[-1].isspace() else " "
        return Constraint(choices=tuple(f"{space}{choice.strip()}\n" for choice in constraint.choices))

    def _unread(self, template: str, completion: Completion) -> bool:
        """Return whether a rationale was cut before an answer that can be parsed."""
        short = completion.usage.undecoded_tokens > 0 and not is_cut(completion)
        return short and self.answer_in(completion.text, template=template) is None


def derive(*about: object) -> int:
    """Derive a 64-bit seed from plain values. Equal values give equal seeds on every machine."""
    text = json.dumps(about, ensure_ascii=True, separators=(",", ":"), default=str)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def sampled_tokens(thoughts: Sequence[Thought]) -> int:
    """Return the number of sampled tokens of the thoughts."""
    return sum(len(part.tokens) for thought in thoughts for part in thought.drawn.values())


def scoring(
    prompt: Sequence[Message],
    labels: Sequence[str],
    sampling: Sampling,
    purpose: Purpose = "evaluate",
    *,
    end: str = "",
    close: bool = True,
    trigger: str | None = None,
) -> Request:
    """Return a request that scores labels after a prompt, or after an explanation and `trigger`."""
    space = " " if trigger is not None or prompt[-1].role == "assistant" else ""
    return Request(
        prompt=tuple(prompt),
        sampling=sampling,
        purpose=purpose,
        answer_trigger=trigger,
        choices=tuple(f"{space}{label}{end}" for label in labels),
        close_choices=close,
    )


def with_text(prompt: tuple[Message, ...], text: str) -> tuple[Message, ...]:
    """Append a paragraph to the last user message of a prompt."""
    user_indices = [i for i, message in enumerate(prompt) if message.role == "user"]
    if not text or not user_indices:
        return prompt
    last = prompt[user_indices[-1]]
    longer = last.model_copy(update={"content": f"{last.content}\n\n{text}"})
    return (*prompt[: user_indices[-1]], longer, *prompt[user_indices[-1] + 1 :])


def as_written(prompt: tuple[Message, ...], thoughts: Sequence[Thought]) -> tuple[Message, ...]:
    """Mark the sampled tokens of the thoughts in the assistant's prefix of a prompt.

    Tokenizing the text again could give other tokens than the model sampled.
    """
    last = prompt[-1]
    if last.role != "assistant":
        return prompt
    written = []
    at = 0
    for thought in thoughts:
        for name, text in thought.parts.items():
            start = last.content.find(text, at)
            if start < 0:
                continue
            at = start + len(text)
            if (drawn := thought.drawn.get(name)) is None or not drawn.tokens:
                continue
            if text in drawn.text:
                begin = start - drawn.text.index(text)  # the parsed text may start inside the sampled text
                if begin >= 0 and last.content.startswith(drawn.text[: start - begin], begin):
                    written.append((begin, drawn.tokens))
    return (*prompt[:-1], last.model_copy(update={"written": tuple(written)}))
