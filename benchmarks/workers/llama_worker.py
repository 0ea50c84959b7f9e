"""llama.cpp by llama-cpp-python, for `serve.py`. Samples of a prompt are sequences that share its keys and values.

Each step is one batch with a token of every sequence, and its drafts.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import llama_cpp as llama  # type: ignore[import-not-found,unused-ignore]
import numpy as np
from llama_cpp.llama_grammar import json_schema_to_gbnf  # type: ignore[import-not-found,unused-ignore]
from llama_cpp.llama_speculative import (  # type: ignore[import-not-found,unused-ignore]
    LlamaPromptLookupDecoding,
)

BATCH = 2048


class Engine:
    """A model and one context of `cells` tokens, for llama.cpp's maximum number of sequences."""

    def __init__(
        self,
        model: str,
        threads: int,
        cells: int,
        folder: str,
        precision: str = "own",
        flash: bool = True,
        lookup: int = 0,
    ) -> None:
        """`precision` converts the file in `folder`; `lookup` is the number of tokens of a prompt-lookup draft."""
        llama.llama_backend_init()
        path = at_precision(Path(model), precision, Path(folder))
        self.about = f"llama.cpp of llama-cpp-python {llama.__version__}, {path.name}"
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
        self.vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self.model))
        self.grammars: list[Any] = []
        """By sequence; empty without a schema."""
        self.batch = llama.llama_batch_init(BATCH, 0, 1)
        self.drafter = LlamaPromptLookupDecoding(num_pred_tokens=lookup) if lookup else None

    def forget(self) -> None:
        """Clear the key-value cache."""
        llama.llama_memory_clear(self.memory, False)

    def complete(
        self, prompt: list[int], n: int, max_tokens: int, ends: list[int], schema: Any = None, **sampling: Any
    ) -> tuple[list[list[int]], float]:
        """Sample n texts of a prompt, each up to one of the tokens `ends`, and in the form of a JSON `schema`.

        Return their tokens, and the seconds until every text had its first one.
        """
        if n > self.sequences:
            raise RuntimeError(f"{n} samples need more than {self.sequences} sequences")
        chain = sampler(**sampling)
        grammar = None if schema is None else json_schema_to_gbnf(json.dumps(schema)).encode()
        self.grammars = [self.grammar(grammar) for _ in range(n if grammar else 0)]
        began = time.perf_counter()
        for start in range(0, len(prompt), BATCH):
            rows = prompt[start : start + BATCH]
            for row, token in enumerate(rows):
                self.put(row, token, start + row, 0, reads=start + row == len(prompt) - 1)
            self.decode(len(rows))
        last = (len(prompt) - 1) % BATCH
        texts = [[self.sample(chain, last, i)] for i in range(n)]
        for sequence in range(1, n):
            llama.llama_memory_seq_cp(self.memory, 0, sequence, 0, len(prompt))
        prefill = time.perf_counter() - began
        while running := [i for i, text in enumerate(texts) if len(text) < max_tokens and text[-1] not in ends]:
            self.step(prompt, {i: texts[i] for i in running}, max_tokens, ends, chain)
        for one in (chain, *self.grammars):
            llama.llama_sampler_free(one)
        return texts, prefill

    def grammar(self, rules: bytes | None) -> Any:
        return llama.llama_sampler_init_grammar(llama.llama_model_get_vocab(self.model), rules, b"root")

    def sample(self, chain: Any, row: int, sequence: int) -> int:
        """Sample the next token of a sequence. As in llama.cpp's server, only a token that breaks the grammar is drawn
        again, from all that keep it.
        """
        token = int(llama.llama_sampler_sample(chain, self.context, row))
        if self.grammars:
            grammar = self.grammars[sequence]
            if not self.allowed(grammar, [token], [0.0])[0]:
                logits = np.ctypeslib.as_array(llama.llama_get_logits_ith(self.context, row), (self.vocabulary,))
                kept = np.flatnonzero(self.allowed(grammar, np.arange(self.vocabulary), logits))
                token = self.draw(chain, kept, logits[kept])
            llama.llama_sampler_accept(grammar, token)
        return token

    def allowed(self, grammar: Any, tokens: Any, logits: Any) -> Any:
        """Return for each token whether the grammar allows it next."""
        rows, candidates = _candidates(tokens, logits)
        llama.llama_sampler_apply(grammar, ctypes.byref(candidates))
        return rows["logit"] != -math.inf

    def draw(self, chain: Any, tokens: Any, logits: Any) -> int:
        """Sample one of the tokens."""
        _, candidates = _candidates(tokens, logits)
        llama.llama_sampler_apply(chain, ctypes.byref(candidates))
        return int(candidates.data[candidates.selected].id)

    def step(
        self, prompt: Sequence[int], texts: dict[int, list[int]], max_tokens: int, ends: Collection[int], chain: Any
    ) -> None:
        """Decode the last token of every text and its drafts, and sample until a token differs from its draft."""
        drafts = {i: self.draft([*prompt, *text], max_tokens - len(text) - 1) for i, text in texts.items()}
        count = 0
        for i, text in texts.items():
            for position, token in enumerate([text[-1], *drafts[i]], len(prompt) + len(text) - 1):
                self.put(count, token, position, i, reads=True)
                count += 1
        self.decode(count)
        row = 0
        for i, text in texts.items():
            for at, expected in enumerate([*drafts[i], None]):
                text.append(self.sample(chain, row + at, i))
                if text[-1] != expected or expected in ends:
                    break
            row += 1 + len(drafts[i])
            if drafts[i]:
                llama.llama_memory_seq_rm(self.memory, i, len(prompt) + len(text) - 1, -1)

    def draft(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return at most `most` tokens that followed the last n-gram where it occurred before."""
        if self.drafter is None:
            return []
        return [int(token) for token in self.drafter(np.array(tokens, dtype=np.intc))[:most]]

    def put(self, row: int, token: int, position: int, sequence: int, reads: bool) -> None:
        batch = self.batch
        batch.token[row], batch.pos[row], batch.logits[row] = token, position, reads
        batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence

    def decode(self, count: int) -> None:
        self.batch.n_tokens = count
        if status := llama.llama_decode(self.context, self.batch):
            raise RuntimeError(f"llama_decode of {count} tokens returned status {status}")


def _candidates(tokens: Any, logits: Any) -> tuple[Any, Any]:
    """Return an array of tokens with their logits, and llama.cpp's structure of this array."""
    rows = np.zeros(len(tokens), np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)]))
    rows["id"], rows["logit"] = tokens, logits
    data = rows.ctypes.data_as(ctypes.POINTER(llama.llama_token_data))
    return rows, llama.llama_token_data_array(data=data, size=len(rows), selected=-1, sorted=False)


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
