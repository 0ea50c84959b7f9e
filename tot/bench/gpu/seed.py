"""SEED with a draft model of 68M's size, whose acceptance is set beforehand, against decoding without drafts.

The target's weights make token t + 1 follow t, and the draft's say the same after a share of all tokens: so often is a
drafted token accepted. Every forward, draw and verification really runs.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from tot.bench.gpu.gauge import Watched
from tot.bench.gpu.models import build_draft, on_a_walk
from tot.bench.gpu.sides import PATIENCE, WARM_UP, Bench, Found, Method, Stages, compared
from tot.bench.peers.turns import Turns
from tot.bench.peers.waves import Asked, Wave
from tot.decoders.decoder import load_decoder
from tot.decoders.drafting.opening import make_drafter

DRAFTED = 4
"""Tokens of a draft, a chain."""
BRANCHES = (1, 3, 15)


def seed(bench: Bench) -> Stages:
    """Drafting with a second model of a stated acceptance, branches of different states, against none."""
    amounts = bench.amounts
    with ExitStack() as stack:
        stack.enter_context(on_a_walk(bench.ours.model))
        engine = stack.enter_context(bench.engine())
        draft = build_draft(bench.shape, bench.ours.device, amounts.acceptance)
        drafter = make_drafter(draft, engine, stack)
        always: dict[str, Any] = {"adapt": False, "k_config": (1,) * DRAFTED}
        methods = [
            Method("seed, adapted", load_decoder("seed", engine=engine, draft=drafter, k_config=(1,) * DRAFTED)),
            Method("seed, packed", load_decoder("seed", engine=engine, draft=drafter, **always)),
            Method("seed, rounds", load_decoder("seed", engine=engine, draft=drafter, policy="rounds", **always)),
            Method("ar", load_decoder("ar", engine=engine)),
        ]
        for method in methods:
            stack.callback(method.close)
        sides = [Watched(method, bench.gauge) for method in methods]
        turns = Turns(sides, BRANCHES, PATIENCE, bench.say)

        def asking(new: int, count: int, turn: int) -> Sequence[Wave]:
            """States that differ in their last token: on a walk, their texts differ in all that follows."""
            *head, last = bench.prompt()
            vocabulary = bench.shape.sizes["vocab_size"]
            apart = vocabulary // count
            return (tuple(Asked((*head, (last + i * apart) % vocabulary), (new,)) for i in range(count)),)

        def found() -> Found:
            return compared(turns.results, sides) | {
                "drafts": {method.name: _drafts(method) for method in methods},
                "acceptance_stated": amounts.acceptance,
                "tokens_a_draft": DRAFTED,
                "draft_parameters": sum(weight.numel() for weight in draft.parameters()),
                "how": "the target's weights make token t + 1 follow t; the draft's say the same after that share of "
                "all tokens, and something else after the others; every forward, draw and verification really runs",
            }

        turns.warm_up(partial(asking, min(WARM_UP, amounts.new_tokens)))
        for method in methods:
            method.accounts.clear()
        for turn in range(amounts.rounds):
            yield found()
            turns.round(turn, partial(asking, amounts.new_tokens))
        return found()


def _drafts(method: Method) -> dict[int, Found]:
    """By number of branches: drafted tokens accepted where they were reached, and tokens that a verification brings."""
    found = {}
    for count, accounts in method.accounts.items():
        reached, taken = (sum(sum(getattr(one, what).values()) for one in accounts) for what in ("reached", "taken"))
        found[count] = {
            "acceptance": taken / reached if reached else None,
            "drafted": sum(one.drafted for one in accounts),
            "block_efficiency": statistics.fmean(one.block_efficiency for one in accounts),
        }
    return found
