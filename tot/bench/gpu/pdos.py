"""PDOS: ten steps of given titles side by side, against as many tokens one after another; prompts are counted."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from functools import partial

from tot.bench.gpu.sides import WARM_UP, Bench, Found, Stages, seconds
from tot.decoders.decoder import load_decoder
from tot.decoders.methods.options import PDOSOptions
from tot.decoders.methods.pdos.steps_format import StepsFormat
from tot.decoders.request import Request, Sampling

STEPS = 10


def pdos(bench: Bench) -> Stages:
    """Ten steps of given titles side by side, and what follows them, against as many tokens one after another."""
    each = max(1, bench.amounts.new_tokens // 2)
    with bench.engine() as engine:
        form = StepsFormat(PDOSOptions(), engine.codec)
        titles = tuple(f"Part {number}" for number in range(STEPS))
        frame = sum(len(engine.codec.encode(form.header(title))) + len(form.between) for title in titles)
        whole = frame + len(form.end) + len(engine.codec.encode("\n")) + each * (STEPS + 1)
        steps = load_decoder("pdos", engine=engine, step_tokens=each)
        normal = load_decoder("ar", engine=engine)
        spent = defaultdict[str, list[float]](list)
        inside: list[float] = []

        def asked(tokens: int, given: tuple[str, ...], prompt: Sequence[int]) -> Request:
            sampling = Sampling(max_tokens=tokens, temperature=1.0, ignore_eos=True)
            return Request(prompt=tuple(prompt), sampling=sampling, steps=given)

        seconds(normal, asked(WARM_UP, (), bench.prompt()))
        drawn = len(seconds(steps, asked(whole, titles, bench.prompt()))[1].tokens)
        sides = {
            "pdos": (steps, partial(asked, whole, titles)),
            "ar": (normal, partial(asked, drawn, ())),
        }

        def found() -> Found:
            ratios = [a / b for a, b in zip(spent["ar"], spent["pdos"], strict=True)]
            within = [a * b / drawn for a, b in zip(inside, spent["ar"], strict=True)]
            return {
                "steps": STEPS,
                "tokens_drawn": drawn,
                "seconds": spent,
                "ratio": {"ar / pdos": statistics.median(ratios)} if ratios else {},
                "inside_the_block": {
                    "tokens_per_second": inside,
                    "ratio": statistics.median(within) if within else None,
                },
            }

        for turn in range(bench.amounts.rounds):
            yield found()
            prompt = bench.prompt()
            order = [*sides.items()]
            for name, (decoder, request) in order[:: 1 if turn % 2 else -1]:
                spent[name].append(seconds(decoder, request(prompt))[0])
                bench.say(f"round {turn + 1}: {name}: {spent[name][-1]:.2f} s")
                if name == "pdos":
                    account = engine.accounts["generate"]
                    inside.append(account.block_tokens / account.block_seconds)
        return found()
