"""A llama.cpp worker, run by path in an environment with llama-cpp-python. It reads one JSON command per line on stdin.

Prompts with a common prefix compute it once and share it across their sequences in one unified key-value cache, also
from one wave to the next. Each step is one batch with a token of every sequence, and its drafts.
"""

from __future__ import annotations

import json
import os
import sys
import time
from bisect import bisect
from collections.abc import Collection, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import llama_cpp as llama  # type: ignore[import-not-found,unused-ignore]
import numpy as np
from llama_cpp.llama_speculative import (  # type: ignore[import-not-found,unused-ignore]
    LlamaPromptLookupDecoding,
)

BATCH = 2048
Prompt = tuple[int, ...]


class Sample(NamedTuple):
    """A text in progress: its sequence, its prompt, its maximum length and its tokens."""

    sequence: int
    prompt: Prompt
    length: int
    tokens: list[int]


class LlamaEngine:
    """A model and one context of `cells` tokens, for llama.cpp's maximum number of sequences."""

    def __init__(self, path: Path, threads: int, cells: int, flash: bool, lookup: int) -> None:
        self.model = llama.llama_model_load_from_file(str(path).encode(), llama.llama_model_default_params())
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        options = llama.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch = cells, BATCH, 512
        options.n_seq_max = self.sequences = llama.llama_max_parallel_sequences()
        options.n_threads = options.n_threads_batch = threads
        options.kv_unified = True
        options.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash else llama.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.context = llama.llama_init_from_model(self.model, options)
        if not self.context:
            raise RuntimeError(f"llama.cpp cannot create a context of {cells} tokens")
        self.memory = llama.llama_get_memory(self.context)
        self.batch = llama.llama_batch_init(BATCH, 0, self.sequences)
        self.sampler = sampler(temperature=1.0)
        self.held: dict[Prompt, int] = {}
        """Prompts in the key-value cache, and their sequences."""
        self.drafter = LlamaPromptLookupDecoding(num_pred_tokens=lookup) if lookup else None
        self.prefill_seconds = 0.0

    def run(self, waves: Sequence[Sequence[dict[str, Any]]]) -> int:
        """Run all waves with an empty cache. Return the number of tokens sampled."""
        self.forget()
        return sum(len(tokens) for wave in waves for tokens in self.wave(wave))

    def complete(self, prompt: list[int], n: int, max_tokens: int, ends: list[int], **sampling: Any) -> list[list[int]]:
        """Sample n texts of a prompt in parallel with an empty cache, each up to one of the tokens `ends`."""
        self.forget()
        llama.llama_sampler_free(self.sampler)
        self.sampler = sampler(**sampling)
        return self.wave([{"prompt": prompt, "new": [max_tokens] * n}], frozenset(ends))

    def forget(self) -> None:
        """Clear the key-value cache."""
        llama.llama_memory_clear(self.memory, False)
        self.held, self.prefill_seconds = {}, 0.0

    def wave(self, requests: Sequence[dict[str, Any]], ends: Collection[int] = ()) -> list[list[int]]:
        """Prefill the prompts, then decode every sample at each step. Return the samples' tokens."""
        lengths: dict[Prompt, list[int]] = {}
        for request in requests:
            lengths.setdefault(tuple(request["prompt"]), []).extend(request["new"])
        free = [number for number in range(self.sequences) if number not in self.held.values()]
        count = sum(map(len, lengths.values()))
        if len(lengths) + count > len(free):
            raise RuntimeError(f"{len(lengths)} prompts and {count} samples need more than {len(free)} sequences")
        homes = {prompt: free.pop() for prompt in lengths}
        began = time.perf_counter()
        firsts = self.prefill(homes, lengths)
        self.prefill_seconds += time.perf_counter() - began
        samples: list[Sample] = []
        for prompt, wanted in lengths.items():
            for length, token in zip(wanted, firsts[prompt], strict=True):
                sequence = free.pop()
                llama.llama_memory_seq_cp(self.memory, homes[prompt], sequence, 0, len(prompt))
                samples.append(Sample(sequence, prompt, length, [token]))
        running = samples
        while running := [one for one in running if len(one.tokens) < one.length and one.tokens[-1] not in ends]:
            self.step(running, ends)
        for sequence in set(range(self.sequences)).difference(homes.values()):
            llama.llama_memory_seq_rm(self.memory, sequence, -1, -1)
        self.held = homes
        return [one.tokens for one in samples]

    def step(self, samples: Sequence[Sample], ends: Collection[int]) -> None:
        """Decode the last token of every sample and its drafts, and sample until a token differs from its draft."""
        drafts = [self.draft(one) for one in samples]
        rows = 0
        for one, draft in zip(samples, drafts, strict=True):
            for position, token in enumerate([one.tokens[-1], *draft], len(one.prompt) + len(one.tokens) - 1):
                self.put(rows, token, position, [one.sequence], reads=True)
                rows += 1
        self.decode(rows)
        row = 0
        for one, draft in zip(samples, drafts, strict=True):
            for i, expected in enumerate([*draft, None]):
                one.tokens.append(self.sample(row + i))
                if one.tokens[-1] != expected or expected in ends:
                    break
            row += 1 + len(draft)
            if draft:
                llama.llama_memory_seq_rm(self.memory, one.sequence, len(one.prompt) + len(one.tokens) - 1, -1)

    def draft(self, one: Sample) -> list[int]:
        """Return the tokens that followed the text's last n-gram where it occurred before."""
        if self.drafter is None:
            return []
        found = self.drafter(np.array([*one.prompt, *one.tokens], dtype=np.intc))
        return [int(token) for token in found[: one.length - len(one.tokens) - 1]]

    def prefill(self, homes: dict[Prompt, int], lengths: dict[Prompt, list[int]]) -> dict[Prompt, list[int]]:
        """Compute uncached tokens, shared stretches once, and return the first tokens of the samples."""
        held, have = sorted(self.held), {}
        for prompt, home in homes.items():
            place = bisect(held, prompt)
            near = max(held[max(0, place - 1) : place + 1], key=lambda other: common(prompt, other), default=())
            have[prompt] = min(common(prompt, near), len(prompt) - 1)
            if have[prompt]:
                llama.llama_memory_seq_cp(self.memory, self.held[near], home, 0, have[prompt])
        firsts: dict[Prompt, list[int]] = {}
        row, reads = 0, {}
        for group, start, stop in stretches(sorted(homes)):
            for position in range(max(start, min(have[prompt] for prompt in group)), stop):
                owners = [prompt for prompt in group if have[prompt] <= position]
                ends = [prompt for prompt in owners if len(prompt) == position + 1]
                self.put(row, group[0][position], position, [homes[prompt] for prompt in owners], bool(ends))
                reads.update(dict.fromkeys(ends, row))
                row += 1
                if row == BATCH or len(firsts) + len(reads) == len(homes):
                    self.decode(row)
                    firsts |= {prompt: [self.sample(at) for _ in lengths[prompt]] for prompt, at in reads.items()}
                    row, reads = 0, {}
        return firsts

    def put(self, row: int, token: int, position: int, sequences: Sequence[int], reads: bool) -> None:
        batch = self.batch
        batch.token[row], batch.pos[row], batch.logits[row] = token, position, reads
        batch.n_seq_id[row] = len(sequences)
        for i, sequence in enumerate(sequences):
            batch.seq_id[row][i] = sequence

    def decode(self, count: int) -> None:
        self.batch.n_tokens = count
        if status := llama.llama_decode(self.context, self.batch):
            raise RuntimeError(f"llama_decode of {count} tokens returned status {status}")

    def sample(self, row: int) -> int:
        return int(llama.llama_sampler_sample(self.sampler, self.context, row))


def sampler(temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, seed: int = 1) -> Any:
    """Return llama.cpp's sampler with its filters in their default order; greedy at temperature 0."""
    chain = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
    parts = [llama.llama_sampler_init_greedy()]
    if temperature > 0:
        parts = [llama.llama_sampler_init_top_k(top_k)] if top_k else []
        parts += [llama.llama_sampler_init_top_p(top_p, 1)] if top_p < 1 else []
        parts += [llama.llama_sampler_init_min_p(min_p, 1)] if min_p else []
        parts += [llama.llama_sampler_init_temp(temperature), llama.llama_sampler_init_dist(seed)]
    for part in parts:
        llama.llama_sampler_chain_add(chain, part)
    return chain


def common(one: Prompt, other: Prompt) -> int:
    """Return the length of two prompts' common prefix, in tokens."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def stretches(prompts: Sequence[Prompt], start: int = 0) -> Iterator[tuple[Sequence[Prompt], int, int]]:
    """Yield (prompts that share a stretch, its start, its stop) of sorted prompts that are equal up to `start`."""
    stop = common(prompts[0], prompts[-1])  # sorted: the first and the last share the common prefix of all
    yield prompts, start, stop
    for _, group in groupby((prompt for prompt in prompts if len(prompt) > stop), key=lambda prompt: prompt[stop]):
        yield from stretches(list(group), stop)


def at_precision(source: Path, precision: str, folder: Path) -> Path:
    """Return the model file in another precision (F16, Q4_0, ...), converted once; `source` itself for "own"."""
    if precision == "own":
        return source
    made = folder / f"{source.stem}-as-{precision}.gguf"
    if not made.exists():
        folder.mkdir(parents=True, exist_ok=True)
        options = llama.llama_model_quantize_default_params()
        options.ftype = getattr(llama, f"LLAMA_FTYPE_MOSTLY_{precision}")
        options.allow_requantize = True
        scratch = made.with_suffix(f".{os.getpid()}")
        if llama.llama_model_quantize(str(source).encode(), str(scratch).encode(), options):
            raise RuntimeError(f"llama.cpp cannot convert {source} to {precision}")
        scratch.rename(made)
    return made


def serve(replies: Any) -> None:
    """The first command loads the model; each other command has waves to run, or a prompt to complete."""
    load = json.loads(sys.stdin.readline())
    path = at_precision(Path(load["model"]), load["precision"], Path(load["folder"]))
    engine = LlamaEngine(path, load["threads"], load["cells"], load["flash"], load["lookup"])
    replies({"about": f"llama.cpp of llama-cpp-python {llama.__version__}, {path.name}"})
    for line in sys.stdin:
        try:
            command = json.loads(line)
            began = time.perf_counter()
            if "waves" in command:
                done: dict[str, Any] = {"tokens": engine.run(command["waves"])}
            else:
                done = {"samples": engine.complete(**command["complete"])}
            replies({"seconds": time.perf_counter() - began, "prefill": engine.prefill_seconds, **done})
        except RuntimeError as error:
            replies({"error": str(error)})


if __name__ == "__main__":
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # keep library output out of the replies
    llama.llama_backend_init()
    serve(lambda reply: out.write(json.dumps(reply) + "\n"))
