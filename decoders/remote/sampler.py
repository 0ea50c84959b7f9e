"""Draw samples from one model on one server, within its concurrency and the search's budget."""

from __future__ import annotations

import asyncio
import re
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tot.decoders.budget import Meter
from tot.decoders.errors import OptionError, RefusedError, RequestError
from tot.decoders.remote.body import body_of, changed, extended, messages_of, prefix_of, seed_of
from tot.decoders.remote.constraint import constraint_fields, tool_fields
from tot.decoders.remote.loop import together
from tot.decoders.remote.output_check import OutputCheck
from tot.decoders.remote.reply import Choice, ServerReply, completions_of
from tot.decoders.remote.servers import SERVERS, TOOL_OPTIONS
from tot.decoders.request import Completion, Part, Request, ThinkingOptions, Usage
from tot.decoders.thinking import joined

if TYPE_CHECKING:
    from tot.decoders.remote.client import Client

CUT = Completion("", (), 0.0, "budget", Usage(), parts=(Part("exact", ""),))
"""The completion of a request whose budget was spent before the reply."""
_LONG_PROMPT, _MAX_CHARACTERS_PER_TOKEN = 4000, 20
"""Prompts above this length (characters) are checked for truncation, by this bound on the average token length."""
_LONGEST_TOKEN = 200
"""Characters of a new token; a text with more of them ignores `max_tokens`, and reading it could take minutes."""
_MAX_COINCIDENCE = 20
"""Texts up to this length (characters) may be equal by chance."""


class SpentError(Exception):
    """The budget is spent."""


class Sampler:
    """Draws samples from the model of a client, for use in one event loop."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.options = client.options
        self.slots = asyncio.Semaphore(self.options.concurrency)
        self._takes_n = True
        """Whether the server returns several samples per request; otherwise one request is sent per sample."""
        self._renamed: dict[str, str] = {}
        """Fields that the server refuses, and their other names; an empty name leaves the field out."""
        self._thinks = False
        """Whether a text has ended in its thinking. Further texts then get tokens for it, and no stop strings."""

    async def ask(self, meter: Meter, path: str, body: dict[str, Any]) -> tuple[ServerReply, Usage]:
        """Send a body, adapted to the server, and return the reply and its usage, which `meter` counts.

        Raises SpentError if the meter's budget is spent, RefusedError or ModelError.
        """
        async with self.slots:
            reply = await self._reply(meter, path, body)
        longest = max(len(choice.text) for choice in reply.choices)
        if longest > _LONGEST_TOKEN * (body["max_tokens"] + 1) and not body.get("echo"):
            said = f"a text has {longest:,} characters, and max_tokens is {body['max_tokens']:,}"
            raise RefusedError(f"{self.client} ignores a limit: {said}; use another server", said, 502)
        usage = self._usage(reply, body)
        meter.count(new_tokens=usage.new_tokens)
        return reply, usage

    async def _reply(self, meter: Meter, path: str, body: dict[str, Any]) -> ServerReply:
        """Return the reply to a body. Sends it again with other fields if the server refuses a field."""
        while True:
            if meter.overspent() is not None:
                raise SpentError
            sent, limit = self._fitted(body), meter.budget.seconds
            try:
                async with asyncio.timeout(None if limit is None else limit - meter.seconds):
                    return await self.client.post(path, sent, ServerReply)
            except TimeoutError:
                raise SpentError from None
            except RefusedError as error:
                if "max_tokens" in sent and "max_completion_tokens" in error.said:  # OpenAI's reasoning models
                    self._renamed["max_tokens"] = "max_completion_tokens"
                elif "seed" in sent and re.search(r"\bseed\b", error.said):  # Mistral's API
                    self._renamed["seed"] = ""
                    self.client.warn("this server does not accept a seed: its samples are not reproducible")
                elif self.options.logprobs and "logprob" in error.said:
                    message = f"{error}: remove the option logprobs, or use another server"
                    raise RefusedError(message, error.said) from None
                elif "tools" in sent and re.search(r"(?i)\btools?\b|\btool[-_]|jinja", error.said):
                    title, remedy = self.client.server.title, "use a model with tools, or another server"
                    if title in TOOL_OPTIONS:
                        remedy = f"start {title} with {TOOL_OPTIONS[title]}"
                    raise RefusedError(f"{error}: {remedy}", error.said) from None
                if self._fitted(body) == sent:
                    raise

    def _fitted(self, body: dict[str, Any]) -> dict[str, Any]:
        names = {name: self._renamed.get(name, name) for name in body}
        fitted = {names[name]: value for name, value in body.items() if names[name]}
        return {"model": self.client.model, **fitted, **self.options.extra}

    def _usage(self, reply: ServerReply, body: dict[str, Any]) -> Usage:
        """Return the usage of a reply; 0 for counts that the server does not report."""
        tokens, client = reply.usage, self.client
        if tokens is None or tokens.completion_tokens is None:
            client.warn("%s does not report the number of new tokens: a budget estimates them from the texts", client)
        if tokens is None:
            return Usage()
        prompt, texts = tokens.prompt_tokens or 0, [message["content"] for message in body.get("messages", ())]
        characters = sum(map(len, texts)) or (len(body["prompt"]) if isinstance(body.get("prompt"), str) else 0)
        if characters > _LONG_PROMPT and 0 < prompt * _MAX_CHARACTERS_PER_TOKEN < characters:
            message = "%s counts %d prompt tokens in %d characters: it may have truncated the prompt"
            client.warn(message, client, prompt, characters)
        return Usage(prompt, min(prompt, tokens.cached_tokens or 0), tokens.completion_tokens or 0)

    async def samples(self, request: Request, meter: Meter) -> list[Completion]:
        """Draw n samples of a request.

        Raises OptionError if the server ignores an option, or does not continue messages and must (`keep_stop`), and
        RequestError if a reply is invalid as often as the options allow.
        """
        self._check(request)
        check = self._output_check(request)
        sampling = request.sampling
        n = sampling.n if sampling.temperature else 1
        done: list[Completion] = []
        if n == 1 or self._takes_n:
            try:
                done = (await self._drawn(request, 0, n, meter))[:n]
            except RefusedError:  # whatever the message: the server may support only one sample per request
                if n == 1:
                    raise
                done = await self._drawn(request, 0, 1, meter)
        if len(done) < n:
            if done and done[0] is not CUT:  # n samples were requested, one was returned
                self._takes_n = False
            rest = [partial(self._drawn, request, i, 1, meter) for i in range(len(done), n)]
            done += [samples[0] for samples in await together(rest)]
        free = not request.tools and request.constraint is None
        if n > 2 and free and len({sample.text for sample in done}) == 1 and len(done[0].text) > _MAX_COINCIDENCE:
            message = "all %d samples at temperature %g have the same text: check whether the server caches its replies"
            self.client.warn(message, n, sampling.temperature)
        if check is not None:
            done = await together([partial(self._valid, request, i, one, check, meter) for i, one in enumerate(done)])
        return done + [replace(done[0], usage=Usage(seconds=done[0].usage.seconds))] * (sampling.n - n)

    def _constraint_fields(self, request: Request) -> dict[str, Any]:
        """Return the fields of the constraint, unless the server lacks it and replies are checked."""
        try:
            return constraint_fields(request, self.client.server)
        except RequestError:
            if not self.options.output_retries:
                raise
            return {}

    def _output_check(self, request: Request) -> OutputCheck | None:
        """Return the check of a constraint and tools that the server is not known to enforce; None without any."""
        server = self.client.server
        enforced = self._constraint_fields(request) and server is not SERVERS["openai"]
        constraint = None if enforced else request.constraint
        if server is SERVERS["tot"] or not (request.tools or constraint):
            return None
        return OutputCheck(request, constraint)

    async def _valid(
        self, request: Request, index: int, sample: Completion, check: OutputCheck, meter: Meter
    ) -> Completion:
        """Return a valid sample: this one, or a new one with another seed, and never at temperature 0."""
        sampling, retries = request.sampling, self.options.output_retries
        for attempt in range(retries + 1):
            try:
                return check.valid(sample)
            except ValueError as error:
                reason = self.client.plain(str(error))
            if attempt < retries:
                self.client.warn("%s: a reply is invalid (%s): asking up to %d times", self.client, reason, retries)
                seed, temperature = seed_of(sampling.seed, index, "again", attempt), sampling.temperature or 1.0
                again = sampling.model_copy(update={"n": 1, "seed": seed, "temperature": temperature})
                (new,) = await self._drawn(changed(request, request.prompt, again), 0, 1, meter)
                sample = replace(new, usage=new.usage + sample.usage)
        said = self.client.plain(sample.text[:100])
        message = f"{self.client} returned {retries + 1} invalid replies ({reason}), such as {said!r}"
        remedy = "describe the form in the prompt, raise output_retries, or use vLLM or tot serve"
        raise RefusedError(f"{message}: {remedy}", said, 502)

    def _check(self, request: Request) -> None:
        """Refuse options that the server ignores, or warn if that is not known."""
        prompt, sampling, thinking = request.prompt, request.sampling, request.sampling.thinking
        server, where, warn = self.client.server, self.options.base_url, self.client.warn
        if request.tools and request.answer_trigger is not None:
            raise OptionError("tools on a server do not go with an answer trigger: leave one out")
        for name in ("top_k", "min_p"):
            if sampling.temperature and getattr(sampling, name) and not server.filters:
                if server.filters is False:
                    raise OptionError(f"{server.title} ignores {name}: leave {name} out")
                warn(f"the server at {where} may ignore {name}, which is not in OpenAI's protocol")
        for name in ("settle", "waits", "counted", "hint"):
            closed_here = name == "hint" and server.continue_fields
            if getattr(thinking, name) and server is not SERVERS["tot"] and not closed_here:
                raise OptionError(f"{server.title} has no {name} for thinking: leave it out, or use tot serve")
        if request.template_options and "chat_template_kwargs" not in server.thinking:
            if server is SERVERS["ollama"]:
                raise OptionError(f"{server.title} ignores template_options: leave them out, or set thinking")
            warn(f"the server at {where} may ignore template_options, which are not in OpenAI's protocol")
        if server.continues or not messages_of(prompt):
            return
        problem = f"the server at {where} is not known to continue an assistant message"
        if sampling.keep_stop:
            raise OptionError(
                f"{problem}, which generator=continue needs: use generator=sample, or vLLM, SGLang, llama-server, "
                "Ollama or tot serve (behind a proxy, name it by the option server)"
            )
        if prefix_of(prompt):
            warn(f"{problem}: it may start a new reply instead")

    def _room(self, request: Request) -> int:
        """Return the tokens for thinking beside `max_tokens`; 0 if the model is not known to think."""
        sampling = request.sampling
        if sampling.keep_stop or prefix_of(request.prompt) or self.client.server is SERVERS["tot"]:
            return 0
        return sampling.thinking.tokens if self._thinks or sampling.thinking.budget != "auto" else 0

    async def _drawn(
        self, request: Request, index: int, n: int, meter: Meter, answers: bool = False
    ) -> list[Completion]:
        """Draw n samples, or fewer if the server returns fewer; the first has this index.

        Samples without an answer get one, unless they are `answers` to such a sample.
        """
        start, sampling, room = time.monotonic(), request.sampling, 0 if answers else self._room(request)
        path, body = body_of(request, self.options, self.client.server, index, n, room)
        body |= self._constraint_fields(request) | tool_fields(request)
        try:
            reply, usage = await self.ask(meter, path, body)
            if sampling.keep_stop and "stop" in body and any(choice.stopped_blank for choice in reply.choices):
                del body["stop"]  # a stop string after nothing but whitespace does not end a text
                reply, more = await self.ask(meter, path, body)
                usage += more
        except SpentError:
            return [CUT] * n
        usage = replace(usage, seconds=time.monotonic() - start)
        done = completions_of(reply, sampling, self.options.logprobs, usage, "stop" in body)
        if answers or sampling.keep_stop or not any(one.lacks_answer for one in done):
            return done
        if not room and sampling.thinking.budget == "auto":
            self._thinks = True
            if self._room(request):  # a stop string or the limit of the text may have ended the thinking
                again = await self._drawn(request, index, n, meter)
                return [replace(new, usage=new.usage + old.usage) for new, old in zip(again, done, strict=False)]
        samples = enumerate(zip(reply.samples, done, strict=True), start=index)
        return await together([partial(self._answered, request, i, *sample, meter) for i, sample in samples])

    async def _answered(
        self, request: Request, index: int, choice: Choice, text: Completion, meter: Meter
    ) -> Completion:
        """Return a sample with an answer, if it has none: after the end of its thinking, or without thinking."""
        if not text.lacks_answer or choice.problem:
            return text
        sampling, prompt = request.sampling, request.prompt
        sampling = sampling.model_copy(update={"n": 1, "seed": seed_of(sampling.seed, index, "answer to thinking")})
        kept, end = choice.cut_thinking()
        hint = sampling.thinking.hint if end else ""
        requests = []
        continues = self.client.server.continue_fields and "gpt-oss" not in self.client.model.lower()  # has no tags
        if isinstance(prompt, str) or (messages_of(prompt) and continues):
            requests.append((end, hint, changed(request, extended(prompt, kept + end + hint), sampling)))
        if messages_of(prompt):
            off = sampling.model_copy(update={"thinking": ThinkingOptions(budget=0)})
            requests.append(("", "", changed(request, prompt, off)))
        for end, hint, further in requests:
            with suppress(RefusedError):  # such as a chat template that drops the thinking of a message
                (answer,) = await self._drawn(further, 0, 1, meter, answers=True)
                if end and answer.lacks_answer:  # vLLM's parser of R1 reads a text without a closing tag as thinking
                    answer = replace(
                        answer, text=answer.thinking, parts=(replace(answer.parts[-1], text=answer.thinking),)
                    )
                if answer is CUT or answer.text.strip():
                    return joined(text, end, hint, answer, exact=request.constraint is not None)
                text = replace(text, usage=text.usage + answer.usage)
        return text
