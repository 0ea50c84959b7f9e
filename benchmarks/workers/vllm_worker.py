"""A vLLM worker, run by path in an environment with vLLM. It reads one JSON command per line and replies on stdout.

All samples of a wave are in flight at once, with prefix caching on; the cache is emptied before each run.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def serve(replies: Any) -> None:
    """The first command loads the model; each other command has waves to run, or a prompt to complete."""
    import torch
    import vllm  # type: ignore[import-not-found,unused-ignore]

    load = json.loads(sys.stdin.readline())
    options: dict[str, Any] = {}
    if load["lookup"]:
        drafts = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}
        options["speculative_config"] = {**drafts, "num_speculative_tokens": load["lookup"]}
    if torch.cuda.is_available():  # vLLM refuses to start on more than other sides leave free
        free, total = torch.cuda.mem_get_info()
        options["gpu_memory_utilization"] = 0.8 * free / total
    model = vllm.LLM(
        load["model"],
        dtype=load["dtype"],
        max_model_len=load["context"],
        enable_prefix_caching=True,
        skip_tokenizer_init=True,
        disable_log_stats=False,  # outputs have the seconds to their first tokens
        **options,
    )
    replies({"about": f"vLLM {vllm.__version__}, {load['dtype']}"})
    for line in sys.stdin:
        try:
            command = json.loads(line)
            model.reset_prefix_cache()
            began = time.perf_counter()
            if "waves" in command:
                waves = [sample(vllm, model, wave) for wave in command["waves"]]
                done: dict[str, Any] = {name: sum(wave[name] for wave in waves) for name in waves[0]}
            else:
                done = {"samples": complete(vllm, model, **command["complete"])}
            replies({"seconds": time.perf_counter() - began, **done})
        except Exception as error:  # the benchmark continues without this side  # noqa: BLE001
            replies({"error": f"{type(error).__name__}: {error}"})


def sample(vllm: Any, model: Any, wave: list[dict[str, Any]]) -> dict[str, float]:
    """Sample a wave. Return the number of tokens sampled, and the seconds until every sample had its first one."""
    samples = [(request["prompt"], length) for request in wave for length in request["new"]]
    options = {"temperature": 1.0, "ignore_eos": True, "detokenize": False}
    outputs = model.generate(
        [{"prompt_token_ids": prompt} for prompt, _ in samples],
        [vllm.SamplingParams(max_tokens=length, **options) for _, length in samples],
        use_tqdm=False,
    )
    return {
        "tokens": sum(len(output.token_ids) for request in outputs for output in request.outputs),
        "prefill": max(request.metrics.first_token_latency for request in outputs),
    }


def complete(vllm: Any, model: Any, prompt: list[int], ends: list[int], **sampling: float) -> list[list[int]]:
    """Return the tokens of n texts of a prompt, each up to one of the tokens `ends`."""
    options = vllm.SamplingParams(stop_token_ids=ends, detokenize=False, **sampling)
    (request,) = model.generate([{"prompt_token_ids": prompt}], options, use_tqdm=False)
    return [list(output.token_ids) for output in request.outputs]


if __name__ == "__main__":
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # keep library output out of the replies
    serve(lambda reply: out.write(json.dumps(reply) + "\n"))
