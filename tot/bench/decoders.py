"""`tot bench decoders`: decoding methods side by side on one engine, as in SEED's tables.

The prompts are those of real searches: the first thought after each task's questions, n samples of it, and the
evaluations of such thoughts. All sides take turns at each prompt, and ratios are medians over prompts; every round has
other questions and another seed. Prompts are computed beforehand, so only decoding is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rich.console import Console

from tot.bench.engines import SPENT, metrics_of
from tot.bench.harness import RATE, Bench, Measured, Metric, Side, percent, plain, timed
from tot.bench.options import DecodersOptions
from tot.bench.workloads import grown
from tot.decoders.decoder import METHODS, load_decoder, options_of
from tot.decoders.errors import OptionError, unknown
from tot.decoders.local import LocalDecoder
from tot.decoders.methods.options import MCSDOptions, SDOptions
from tot.decoders.request import Message, Purpose, Request, Sampling, Usage
from tot.evaluators.value import Value
from tot.machine import describe
from tot.registry import load_task

TASKS = ("gsm8k", "creative_writing", "blocksworld")
WARM_UP = "game24"
NEW = 48
CONFIGS = {"sd": (1, 1, 1), "mcsd": (2, 2, 1)}
"""k_config of each method in SEED's tables; the options k and k_config take their places."""
WIDE: dict[str, dict[str, Any]] = {
    "jacobi": {"n": 16, "adapt": False},
    "lookahead": {"window": 15, "ngram": 5, "guesses": 15, "adapt": False},
}
"""What only pays where rows cost nothing: as many tokens a forward as can be had."""
_SET_HERE = {"policy", "overlap", "adapt", "rule"}
_NOTHING = Usage()

Prompt = tuple[Message, ...]


@dataclass(frozen=True)
class Asked:
    """Prompts that a search asks at once, and how they are sampled."""

    prompts: Sequence[Prompt]
    sampling: Sampling
    purpose: Purpose = "generate"


def _of(count: str, total: str) -> Callable[[Measured], float | None]:
    return lambda took: took[count] / took[total] if took[total] else None


METRICS = [
    RATE,
    Metric("tokens a forward", _of("tokens", "forwards"), plain(".2f")),
    Metric("acceptance rate", _of("accepted", "reached"), percent),
    Metric("accepted of drafted", _of("accepted", "drafted"), percent),
]


def decode(decoder: LocalDecoder, serial: bool, asked: Asked) -> Measured:
    """Decode the samples of all prompts, packed or one after another; nothing that a draft model computed is there."""
    engine, drafter, sampling = decoder.engine, decoder.drafter, asked.sampling
    if drafter is not None and drafter.runner is not None:
        engine.call(drafter.runner.cache.clear)
    engine.call(engine.accounts.clear)
    together = [Request(prompt=prompt, sampling=sampling, purpose=asked.purpose) for prompt in asked.prompts]
    alone = [{"n": 1, "seed": 1000 * sampling.seed + i} for i in range(sampling.n)]
    one_by_one = [
        [request.model_copy(update={"sampling": sampling.model_copy(update=each)})]
        for request in together
        for each in alone
    ]
    batches = one_by_one if serial else [together]
    seconds, done = timed(lambda: [one for batch in batches for one in decoder.generate(batch)])
    usage = sum((one.usage for one in done), _NOTHING)
    counted = {name: getattr(usage, name) for name in ("forwards", "drafted", "accepted", "reached")}
    spent = dict(metrics_of(engine, asked.purpose).seconds)
    return {"seconds": seconds, "tokens": usage.new_tokens, **counted, "spent": spent}


@dataclass
class Maker:
    """Makes sides on one engine, and what they are asked."""

    bench: Bench
    plain: LocalDecoder
    options: dict[str, Any]
    methods: Sequence[str]
    samples: int
    rounds: int
    stack: ExitStack
    configs: dict[str, tuple[int, ...]] = field(default_factory=lambda: dict(CONFIGS))

    def __post_init__(self) -> None:
        if "k" in self.options:
            self.configs["sd"] = SDOptions(k=self.options["k"]).k_config
        if "k_config" in self.options:
            self.configs["mcsd"] = MCSDOptions(k_config=self.options["k_config"]).k_config

    def decoder(self, method: str, **options: Any) -> LocalDecoder:
        known = options_of(method).model_fields
        given = {option: value for option, value in self.options.items() if option in known}
        return self.stack.enter_context(load_decoder(method, engine=self.plain.engine, **given | options))

    def side(self, name: str, method: str, serial: bool = False, **options: Any) -> Side:
        return Side(name, partial(decode, self.decoder(method, **options), serial))

    def compare(
        self,
        title: str,
        sides: Sequence[Side],
        prompts: Sequence[Sequence[Sequence[Prompt]]],
        temperature: float,
        purpose: Purpose = "generate",
        metrics: Sequence[Metric] = METRICS,
        against: Sequence[int] = (0, 1),
    ) -> None:
        """All sides at each group of prompts. `prompts` has those of a round after those of another; the first warm
        up. Of generations n samples are drawn, of evaluations one of each of n thoughts."""
        warm, *given = prompts

        def asked(group: Sequence[Prompt], seed: int) -> Asked:
            n = self.samples if purpose == "generate" else 1
            self.plain.generate([Request(prompt=prompt, sampling=Sampling(max_tokens=1)) for prompt in group])
            sampling = Sampling(max_tokens=NEW, temperature=temperature, seed=seed, n=n, ignore_eos=True)
            return Asked(group, sampling, purpose)

        def asking(_: Any, turn: int) -> Asked:
            number, place = divmod(turn, len(given[0]))
            return asked(given[number % len(given)][place], number + 1)

        self.bench.compare(
            title,
            sides,
            asking,
            rounds=self.rounds * len(given[0]),
            warm_up=lambda _: asked(warm[0], 0),
            metrics=metrics,
            against=[sides[i].name for i in against],
        )


def run(asked: DecodersOptions, console: Console) -> None:
    """Measure, and print the tables."""
    methods, options = asked.decoders, asked.decoder_options
    for method in methods:
        if method not in METHODS:
            raise OptionError(unknown("decoder", method, METHODS))
    for name in _SET_HERE & options.keys():
        raise OptionError(f"{name} is what is compared here: leave it out")
    known = {name for method in methods for name in options_of(method).model_fields} - _SET_HERE
    for name in options.keys() - known:
        raise OptionError(unknown(f"option of {', '.join(methods)}", name, known))
    drafting = bool({"sd", "mcsd"} & set(methods))
    with load_decoder("ar", asked.model) as decoder, ExitStack() as stack:
        loaded = decoder.engine.loaded
        with Bench(asked, console, f"{asked.model}; {describe(loaded.device, loaded.dtype)}") as bench:
            maker = Maker(bench, decoder, options, methods, asked.samples, asked.rounds, stack)
            first_thoughts = thoughts()
            for temperature in asked.temperatures:
                maker.compare(f"thoughts, T = {temperature}", _sides(maker), first_thoughts, temperature)
                if drafting:
                    maker.compare(f"rules, T = {temperature}", _rules(maker), first_thoughts, temperature, against=[0])
            judged = evaluations(maker) if drafting or "seed" in methods else []
            if drafting:
                maker.compare("state evaluations, T = 0.2", _by_lookup(maker), judged, 0.2, "evaluate")
            if "seed" in methods:
                _by_purpose(maker, first_thoughts, judged)


def thoughts() -> list[list[list[Prompt]]]:
    """By round, after one to warm up: the first thought of each task's next question."""

    def first(name: str, questions: Iterable[str] | None = None) -> list[list[Prompt]]:
        task = load_task(name)
        asked = questions or [task.question_of(row) for row in task.data("questions")]
        return [[task.prompt(task.thought[0], task.start(question))] for question in asked]

    warm = first(WARM_UP, [load_task(WARM_UP).example()])
    return [warm, *map(list, zip(*map(first, TASKS), strict=False))]


def evaluations(maker: Maker) -> list[list[list[Prompt]]]:
    """By round, after one to warm up: the evaluations of sibling thoughts, grown after each task's next question."""
    prompts: list[list[list[Prompt]]] = []
    for number in range(maker.rounds + 1):
        prompts.append([])
        for task in map(load_task, TASKS):
            rows = task.data("questions")
            question = task.question_of(rows[number % len(rows)])
            states = grown(maker.plain, task, question, number, maker.samples, breadth=1, depth=2, max_tokens=NEW)
            prompts[-1].append([Value().prompt(task, state) for state in states])
    return prompts


def _sides(maker: Maker) -> list[Side]:
    """SEED's table: each method serial, under SEED's rounds without and with overlap, and packed."""
    sides = [maker.side("ar, serial", "ar", serial=True), maker.side("ar, packed", "ar")]
    configs = {method: config for method, config in maker.configs.items() if method in maker.methods}
    for method, config in configs.items():
        given: dict[str, Any] = {"k": len(config)} if method == "sd" else {"k_config": config}
        shown = _titled(method, config)
        sides.append(maker.side(f"{shown}, serial", method, serial=True, **given))
        sides.append(maker.side(f"{shown}, packed", method, **given))
    if "seed" in maker.methods:
        for config in configs.values() or [maker.configs["sd"]]:
            shown = _titled("seed", config)
            rounds: dict[str, Any] = {"policy": "rounds", "k_config": config, "adapt": False}
            sides.append(maker.side(f"{shown}, rounds, no overlap", "seed", overlap=False, **rounds))
            sides.append(maker.side(f"{shown}, rounds", "seed", **rounds))
            sides.append(maker.side(f"{shown}, packed", "seed", k_config=config))
        sides.append(maker.side("seed, packed", "seed"))
    for method in (method for method in maker.methods if method not in {"ar", "seed", *CONFIGS}):
        sides += [maker.side(f"{method}, serial", method, serial=True), maker.side(f"{method}, packed", method)]
        if method in WIDE:
            said = ", ".join(f"{name}={value}" for name, value in WIDE[method].items())
            sides.append(maker.side(f"{method}, {said}, serial", method, serial=True, **WIDE[method]))
    return sides


def _rules(maker: Maker) -> list[Side]:
    """Acceptance under each rule."""
    sides = [maker.side("ar, packed", "ar")]
    if "sd" in maker.methods:
        config = maker.configs["sd"]
        for rule in ("coupled", "leviathan"):
            sides.append(maker.side(f"{_titled('sd', config)}, {rule}", "sd", k=len(config), rule=rule))
    if "mcsd" in maker.methods:
        config = maker.configs["mcsd"]
        shown = _titled("mcsd", config)
        for rule in ("coupled", "mcsd"):
            sides.append(maker.side(f"{shown}, {rule}", "mcsd", k_config=config, rule=rule))
    return sides


def _titled(method: str, config: Sequence[int]) -> str:
    return f"{method} ({','.join(map(str, config))})"


def _by_lookup(maker: Maker) -> list[Side]:
    """Without any draft model."""
    return [
        maker.side("ar, serial", "ar", serial=True),
        maker.side("ar, packed", "ar"),
        maker.side("sd by lookup, serial", "sd", serial=True, draft="lookup"),
        maker.side("sd by lookup, packed", "sd", draft="lookup"),
        maker.side("seed by lookup, packed", "seed", draft="lookup"),
    ]


def _by_purpose(maker: Maker, generated: Sequence[Any], judged: Sequence[Any]) -> None:
    """Thought generator and state evaluator apart (SEED v2, RQ2), and where the time goes: k_config (2,2,1), T = 1."""
    asked: dict[Purpose, Sequence[Any]] = {"generate": generated, "evaluate": judged}
    for purpose, prompts in asked.items():
        sides = [
            maker.side("ar, serial", "ar", serial=True),
            maker.side("seed, packed", "seed", k_config=(2, 2, 1)),
            maker.side("seed, always drafted whole", "seed", k_config=(2, 2, 1), adapt=False),
        ]
        maker.compare(f"purpose {purpose}, T = 1", sides, prompts, 1.0, purpose, [*METRICS, *SPENT], [0])
