"""`tot bench gpu`: what packing, parallel steps and drafting bring on a GPU, on models of 7B's sizes, in minutes.

Models one after another, each with an equal share of the time that is left; of each, parts in order of importance.
What does not fit or fails is named. Weights are random; `generate` is as it comes: sdpa attention, and a cache that
grows with every token.
"""

from __future__ import annotations

import gc
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from tot.bench.engines import forget, generate, metrics_of, replay
from tot.bench.fastcot import FORWARDS, forward_seconds
from tot.bench.gpu_models import SHAPES, Shape, build, build_draft, loaded, make_tokenizer, on_a_walk, twin
from tot.bench.harness import RATE, SECONDS, Bench, Measured, Metric, Results, Side, by_column, percent, plain, timed
from tot.bench.workloads import Asked, Waves, branches, rows
from tot.decoders.decoder import load_decoder
from tot.decoders.drafting.opening import make_drafter
from tot.decoders.engine.engine import Engine
from tot.decoders.errors import OptionError, unknown
from tot.decoders.local import LocalDecoder
from tot.decoders.methods.options import PDOSOptions
from tot.decoders.methods.pdos.steps_format import StepsFormat
from tot.decoders.models.loading import LoadedModel, quiet_transformers, resolve_device
from tot.decoders.request import Request, Sampling
from tot.machine import describe, limit, matrix_rate, read_bandwidth

PATIENCE = 45.0
"""Seconds, of one side at one number of branches."""
WARM_UP = 8
"""New tokens of warm-ups, which are all rounds' shapes but for the length."""
STEPS = 10
"""Parallel ones."""
DRAFTED, DRAFTED_FOR, ACCEPTANCE = 4, (1, 3, 15), 0.6
"""Tokens of a draft, a chain; branches that are drafted for; and how often a drafted token that is reached is right."""
WINDOW, EIGHTHS = 16, (0, 1, 2, 4, 6, 8)
"""Of whole rationales; and the eighths of them after which they are cut."""
_SPARE, _BLOCK = 16, 2048
"""Slots that a branch may take beyond its new tokens, for drafts; and those for parallel steps and prompts."""
_HELD = 1.25
"""Keys and values that transformers holds at most, over those of all branches: it copies a layer's to add to them."""
_EVERY = 200
"""Milliseconds between samples of how busy the GPU is."""
BUSY = Metric("GPU", lambda took: took["gpu_percent"] and took["gpu_percent"] / 100, percent)


@dataclass(frozen=True)
class Options:
    """What is asked for. Raises OptionError for what there is none of."""

    shapes: Sequence[str] = ("llama-2-7b", "qwen2.5-7b")
    parts: Sequence[str] = ("limits", "packed", "pdos", "seed", "figure_2", "caps")
    device: str = "cuda"
    minutes: float = 9.0
    branches: Sequence[int] = (1, 4, 16, 64, 128, 256)
    new_tokens: int = 64
    rounds: int = 3

    def __post_init__(self) -> None:
        for kind, given, known in (("shape", self.shapes, SHAPES), ("part", self.parts, PARTS)):
            for name in given:
                if name not in known:
                    raise OptionError(unknown(kind, name, known))
        if self.device != "cpu" and not torch.cuda.is_available():
            raise OptionError(
                "torch finds no CUDA device here: run this on a GPU, or try it with --shapes tiny --device cpu"
            )
        if self.device == "cpu" and (large := set(self.shapes) - {"tiny"}):
            raise OptionError(f"{min(large)} would take hours on a CPU: give --shapes tiny, or a GPU")


class Gauge:
    """How busy the GPU is: (second, percent) by nvidia-smi while it is open; nothing where there is none."""

    def __init__(self) -> None:
        self.samples: list[tuple[float, int]] = []

    @contextmanager
    def open(self) -> Iterator[None]:
        program = shutil.which("nvidia-smi")
        if program is None or not torch.cuda.is_available():
            yield
            return
        query = [f"--id={torch.cuda.current_device()}", "--query-gpu=utilization.gpu", f"--loop-ms={_EVERY}"]
        command = [program, *query, "--format=csv,noheader,nounits"]
        with subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            reader = threading.Thread(target=self._read, args=(process,), daemon=True)
            reader.start()
            try:
                yield
            finally:
                process.terminate()
                reader.join()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.strip().isdigit():
                self.samples.append((time.monotonic(), int(line)))

    def watched(self, side: Side) -> Side:
        """A side that tells how busy the GPU was while it was at work."""

        def run(asked: Any) -> Measured:
            began = time.monotonic()
            took = side.run(asked)
            seen = [percent for second, percent in list(self.samples) if second >= began]
            return took | {"gpu_percent": statistics.fmean(seen) if seen else None}

        return replace(side, run=run)


@dataclass
class Model:
    """A model on the device, in modules for us and in others for transformers, over the same weights."""

    name: str
    shape: Shape
    ours: LoadedModel
    theirs: LoadedModel
    options: Options
    bench: Bench
    gauge: Gauge
    _asked: int = field(default=0, init=False)
    """Prompts made so far."""

    @classmethod
    def open(cls, name: str, device: torch.device, options: Options, bench: Bench, gauge: Gauge) -> Model:
        """Make the model of that name."""
        shape = SHAPES[name]
        model, tokenizer = build(shape.family, shape.sizes, device), make_tokenizer(shape.sizes["vocab_size"])
        both = loaded(model, tokenizer, name), loaded(twin(model), tokenizer, name)
        return cls(name, shape, *both, options, bench, gauge)

    def engine(self) -> Engine:
        """With room for the most branches, and no more: transformers needs the rest."""
        slots = max(*self.options.branches, _SPARE) * (self.options.new_tokens + _SPARE)
        return Engine(self.ours, kv_budget=max(self.shape.prompts) + _BLOCK + slots)

    def prompt(self, length: int | None = None) -> tuple[int, ...]:
        """Random token ids, other ones at every call. By default as many as the shape's prompts have."""
        self._asked += 1
        generator = torch.Generator().manual_seed(self._asked)
        ids = torch.randint(self.shape.sizes["vocab_size"], (length or self.shape.prompts[0],), generator=generator)
        return tuple(ids.tolist())

    def compare(self, title: str, sides: Sequence[Side], asking: Any, **options: Any) -> Results:
        """With what takes too long done once or left out, and sides that fail left out."""
        watched = [self.gauge.watched(side) for side in sides]
        options = {"rounds": self.options.rounds, "patience": PATIENCE, "failing": True, **options}
        return self.bench.compare(f"{self.name}: {title}", watched, asking, **options)

    def by_branches(self, title: str, sides: Sequence[Side], asking: Callable[[int, int], Waves], **more: Any) -> None:
        """New tokens a second of waves by columns, and ratios to the last side. `asking` is given a number of branches
        and of new tokens."""
        new, base = self.options.new_tokens, sides[-1].name

        def table(results: Results) -> Table:
            ratios = [(side.name, base) for side in sides[:-1]]
            return by_column(
                results, RATE, f"{self.name}: {title}", ratios=ratios, others=[BUSY, *more.get("also", ())]
            )

        self.compare(
            title,
            sides,
            lambda count, _: asking(count, new),
            columns=more["columns"],
            warm_up=lambda count: asking(count, min(WARM_UP, new)),
            size=rows,
            table=table,
        )


def run(options: Options, out: Path, console: Console) -> None:
    """Measure, write and print. Ctrl-C ends it with what is known by then."""
    device, gauge = resolve_device(options.device), Gauge()
    machine, end = describe(device, torch.bfloat16), time.monotonic() + 60 * options.minutes
    with Bench(console, out, machine, asdict(options)) as bench, gauge.open(), quiet_transformers():
        for i, shape in enumerate(options.shapes):
            bench.until = time.monotonic() + (end - time.monotonic()) / (len(options.shapes) - i)
            _guarded(bench, shape, lambda: _measure(Model.open(shape, device, options, bench, gauge)))  # noqa: B023
        bench.keep(gpu=[(round(second, 2), percent) for second, percent in gauge.samples])
        for name, why in bench.numbers.get("left out", {}).items():
            bench.show(f"{name}: {why}")


def _measure(model: Model) -> None:
    """The parts, as many as there is time for."""
    for part in model.options.parts:
        _guarded(model.bench, f"{model.name}, {part}", partial(PARTS[part], model))


def _guarded(bench: Bench, name: str, work: Callable[[], None]) -> None:
    """Do it where there is time; what fails is named, and others may have room."""
    why = "no time was left"
    if bench.left > 0:
        bench.say(f"{name} …")
        try:
            work()
            return
        except Exception as error:  # one part's fault is not the others'  # noqa: BLE001
            why = f"{type(error).__name__}: {error}"
        finally:
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    bench.keep(**{"left out": bench.numbers.get("left out", {}) | {name: why}})


def limits(model: Model) -> None:
    """What this device can do at most, and how long a step of one row takes at least."""
    device, weights = model.ours.device, model.ours.model
    size, side = (2**30, 8192) if device.type == "cuda" else (2**24, 256)
    bandwidth, rate = read_bandwidth(device, size), matrix_rate(model.ours.dtype, device, side)
    embeddings: Any = weights.get_input_embeddings().weight  # of which a forward reads a few rows
    read = sum(int(weight.nbytes) for weight in weights.parameters() if weight is not embeddings)
    least = limit(read, read, bandwidth, rate)  # two bytes and two operations a weight
    found = {"weight_bytes": read, "read_bandwidth": bandwidth, "matrix_rate": rate, "seconds_a_step": least}
    model.bench.keep(**{f"{model.name}: limits": found})
    model.bench.show(
        f"{model.name}: {read / 1e9:.1f} GB of weights, read at {bandwidth / 1e9:.0f} GB/s; {rate / 1e12:.1f} TFLOP/s: "
        f"{1000 * least:.2f} ms a step at least"
    )


def packed(model: Model) -> None:
    """Samples of one prompt at T = 1, packed, against `generate` of as many sequences."""
    with model.engine() as engine:
        ours = Side("tot", partial(replay, load_decoder("ar", engine=engine)))
        theirs = Side("generate", partial(generate, model.theirs.model), most=_fitting(model, engine.runner.slot_bytes))
        model.by_branches(
            "new tokens/s, samples of one prompt at T = 1",
            [ours, theirs],
            lambda count, new: branches(model.prompt(), count, new),
            columns=model.options.branches,
        )


def _fitting(model: Model, slot_bytes: int) -> int | None:
    """The most branches whose keys and values, and their prompts' activations, have room beside what is held."""
    if model.ours.device.type != "cuda":
        return None
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(model.ours.device)
    prompt = model.shape.prompts[0]
    kept = _HELD * slot_bytes * (prompt + model.options.new_tokens)
    passing = 4 * prompt * model.ours.dtype.itemsize * model.shape.sizes["intermediate_size"]
    return max(1, int(0.95 * free / (kept + passing)))


def seed(model: Model) -> None:
    """Drafting with a second model, branches of different states, against none.

    The target's weights make token t + 1 follow t, and the draft's say the same after a share of all tokens: so often
    is a drafted token accepted. Every forward, draw and verification really runs.
    """
    with ExitStack() as stack:
        stack.enter_context(on_a_walk(model.ours.model))
        engine = stack.enter_context(model.engine())
        drafter = make_drafter(build_draft(model.shape, model.ours.device, ACCEPTANCE), engine, stack)
        chain: dict[str, Any] = {"engine": engine, "draft": drafter, "k_config": (1,) * DRAFTED}
        decoders = {
            "seed, adapted": load_decoder("seed", **chain),
            "seed, packed": load_decoder("seed", adapt=False, **chain),
            "seed, rounds": load_decoder("seed", adapt=False, policy="rounds", **chain),
            "ar": load_decoder("ar", engine=engine),
        }

        def asking(count: int, new: int) -> Waves:
            """States that differ in their last token: on a walk, their texts differ in all that follows."""
            *head, last = model.prompt()
            vocabulary = model.shape.sizes["vocab_size"]
            apart = vocabulary // count
            return (tuple(Asked((*head, (last + i * apart) % vocabulary), (new,)) for i in range(count)),)

        model.by_branches(
            f"new tokens/s by branches, drafts of {DRAFTED} tokens that are right {ACCEPTANCE:.0%} of the time",
            [Side(name, partial(replay, decoder)) for name, decoder in decoders.items()],
            asking,
            columns=DRAFTED_FOR,
            also=[Metric("accepted", lambda took: took.get("acceptance"), percent)],
        )


def one(decoder: LocalDecoder, request: Request) -> Measured:
    """What one request takes, from an empty store."""
    forget(decoder)
    seconds, (done,) = timed(lambda: decoder.generate([request]))
    account = metrics_of(decoder.engine)
    inside = account.block_tokens / account.block_seconds if account.block_seconds else None
    return {"seconds": seconds, "tokens": len(done.tokens), "inside": inside}


def pdos(model: Model) -> None:
    """Ten steps of given titles side by side, and what follows them, against as many tokens one after another; prompts
    are counted."""
    each = max(1, model.options.new_tokens // 2)
    titles = tuple(f"Part {number}" for number in range(STEPS))
    with model.engine() as engine:
        form = StepsFormat(PDOSOptions(), engine.codec)
        frame = sum(len(engine.codec.encode(form.header(title))) + len(form.between) for title in titles)
        whole = frame + len(form.end) + len(engine.codec.encode("\n")) + each * (STEPS + 1)
        steps = load_decoder("pdos", engine=engine, step_tokens=each)

        def asked(prompt: Sequence[int], tokens: int, steps: tuple[str, ...]) -> Request:
            sampling = Sampling(max_tokens=tokens, temperature=1.0, ignore_eos=True)
            return Request(prompt=tuple(prompt), sampling=sampling, steps=steps)

        drawn = one(steps, asked(model.prompt(), whole, titles))["tokens"]
        normal = load_decoder("ar", engine=engine)
        sides = [
            Side("pdos", lambda prompt: one(steps, asked(prompt, whole, titles))),
            Side("ar", lambda prompt: one(normal, asked(prompt, drawn, ()))),
        ]
        inside = Metric("tokens/s inside the block", lambda took: took["inside"])
        model.compare(
            f"{STEPS} parallel steps, {drawn} tokens",
            sides,
            lambda _, turn: model.prompt(),
            warm_up=lambda _: model.prompt(),
            metrics=[SECONDS, RATE, inside],
            against=["ar"],
        )


def figure_2(model: Model) -> None:
    """FastCoT, figure 2: seconds of one forward, and of reading it, by window, after prompts of three lengths."""
    table = Table("window", *map(str, FORWARDS), title=f"{model.name}: milliseconds a forward (FastCoT, figure 2)")
    found: dict[str, Any] = {"windows": FORWARDS}
    with model.engine() as engine:
        for length in model.shape.prompts:
            work = partial(forward_seconds, engine.runner, model.prompt(length), model.options.rounds + 2)
            curve = found[f"prompt of {length}"] = engine.call(work)
            table.add_row(f"prompt of {length}", *(f"{1000 * seconds:.1f}" for seconds in curve))
    model.bench.keep(**{f"{model.name}: figure 2": found})
    model.bench.show(table)


def caps(model: Model) -> None:
    """Seconds of a rationale and its answer by the iterations after which it is cut, and decoded one after another.

    Random weights guess no token beforehand: a whole rationale takes as many iterations as it has tokens.
    """
    most = 2 * model.options.new_tokens
    sampling = Sampling(max_tokens=most, ignore_eos=True)
    with model.engine() as engine:
        decoders = {"ar": load_decoder("ar", engine=engine)}
        for cap in (most * share // 8 for share in EIGHTHS):
            decoders[f"cap {cap}"] = load_decoder("fastcot", engine=engine, cap=cap, window=WINDOW)

        def asked(*_: Any) -> Request:
            return Request(prompt=model.prompt(), sampling=sampling, answer_trigger="\nAnswer:", answer_tokens=8)

        model.compare(
            f"a rationale of {most} tokens and its answer, by cap, window {WINDOW}",
            [Side(name, partial(one, decoder)) for name, decoder in decoders.items()],
            asked,
            warm_up=asked,
            metrics=[replace(SECONDS, show=plain(".2f"))],
            against=["ar"],
        )


PARTS: dict[str, Callable[[Model], None]] = {
    "limits": limits,
    "packed": packed,
    "pdos": pdos,
    "seed": seed,
    "figure_2": figure_2,
    "caps": caps,
}
"""In order of importance."""
