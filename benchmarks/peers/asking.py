"""Ask llama.cpp and vLLM a task's questions: the same prompt tokens as tot's, answers read by the same task."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from benchmarks.engines import SideError
from benchmarks.options import AnswersOptions
from benchmarks.peers.settings import BOUND, EXACT, FLASH, LOOKUP, Setting, Stage, fastest
from benchmarks.peers.sides import llama_process, vllm_process
from benchmarks.peers.worker import PeerWorker
from tot.decoders.decoder import LocalDecoder
from tot.decoders.engine.text import TextCodec
from tot.decoders.errors import OptionError
from tot.decoders.request import Message
from tot.decoders.thinking import split
from tot.evaluation.options import EvaluationRun
from tot.search.votes import count
from tot.task.checked import CheckedTask
from tot.task.world import HasAnswer
from tot.tree.thought import Thought

_TRIAL_TOKENS = 48
"""Tokens of the texts that choose a setting."""


class PeerWay(BaseModel):
    """One way to ask a peer."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    peer: Literal["llama", "vllm"]
    samples: int = Field(1, ge=1)
    """Answers that vote. A single one is decoded greedily."""
    file: tuple[str, ...] = ()
    """Precisions that llama.cpp tries besides the model's own file."""

    @field_validator("file", mode="before")
    @classmethod
    def _several(cls, given: Any) -> Any:
        return (given,) if isinstance(given, str) else given


@dataclass(frozen=True)
class Reader:
    """Prompts of a task as token ids, and the answers in sampled tokens."""

    task: CheckedTask
    codec: TextCodec
    template: str
    sampling: Mapping[str, Any]
    """Options of a peer's sampler, with the temperature of votes."""

    @classmethod
    def of(cls, work: EvaluationRun, decoder: Any) -> Reader:
        """Return the reader of a run's whole solutions. Raises SideError if peers cannot write them."""
        task = work.task
        template = task.chain if task.has_template(task.chain) else task.thought[0]
        if template != task.chain and not (len(task.thought) == 1 and isinstance(task, HasAnswer)):
            raise SideError(f"task {work.name} asks for a solution in several prompts, and peers get one")
        options = {"max_tokens": 128, **task.sampling.get(template, {})}
        if options.get("stop") or task.trigger(template) is not None:
            raise SideError(
                f"the prompt {template!r} of task {work.name} ends texts at strings, and peers end them at tokens: use "
                "a model with a chat template"
            )
        if not isinstance(decoder, LocalDecoder):
            raise SideError("peers get the token ids of a local model, and --model has none")
        temperature = getattr(work.parts["generator"], "temperature", 0.7)
        codec = decoder.engine.codec
        sampling = {"temperature": temperature, **work.config.filters_for(task)["generate"], **options}
        return cls(CheckedTask(task), codec, template, sampling | {"ends": sorted(codec.end_ids)})

    def prompt(self, question: str) -> list[int]:
        """Return the token ids of a question's prompt."""
        return self.codec.encode_prompt(self._messages(question))

    def _messages(self, question: str) -> tuple[Message, ...]:
        return self.task.prompt(self.template, self.task.start(question))

    def answer(self, question: str, tokens: Sequence[int]) -> Any | None:
        """Return the answer in a sampled text, or None."""
        ended = bool(tokens) and tokens[-1] in self.codec.end_ids
        decoded = self.codec.decode(tokens[:-1] if ended else tokens)
        text: str | None = split(decoded, self.codec.awaits(self._messages(question)))[1].strip() or None
        if text is not None and self.template in self.task.thought:
            text = self.task.parse_thought(self.template, text)
        if text is None:
            return None
        thought = Thought(parts={self.template: text}, truncated=not ended)
        return self.task.answer_at(self.task.start(question).then(thought))

    def vote(self, question: str, answers: Sequence[Any]) -> Any | None:
        """Return the answer that a majority elects; the first one wins a tie."""
        given = [answer for answer in answers if answer is not None]
        return given[count(self.task, question, given, [1.0] * len(given))[1][0]] if given else None


def ask(worker: PeerWorker, reader: Reader, samples: int, question: str, seed: int) -> dict[str, Any]:
    """Ask a question. Return the seconds, the number of new tokens and the answer. Raises SideError."""
    sampling = dict(reader.sampling) | ({"temperature": 0.0} if samples == 1 else {})
    seconds, texts = worker.complete(reader.prompt(question), samples, seed=seed, **sampling)
    answer = reader.vote(question, [reader.answer(question, tokens) for tokens in texts])
    return {"seconds": seconds, "tokens": sum(map(len, texts)), "answer": answer}


def open_peer(
    asked: AnswersOptions, way: PeerWay, setting: Setting, reader: Reader, longest: int, stack: ExitStack
) -> PeerWorker:
    """Open a peer with room for a prompt of `longest` tokens. Raises SideError."""
    room = longest + way.samples * int(reader.sampling["max_tokens"])
    if way.peer == "vllm":
        return vllm_process(asked.model, asked.vllm, stack, setting, context=room)
    return llama_process(asked.model, asked.llama, stack, setting, tokens=room)


def fastest_setting(
    asked: AnswersOptions, way: PeerWay, reader: Reader, prompt: Sequence[int], say: Callable[[str], None]
) -> Setting:
    """Return the setting that writes a way's samples fastest. Raises SideError if the peer does not work."""
    if way.peer == "vllm" and way.file:
        raise OptionError(f"file={way.file[0]} is for peer=llama: vLLM gets --model")
    files: Stage = [{"file": file} for file in way.file] or EXACT
    text = {**reader.sampling, "ends": []} | ({"temperature": 0.0} if way.samples == 1 else {})

    def measure(setting: Setting) -> dict[str, float]:
        with ExitStack() as stack:
            worker = open_peer(asked, way, setting, reader, len(prompt), stack)
            worker.complete(prompt, way.samples, **{**text, "max_tokens": 1})
            return {"": worker.complete(prompt, way.samples, **{**text, "max_tokens": _TRIAL_TOKENS})[0]}

    (best,) = fastest((files, FLASH, LOOKUP) if way.peer == "llama" else (BOUND, LOOKUP), measure, say)
    return best
