"""FastCoT: seconds of a forward by window (the paper's figure 2), and of a whole rationale by where it is cut."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from functools import partial

from tot.bench.gpu.sides import Bench, Found, Stages, seconds
from tot.decoders.decoder import load_decoder
from tot.decoders.engine.runner import Chunk, Runner
from tot.decoders.engine.sampling import Draw, read
from tot.decoders.local import LocalDecoder
from tot.decoders.request import Request, Sampling

WINDOWS = tuple(range(0, 39, 2))
WINDOW = 16
"""Of whole rationales."""
_EIGHTHS = (0, 1, 2, 4, 6, 8)
"""Of a rationale: the iterations after which it is cut."""
_GREEDY = Draw(0.0, 0, 1.0, 0.0, 0, 0, 0)


def figure_2(bench: Bench) -> Stages:
    """FastCoT, figure 2: seconds of one forward, and of reading it, by window, after prompts of three lengths."""
    with bench.engine() as engine:
        found: Found = {"windows": WINDOWS}
        for length in bench.shape.prompts:
            yield found
            curve = engine.call(partial(_by_window, engine.runner, bench.prompt(length), bench.amounts.rounds + 2))
            found[f"prompt of {length}"] = {"seconds": curve, "last_over_first": curve[-1] / curve[0]}
            bench.say(f"prompt of {length}: {1000 * curve[0]:.1f} ms, window {WINDOWS[-1]}: {1000 * curve[-1]:.1f}")
        return found


def _by_window(runner: Runner, prompt: Sequence[int], turns: int) -> list[float]:
    """Medians over turns, the windows one after another in each; the first turn warms up."""
    cache = runner.cache
    cache.clear()
    base = cache.open(prompt)
    runner.forward([Chunk(base, 0, len(base), [_GREEDY])])
    spent: list[list[float]] = []
    for _ in range(turns + 1):
        spent.append([])
        for window in WINDOWS:
            fork = cache.fork(base)
            cache.extend(fork, [1 + i for i in range(window + 1)])
            draws = [_GREEDY] * (window + 1)
            began = time.perf_counter()
            read(runner.forward([Chunk(fork, len(base), len(fork), draws)]).logits, draws)  # waits for the device
            spent[-1].append(time.perf_counter() - began)
            cache.rollback(fork, 0)
    cache.release(base)
    return [statistics.median(times) for times in zip(*spent[1:], strict=True)]


def caps(bench: Bench) -> Stages:
    """Seconds of a rationale and its answer by the iterations after which it is cut, and decoded one after another.

    Random weights guess no token beforehand: a whole rationale takes as many iterations as it has tokens.
    """
    most = 2 * bench.amounts.new_tokens
    cuts = [most * share // 8 for share in _EIGHTHS]
    sampling = Sampling(max_tokens=most, ignore_eos=True)

    def asked() -> Request:
        return Request(prompt=bench.prompt(), sampling=sampling, answer_trigger="\nAnswer:", answer_tokens=8)

    with bench.engine() as engine:
        sides: dict[str, LocalDecoder] = {"ar": load_decoder("ar", engine=engine)}
        sides |= {str(cap): load_decoder("fastcot", engine=engine, cap=cap, window=WINDOW) for cap in cuts}
        spent = defaultdict[str, list[float]](list)
        for cap in cuts[:2]:
            seconds(sides[str(cap)], asked())

        def found() -> Found:
            medians = {name: statistics.median(values) for name, values in spent.items()}
            return {"window": WINDOW, "caps": cuts, "seconds": spent, "medians": medians}

        for _ in range(bench.amounts.rounds):
            yield found()
            request = asked()
            for name, decoder in sides.items():
                spent[name].append(seconds(decoder, request)[0])
        return found()
