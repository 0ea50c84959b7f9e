"""The sides that run in this process: our own decoder, and the ways that transformers has."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from tot.bench.peers.side import SideError, Work, drawn
from tot.bench.peers.waves import Asked, Wave, new_tokens
from tot.decoders.decoder import load_decoder
from tot.decoders.local import LocalDecoder
from tot.decoders.models.loading import LoadedModel
from tot.decoders.request import Request, Sampling
from tot.machine import describe

LOOKED_UP = 4
"""Tokens that transformers' prompt lookup drafts."""

PAGE, BATCH = 256, 1024
"""Tokens in a page of keys and values of `generate_batch`, and in one of its forwards."""

Row = tuple[tuple[int, ...], int]
"""A prompt, and how many tokens to draw after it."""


class Tot:
    """`ar` on an engine of its own: every wave packed, choices really scored. `options` go to `load_decoder`."""

    most: int | None = None

    def __init__(self, name: str, model: str, *, searches: bool = True, **options: Any) -> None:
        self.name = name
        self.searches = searches
        self.decoder: LocalDecoder = load_decoder("ar", model, **options)
        engine = self.decoder.engine
        self.about = f"{describe(engine.loaded.device, engine.loaded.dtype)}, {engine.runner.backend.name}"

    def run(self, waves: Sequence[Wave]) -> Work:
        engine = self.decoder.engine
        engine.call(engine.cache.clear)
        batches = [list(requests(wave)) for wave in waves]
        began = time.perf_counter()
        done = [completion for batch in batches for completion in self.decoder.generate(batch)]
        seconds = time.perf_counter() - began
        return _checked(seconds, sum(len(completion.tokens) for completion in done), new_tokens(waves))

    def close(self) -> None:
        self.decoder.close()


def requests(wave: Wave) -> Iterator[Request]:
    """A wave as requests at T = 1 that ignore the end of text: samples of equal length are one request."""
    for asked in wave:
        if asked.choices:
            options = {"choices": asked.choices, "close_choices": asked.close_choices}
            yield Request(prompt=asked.prompt, purpose="evaluate", sampling=Sampling(seed=asked.seed), **options)
        elif len(set(asked.new)) == 1:
            yield _request(asked, asked.new[0], 0, len(asked.new))
        else:
            yield from (_request(asked, length, i, 1) for i, length in enumerate(asked.new))


def _request(asked: Asked, length: int, sample: int, n: int) -> Request:
    seed = (asked.seed + sample) % 2**64
    sampling = Sampling(max_tokens=length, temperature=1.0, n=n, seed=seed, ignore_eos=True)
    return Request(prompt=asked.prompt, sampling=sampling)


class Generate:
    """`generate`: a wave as one left-padded batch or, `serial`, a sample at a time."""

    def __init__(
        self,
        name: str,
        loaded: LoadedModel,
        *,
        serial: bool = False,
        most: int | None = None,
        searches: bool = True,
        **options: Any,
    ) -> None:
        self.name = name
        self.about = describe(loaded.device, loaded.dtype)
        self.most = most
        self.searches = searches
        self._model = loaded.model
        self._serial = serial
        self._options = options

    def run(self, waves: Sequence[Wave]) -> Work:
        return in_thread(lambda: self._run(waves))

    @torch.inference_mode()
    def _run(self, waves: Sequence[Wave]) -> Work:
        began = time.perf_counter()
        tokens = 0
        for wave in waves:
            rows = rows_of(wave)
            for batch in [[row] for row in rows] if self._serial else [rows]:
                tokens += self._draw(batch)
        return _checked(time.perf_counter() - began, tokens, drawn(waves))

    def _draw(self, rows: Sequence[Row]) -> int:
        """Tokens drawn; rows that have theirs are computed until the last one has."""
        width, longest = max(len(prompt) for prompt, _ in rows), max(length for _, length in rows)
        padded = [([0] * (width - len(prompt)) + list(prompt)) for prompt, _ in rows]
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt, _ in rows]
        result = self._model.generate(
            torch.tensor(padded, device=self._model.device),
            attention_mask=torch.tensor(mask, device=self._model.device),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            min_new_tokens=longest,
            max_new_tokens=longest,
            **self._options,
        )
        made = result.shape[1] - width
        return sum(min(made, length) for _, length in rows)

    def close(self) -> None:
        """The model is shared."""


class GenerateBatch:
    """`generate_batch`, transformers' continuous batching, on a model of its own. Samples of equal length only."""

    most: int | None = 15
    searches = False

    def __init__(self, name: str, loaded: LoadedModel) -> None:
        self.name = name
        self.about = describe(loaded.device, loaded.dtype)
        self._model = loaded.model

    def run(self, waves: Sequence[Wave]) -> Work:
        return in_thread(lambda: self._run(waves))

    def _run(self, waves: Sequence[Wave]) -> Work:
        """Not in inference mode: its buffers are written to outside of it."""
        from transformers import ContinuousBatchingConfig, GenerationConfig

        began = time.perf_counter()
        tokens = 0
        for wave in waves:
            rows = rows_of(wave)
            lengths = {length for _, length in rows}
            if len(lengths) > 1:
                raise SideError("generate_batch draws as many tokens for one sample as for another")
            config = GenerationConfig(
                max_new_tokens=max(lengths), do_sample=True, temperature=1.0, top_k=0, eos_token_id=-1
            )
            pages = sum(-(-(len(prompt) + length) // PAGE) + 1 for prompt, length in rows)
            done = self._model.generate_batch(
                [list(prompt) for prompt, _ in rows],
                generation_config=config,
                # Left to itself it takes most of the free memory, anew at every call.
                continuous_batching_config=ContinuousBatchingConfig(
                    page_size=PAGE, num_blocks=pages, max_batch_tokens=BATCH
                ),
            )
            for output in done.values():
                if output.error is not None:
                    raise SideError(f"generate_batch: {output.error}")
                tokens += len(output.generated_tokens)
        return _checked(time.perf_counter() - began, tokens, drawn(waves))

    def close(self) -> None:
        """The garbage collector has it."""


def rows_of(wave: Wave) -> list[Row]:
    """Every sample of a wave by itself; an evaluation is one token that is read."""
    return [(asked.prompt, length) for asked in wave for length in asked.samples]


def in_thread(work: Callable[[], Work]) -> Work:
    """In a thread of its own, as the engine's is: OpenMP keeps a team a thread, and two teams slow each other down.

    Ctrl-C does not wait for its end.
    """
    result: Future[Work] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:  # the caller's  # noqa: BLE001
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return result.result()


def _checked(seconds: float, tokens: int, wanted: int) -> Work:
    if tokens != wanted:
        raise SideError(f"it drew {tokens} tokens where {wanted} were asked for")
    return Work(seconds, tokens)
