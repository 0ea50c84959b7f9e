"""Context: what thought generators and state evaluators are given to ask a model with.

It renders templates, derives every call's seed from what it is about, and keeps equal states' evaluations.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

from tot.decoders.errors import OptionError
from tot.decoders.request import Completion, Message, Purpose, Request, Sampling
from tot.llm.backend import Backend
from tot.llm.parallel_steps import with_room
from tot.llm.prefix import as_written, drawn_for, scoring, tokens_of, with_said, with_text
from tot.llm.replies import Evaluation, Reply, is_cut
from tot.llm.seeds import derive
from tot.task.checked import CheckedTask
from tot.task.task import Task
from tot.tree.thought import Drawn, State, Thought, is_thinking
from tot.tree.tree import Node, ThoughtTree

if TYPE_CHECKING:
    from torch import Tensor


_T = TypeVar("_T")
_ANSWER_TOKENS = 32
"""Room for what comes after a template's answer trigger, where a text may have so many."""
_MESSAGE_TOKENS = 512
"""Room for a message that is written piece by piece, where the task says nothing."""
_THINKING_TOKENS = 4096
"""Room for what a model thinks before its message, which is no part of the message's own."""


class Context:
    """A search's model and tree, for one purpose: "generate", "evaluate" or "answer"."""

    def __init__(
        self,
        task: CheckedTask,
        tree: ThoughtTree,
        backend: Backend,
        *,
        seed: int = 0,
        max_tokens: int | None = None,
        filters: Mapping[str, float] | None = None,
        layers: Sequence[int] = (),
    ) -> None:
        """`layers` are those whose states at the ends of texts are kept, for evaluators that read them."""
        self.task = cast(Task, task)
        """The task, whose methods raise TaskError for any fault of theirs."""
        self.tree = tree
        self.purpose: Purpose = "generate"
        self.filters = dict(filters or {})
        """Which tokens may be drawn: top_k, top_p and min_p, where a task's template says nothing else."""
        self._checked = task
        self._backend = backend
        self._seed = seed
        self._question = self.state(tree.root).question
        self._max_tokens = max_tokens
        self.evaluations: dict[Hashable, Evaluation] = {}
        self._layers = tuple(layers)
        self._endings: dict[Hashable, Tensor] = {}
        """(layers, hidden) at the end of each text that was drawn, by the tokens of its path."""

    def to(self, purpose: Purpose) -> Context:
        """The same for another purpose."""
        other = copy(self)
        other.purpose = purpose
        return other

    def state(self, node: Node) -> State:
        return self.tree.state(node)

    def actions(self, node: Node) -> list[str]:
        """The task's legal actions at a node."""
        return self._checked.actions(self.state(node))

    def heuristic(self, node: Node) -> float:
        """The task's estimate of the cost still to come."""
        return self._checked.heuristic(self.state(node))

    def claims(self, node: Node, whole: bool = False) -> frozenset[Hashable]:
        """A path's answer, if it has one, otherwise the claims of its last thought that nothing before it makes.

        With `whole`, the answer and all claims of the path.
        """
        state = self.state(node)
        answer = self._checked.answer_at(state)
        answers = frozenset() if answer is None else frozenset([self.task.canonical(answer)])
        if answers and not whole:
            return answers
        claimed = [self._checked.claims(thought.text) for thought in state.thoughts]
        if whole:
            return answers.union(*claimed)
        *before, last = claimed or [frozenset()]
        return last.difference(self._checked.claims(state.question), *before)

    def answer_in(self, text: str, truncated: bool = False) -> Any | None:
        """The answer that a model's text gives; None where there is none."""
        return self._checked.answer_in(text, truncated)

    def random(self, *about: object) -> random.Random:
        """Random numbers that depend on the run's seed, the question and `about` alone."""
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
        titles: Sequence[str] = (),
        **variables: Any,
    ) -> list[Reply]:
        """n samples of what `template`, rendered for a node, is replied to.

        `max_tokens` and `temperature` hold where the task's `sampling` says nothing. `call` tells calls with the same
        template about one node apart: each has a seed of its own. `begun` is a thought whose first templates were
        asked already; evaluators' templates see the last thought's parts. With `until` the thoughts so far are one
        message, and the next piece of it is asked for, to the first of these strings and in at most `max_tokens`;
        the first child of each node goes on as if the message had never been cut. `about` is put behind what the user
        says. `titles` are steps that the text is
        to consist of, for a decoder that writes them side by side. What several coroutines ask in one turn goes out
        in one batch: see `each`.
        """
        state, task = self.state(node), self.task
        prompt = with_text(self.prompt(template, state, begun, **variables), about)
        thoughts = (*state.thoughts, *filter(None, [begun]))
        seed = self._derived(template, node, prompt, call, goes_on=bool(until))
        sampling = self._sampling(template, temperature, seed, n, max_tokens)
        if until:
            room = max(self.room(template, thoughts), 1)
            piece = {"max_tokens": min(room, max_tokens or room), "stop": (*sampling.stop, *until), "keep_stop": True}
            sampling = sampling.model_copy(update={**piece, "drawn": drawn_for(thoughts)})
        steps: tuple[str, ...] = ()
        trigger = None
        if self.purpose == "generate":
            steps, trigger = tuple(task.steps(template, state)), task.triggers.get(template)
        if titles and self.writes_steps:
            steps, sampling = tuple(titles), with_room(sampling, len(titles))
        states = self._layers if self.purpose == "generate" else ()
        request = Request(prompt=prompt, sampling=sampling, purpose=self.purpose, steps=steps, states=states)
        if trigger is not None:  # what comes before it is a rationale
            sampling = sampling.model_copy(update={"stop": (*sampling.stop, trigger)})
            room = min(_ANSWER_TOKENS, sampling.max_tokens)
            more = {"sampling": sampling, "answer_trigger": trigger, "answer_tokens": room}
            request = request.model_copy(update=more)
        (completions,) = await self._backend.complete([request])
        again = [self._unread(one) for one in completions]
        if any(again):
            (whole,) = await self._backend.complete([request.model_copy(update={"whole_rationale": True})])
            completions = [
                replace(new, usage=old.usage + new.usage) for old, new in zip(completions, whole, strict=True)
            ]
        if not until and trigger is None:
            completions = await self._think(request, completions, thoughts)
        for one in completions if states else ():
            # Its own end, where another token was drawn after the text; else the last row is of the token before.
            if one.states is not None and (one.finish_reason == "eos" or len(one.states) > len(one.tokens)):
                drawn = Thought(parts={template: one.text}, drawn={template: Drawn(text=one.text, tokens=one.tokens)})
                if (key := tokens_of((*thoughts, drawn))) is not None:
                    self._endings[key] = one.states[-1].clone()
        return [
            Reply(template, request, completion, self.decoder, int(unread))
            for completion, unread in zip(completions, again, strict=True)
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
        """The log-probability of each label, with `end` after it, as what comes after `template`; none is decoded.

        `close` adds the end of the turn, since "1" is also how "10" begins. With a `trigger` the model first explains,
        and the labels come after that text.
        """
        prompt = self.prompt(template, self.state(node))
        seed = self._derived(template, node, prompt)
        sampling = Sampling(seed=seed)
        if trigger is not None:
            sampling = self._sampling(template, temperature, seed, 1, max_tokens)
        request = scoring(prompt, labels, sampling, self.purpose, end=end, close=close, trigger=trigger)
        ((completion,),) = await self._backend.complete([request])
        return Reply(template, request, completion, self.decoder)

    async def ending(self, node: Node, layers: Sequence[int]) -> tuple[Any, Reply | None]:
        """The states at the end of a path's text, (layers, hidden) in float16: from the forward that drew it, where
        they are known, else from one that is asked for, with what was replied. None where a budget cut that off."""
        thoughts = self.state(node).thoughts
        if {*layers} <= {*self._layers} and (known := self._endings.get(tokens_of(thoughts))) is not None:
            return known[[self._layers.index(layer) for layer in layers]], None
        *before, thought = thoughts
        *begun, template = thought.parts
        first = Thought(parts={name: thought.parts[name] for name in begun}, drawn=thought.drawn) if begun else None
        parent = self.tree[node.parent or 0]
        prompt = self.to("generate").prompt(template, self.state(parent), first)
        drawn = thought.drawn.get(template) or Drawn(text=thought.parts[template], tokens=())
        said = Thought(parts={template: drawn.text}, drawn={template: drawn} if drawn.tokens else {})
        prompt = as_written(with_said(prompt, drawn.text), (*before, *filter(None, [first]), said))
        request = Request(prompt=prompt, sampling=Sampling(max_tokens=1), purpose=self.purpose, states=tuple(layers))
        ((completion,),) = await self._backend.complete([request])
        reply = Reply(template, request, completion, self.decoder)
        if reply.cut:
            return None, reply
        if completion.states is None:
            raise OptionError(f"decoder {self.decoder} tells no hidden states: take one that runs on a model here")
        return completion.states[0], reply

    def room(self, template: str, thoughts: Sequence[Thought]) -> int:
        """How many tokens a message may still have that `template` asks for, and that begins with these thoughts; or,
        while the model thinks, that thinking."""
        if is_thinking("".join(thought.text for thought in thoughts)):
            return _THINKING_TOKENS - drawn_for(thoughts)
        ended = [i for i, thought in enumerate(thoughts) if "</think>" in thought.text]
        said = thoughts[ended[-1] + 1 :] if ended else thoughts
        return self._sampling(template, 0.0, 0, 1, _MESSAGE_TOKENS).max_tokens - drawn_for(said)

    async def _think(
        self, request: Request, completions: Sequence[Completion], thoughts: Sequence[Thought]
    ) -> list[Completion]:
        """Completions that ran out of room while the model thinks, or since, gone on with: to the thinking's end, which
        has room of its own, and from there to theirs."""
        done, sampling = list(completions), request.sampling

        async def go_on(i: int, **changes: Any) -> None:
            one = done[i]
            assert isinstance(request.prompt, tuple)
            prompt = with_said(request.prompt, one.text)
            drawn = {"": Drawn(text=one.text, tokens=one.tokens)} if one.tokens else {}
            written = as_written(prompt, (*thoughts, Thought(parts={"": one.text}, drawn=drawn)))
            rest = sampling.model_copy(update={"n": 1, "seed": derive(sampling.seed, i, len(one.text)), **changes})
            ((more,),) = await self._backend.complete(
                [request.model_copy(update={"prompt": written, "sampling": rest})]
            )
            done[i] = one.then(more)

        short = [i for i, one in enumerate(done) if one.finish_reason == "length"]
        thinks = [i for i in short if is_thinking(done[i].text)]
        await self.each(thinks, lambda i: go_on(i, max_tokens=_THINKING_TOKENS, stop=("</think>",), keep_stop=True))
        ended = [i for i in short if "</think>" in done[i].text and done[i].finish_reason in ("length", "stop")]
        await self.each(ended, go_on)
        return done

    async def each(self, nodes: Sequence[_T], work: Callable[[_T], Awaitable[Any]]) -> list[Any]:
        """What `work` returns for each of `nodes`, all at once: what it asks for them goes out in one batch."""
        return list(await asyncio.gather(*map(work, nodes)))

    def prompt(
        self, template: str, state: State, begun: Thought | None = None, /, **variables: Any
    ) -> tuple[Message, ...]:
        """The messages of a template about a state; what the model wrote of them itself in the tokens that it drew."""
        if self.purpose == "evaluate":
            seen = state.thoughts[-1].parts if state.thoughts else {}
            return self.task.prompt(template, state, **{**seen, **variables})
        thoughts = (*state.thoughts, *filter(None, [begun]))
        prompt = self.task.prompt(template, state, **{**(begun.parts if begun else {}), **variables})
        return as_written(prompt, thoughts)

    @property
    def loaded(self) -> Any:
        """The LoadedModel that is asked, where it runs here; else None."""
        return self._backend.loaded(self.purpose)

    @property
    def decoder(self) -> str | None:
        """The name of the decoder that is asked."""
        return self._backend.name(self.purpose)

    @property
    def writes_steps(self) -> bool:
        """Whether that decoder writes parallel steps side by side."""
        return self._backend.writes_steps(self.purpose)

    def _derived(
        self, template: str, node: Node, prompt: Sequence[Message], call: int = 0, goes_on: bool = False
    ) -> int:
        """A call's seed: of evaluations by what is asked, so that equal states get equal values whenever they are met;
        else by the node's place, where first children that go on with a message have their parent's."""
        if self.purpose == "evaluate":
            about = [message.model_dump(include={"role", "content"}) for message in prompt]
            return derive(self._seed, self._question, about, *([call] if call else []))
        place = self.tree.place(node)
        if goes_on:
            place = re.sub(r"(?:\.0)+$", "", place)
        if self.purpose == "answer":
            return derive(self._seed, self._question, place, "answer")
        return derive(self._seed, self._question, place, "generate", template, call)

    def _sampling(self, template: str, temperature: float, seed: int, n: int, max_tokens: int | None) -> Sampling:
        room = {} if max_tokens is None else {"max_tokens": max_tokens}
        options: dict[str, Any] = {**room, **self.filters, **self.task.sampling.get(template, {})}
        if self._max_tokens is not None:
            options["max_tokens"] = min(self._max_tokens, int(options.get("max_tokens", self._max_tokens)))
        return Sampling(**{"temperature": temperature, **options, "seed": seed, "n": n})

    def _unread(self, completion: Completion) -> bool:
        """True for a rationale that was cut before an answer that can be read."""
        short = completion.usage.undecoded_tokens > 0 and not is_cut(completion)
        return short and self.answer_in(completion.text) is None
