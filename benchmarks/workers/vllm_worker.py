"""vLLM, for `serve.py`. All samples are in flight at once, with prefix caching on."""

from __future__ import annotations

from typing import Any

import torch
import vllm  # type: ignore[import-not-found,unused-ignore]
from vllm.sampling_params import (  # type: ignore[import-not-found,unused-ignore]
    StructuredOutputsParams,
)


class Engine:
    """A model with a context of `context` tokens."""

    def __init__(self, model: str, dtype: str, context: int, lookup: int = 0, schemas: bool = False) -> None:
        """`lookup` is the number of tokens of a prompt-lookup draft; `schemas` needs the tokenizer."""
        options: dict[str, Any] = {}
        if lookup:
            drafts = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}
            options["speculative_config"] = {**drafts, "num_speculative_tokens": lookup}
        if torch.cuda.is_available():  # vLLM refuses to start on more than other sides leave free
            free, total = torch.cuda.mem_get_info()
            options["gpu_memory_utilization"] = 0.8 * free / total
        self.about = f"vLLM {vllm.__version__}, {dtype}"
        self._llm = vllm.LLM(
            model,
            dtype=dtype,
            max_model_len=context,
            enable_prefix_caching=True,
            skip_tokenizer_init=not schemas,
            disable_log_stats=False,  # outputs have the seconds to their first tokens
            **options,
        )

    def forget(self) -> None:
        """Clear the key-value cache."""
        self._llm.reset_prefix_cache()

    def complete(
        self,
        prompt: list[int],
        n: int,
        max_tokens: int,
        ends: list[int],
        seed: int | None = None,
        schema: Any = None,
        **sampling: Any,
    ) -> tuple[list[list[int]], float]:
        """Sample n texts of a prompt, each up to one of the tokens `ends`, and in the form of a JSON `schema`.

        Return their tokens, and the seconds until every text had its first one.
        """
        seeds = [None if seed is None else seed + i for i in range(n)]
        sampling |= {"max_tokens": max_tokens, "stop_token_ids": ends, "ignore_eos": not ends, "detokenize": False}
        if schema is not None:
            sampling["structured_outputs"] = StructuredOutputsParams(json=schema)
        outputs = self._llm.generate(
            [{"prompt_token_ids": prompt}] * n,
            [vllm.SamplingParams(seed=one, **sampling) for one in seeds],
            use_tqdm=False,
        )
        samples = [list(output.token_ids) for request in outputs for output in request.outputs]
        return samples, max(request.metrics.first_token_latency for request in outputs)
