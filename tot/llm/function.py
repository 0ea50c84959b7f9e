"""FunctionDecoder: a function from text to text as a model."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from tot.decoders.request import Completion, Message, Request, Usage, before_stop


def is_function(model: Any) -> bool:
    """Return whether a model is a function from text to text: a model of transformers is callable, too."""
    return callable(model) and not isinstance(model, type) and not hasattr(model, "generate")


class FunctionDecoder:
    """Calls a function, which may be a coroutine function, with the texts of the messages as one text."""

    def __init__(self, function: Callable[[str], Any]) -> None:
        self.name = getattr(function, "__name__", type(function).__name__)
        self._function = function

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Return n completions for each request. The samples of a coroutine function run concurrently."""
        prompts = [(_text(one), one) for one in requests for _ in range(one.sampling.n)]
        results = [self._function(text) for text, _ in prompts]
        if any(map(inspect.isawaitable, results)):
            results = asyncio.run(_gathered(results))
        return [_completion(text, one) for text, (_, one) in zip(results, prompts, strict=True)]


async def _gathered(results: Sequence[Any]) -> list[Any]:
    return list(await asyncio.gather(*results))


def _text(request: Request) -> str:
    messages = [one.content if isinstance(one, Message) else str(one) for one in request.prompt]
    return request.prompt if isinstance(request.prompt, str) else "\n\n".join(messages)


def _completion(text: Any, request: Request) -> Completion:
    stops = () if request.sampling.keep_stop or not isinstance(text, str) else request.sampling.stop
    short = before_stop(text, stops) if stops else text
    return Completion(short, (), 0.0, "eos" if short == text else "stop", Usage())
