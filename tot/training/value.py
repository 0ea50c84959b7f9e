"""`tot train-value`: a head that reads from a model's hidden states whether a path ends right.

Questions are searched by trees that keep all they grow; a path is as good as the share of the solutions from it on that
end right (Math-Shepherd, Wang et al., 2024, section 3.2), so no labels are needed but final answers. All work is kept
in a folder, and gone on with where it was stopped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy

from tot.decoders.budget import Meter
from tot.decoders.decoder import Decoder
from tot.decoders.errors import OptionError
from tot.decoders.files import replacing, writing
from tot.decoders.request import Purpose
from tot.decoders.training.options import ValueOptions
from tot.decoders.training.resuming import check_settings
from tot.evaluation.estimate import Estimate, bootstrap, told_apart
from tot.evaluation.folder import read_samples
from tot.evaluation.leaves import read_leaves
from tot.evaluation.options import EvaluationRun as Evaluated
from tot.evaluation.run import run_evaluation
from tot.evaluators.base import Evaluator
from tot.evaluators.head import ValueHead
from tot.generators.continuation import Continue
from tot.llm.backend import Backend
from tot.llm.context import Context
from tot.llm.replies import Evaluation
from tot.llm.seeds import derive
from tot.report.terminal import counting
from tot.running import run_to_end
from tot.task.checked import CheckedTask
from tot.tree.tree import Node

_AT_ONCE = 8
"""Trees whose states are read side by side."""
_FREE = ("limit", "concurrency")
"""Settings that may change where work goes on: the limit may rise."""
_HELD_OUT = 5
"""Every so many questions one is not trained on, to choose by."""
_DECAYS = (1e-3, 1e-2, 1e-1)
"""Weights of the squared norm that heads are tried with."""
_CURVE = (50, 100, 200, 400, 800, 1600)
"""Numbers of questions that the learning curve is of."""


def run(source: str, model: str, options: ValueOptions, out: Path, folder: Path | None, console: Console) -> Path:
    """Search, read states, train and choose a head, write it to `out`, and print what it tells.

    `source` is "task=file"; `folder` is where the work is kept, by default beside `out`.
    """
    name, equals, data = source.partition("=")
    if not equals:
        raise OptionError(f"--questions {source!r} can't be read: write TASK=FILE, such as gsm8k=train.jsonl")
    folder = out.with_name(f"{out.stem}-work") if folder is None else folder
    search = f"bfs:thoughts=2,breadth={options.samples},select=all,aggregate=majority"
    asked = {"task": name, "data": data, "model": model, "limit": options.limit, "seed": options.seed}
    asked |= {"search": search, "evaluator": "random"}
    asked |= {"dtype": options.dtype, "quantize": options.quantize, "concurrency": options.concurrency}
    work = Evaluated.read(asked)
    if not isinstance(work.parts["generator"], Continue):
        raise OptionError(
            f"the thoughts of {name} are no pieces of one message here, and heads value those: take a task whose "
            "generator is continue, and a model with a chat template where the task asks such in their own way"
        )
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        decoders = work.config.open(stack)
        engine = getattr(decoders["generate"], "engine", None)
        if engine is None:
            raise OptionError(f"{model} tells no hidden states: give a model that runs here")
        layers = options.layers or _layers(engine.loaded.config.num_hidden_layers)
        begun = {name: value for name, value in asked.items() if name not in _FREE}
        check_settings(folder / "settings.json", {**begun, "layers": list(layers)})
        keeping = Keep(folder=folder / "states", read=layers)
        keeping.folder.mkdir(exist_ok=True)
        rollouts = folder / "rollouts"
        kept = replace(work, parts={**work.parts, "evaluator": keeping})
        results = run_evaluation(kept, rollouts, rollouts.exists(), None)
        console.print(f"{results.score_text}, {results.problems} questions, in {rollouts}")
        about = {"model": model, "identity": engine.loaded.identity, "prompts": work.task.prompts, "task": name}
        paths = run_to_end(read_paths(work, rollouts, keeping, decoders))
    head = choose(paths, layers, about, console)
    head.save(out)
    console.print(f"{out}: layer {head.layer}; use it as --evaluator head:path={out}")
    return out


def _layers(last: int) -> tuple[int, ...]:
    """At half of the depth, two thirds, five sixths, and the last."""
    return tuple(sorted({max(1, round(last * share)) for share in (1 / 2, 2 / 3, 5 / 6, 1)}))


# -- states -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Paths:
    """Beginnings of solutions: what is known of each."""

    states: dict[int, Tensor]
    """By layer, (paths, hidden) in float16."""
    labels: Tensor
    """(paths,): the share of the solutions from there on that end right."""
    along: Tensor
    """(paths,): how far along, of the way to the ends of those solutions; 1 is an end."""
    questions: Tensor
    """(paths,): the number of its question."""

    def only(self, which: Tensor) -> Paths:
        """Those where `which`, (paths,), is true."""
        states = {layer: all_of[which] for layer, all_of in self.states.items()}
        return Paths(states, self.labels[which], self.along[which], self.questions[which])


class Keep(Evaluator):
    """Tells no path from another, but keeps the states at their ends, in half precision: a shard for each search."""

    folder: Path
    read: tuple[int, ...]
    """Layers."""

    @property
    def layers(self) -> tuple[int, ...]:
        return self.read

    async def evaluate(self, ctx: Context, nodes: Sequence[Node]) -> list[Evaluation]:
        seen = await ctx.each(nodes, lambda node: ctx.ending(node, self.read))
        new = {str(node.id): states for node, (states, _) in zip(nodes, seen, strict=True) if states is not None}
        path = self._shard(ctx)
        with writing(path), replacing(path) as unfinished:
            save_file({**self.kept(ctx), **new}, unfinished, {"question": ctx.state(ctx.tree.root).question})
        return [Evaluation(0.0) if reply is None else reply.evaluation(0.0) for _, reply in seen]

    def kept(self, ctx: Context) -> dict[str, Tensor]:
        """The states at the ends of a search's paths, (layers, hidden), by node; of a shard that was cut off, none."""
        try:
            return load_file(self._shard(ctx))
        except (OSError, SafetensorError):
            return {}

    def _shard(self, ctx: Context) -> Path:
        return self.folder / f"{ctx.random('shard').getrandbits(64):016x}.safetensors"


async def read_paths(work: Evaluated, rollouts: Path, keeping: Keep, decoders: dict[Purpose, Decoder]) -> Paths:
    """What the searches in a folder came to, and the states that were kept of them; those that are missing are read.

    Raises OptionError where that tells nothing.
    """
    turn, task, done = asyncio.Semaphore(_AT_ONCE), CheckedTask(work.task), 0
    samples = sorted(read_samples(rollouts), key=lambda sample: (sample["index"], sample["repeat"]))

    async def one(sample: dict[str, Any]) -> list[tuple[Tensor, float, float]]:
        nonlocal done
        async with turn:
            tree, leaves = await asyncio.to_thread(read_leaves, rollouts, sample, work.task)
            ends: dict[int, list[tuple[float, int]]] = {}
            for leaf, (_, right) in leaves.items():
                path = tree.path(tree[leaf])
                for node in path[1:]:
                    ends.setdefault(node.id, []).append((right, len(path) - 1))
            seed = derive(work.config.seed, sample["index"], sample["repeat"])
            context = Context(task, tree, Backend(decoders, Meter()), seed=seed).to("evaluate")
            kept = keeping.kept(context)
            if missing := [tree[node] for node in ends if str(node) not in kept]:
                await keeping.evaluate(context, missing)
                kept = keeping.kept(context)
        done += 1
        tell(done, f"{done} of {len(samples)} questions")
        found = []
        for end, each in ends.items():
            right, far = map(fmean, zip(*each, strict=True))
            found.append((kept[str(end)], right, tree[end].depth / far))
        return found

    with counting("reading states", len(samples)) as tell:
        questions = [each for each in await asyncio.gather(*map(one, samples)) if each]
    if not questions:
        raise OptionError("no question has a solution that came to an end: give more, or a model that ends its answers")
    states, labels, along = zip(*chain.from_iterable(questions), strict=True)
    return Paths(
        dict(zip(keeping.read, torch.stack(states, dim=1), strict=True)),
        torch.tensor(labels),
        torch.tensor(along),
        torch.repeat_interleave(torch.arange(len(questions)), torch.tensor([*map(len, questions)])),
    )


# -- heads --------------------------------------------------------------------------------------------------------


def choose(paths: Paths, layers: Sequence[int], about: dict[str, Any], console: Console) -> ValueHead:
    """The head that tells best, of all layers, on questions that none was trained on; calibrated on these.

    Prints how well each layer tells, and the learning curve. Raises OptionError where there is nothing to tell apart.
    """
    apart = paths.questions % _HELD_OUT == _HELD_OUT - 1
    train, held_out = paths.only(~apart), paths.only(apart)
    for some, where in ((train, "trained on"), (held_out, "kept apart")):
        if not _told(some, some.labels):
            count = len(set(some.questions.tolist()))
            raise OptionError(
                f"of the {count} questions {where} none has paths that end right and others that end wrong "
                f"({float(paths.labels.mean()):.0%} of all paths end right): give more, or others, by --limit and "
                "--questions"
            )
    tried = [(layer, decay, fit(train, layer, decay)) for layer in layers for decay in _DECAYS]
    rows = Table("layer", "weight decay", *_PLACES, title=f"{_TITLE}; {len(set(held_out.questions.tolist()))} apart")
    for layer, decay, head in tried:
        rows.add_row(str(layer), f"{decay:g}", *(_shown(each) for each in _figures(head, held_out).values()))
    console.print(rows)
    layer, decay, best = max(tried, key=lambda one: fmean(_told(held_out, one[2].logits(held_out.states[one[0]]))))
    curve = Table("questions", *_PLACES, title=f"layer {layer}: {_TITLE}, by questions trained on")
    questions = sorted(set(train.questions.tolist()))
    for count in [number for number in _CURVE if number < len(questions)]:
        some = train.only(torch.isin(train.questions, torch.tensor(questions[:count])))
        if _told(some, some.labels):
            figures = _figures(fit(some, layer, decay), held_out)
            curve.add_row(str(count), *map(_shown, figures.values()))
    figures = _figures(best, held_out)
    curve.add_row(str(len(questions)), *map(_shown, figures.values()))
    console.print(curve)
    told = {place: None if each is None else asdict(each) for place, each in figures.items()}
    about = {**about, "layer": layer, "questions": len(questions), "auroc": told}
    return _calibrated(replace(best, about=about), held_out)


_TITLE = "pairs of a question's paths of which the better one is valued more (AUROC, with 95% intervals)"
_PLACES: dict[str, Callable[[Tensor], Tensor]] = {
    "all": lambda along: along > 0,
    "ends": lambda along: along == 1,
    "half way": lambda along: (along - 0.5).abs() < 0.17,
}


def _figures(head: ValueHead, paths: Paths) -> dict[str, Estimate | None]:
    values = head.logits(paths.states[head.layer])
    found = {}
    for place, at in _PLACES.items():
        here: Tensor = at(paths.along)
        shares = _told(paths.only(here), values[here])
        found[place] = bootstrap(shares) if shares else None
    return found


def _shown(figure: Estimate | None) -> str:
    return "" if figure is None else figure.format(".2f")


def _told(paths: Paths, values: Tensor) -> list[float]:
    """How well values tell, of each question that has something to tell apart."""
    pairs: dict[int, list[tuple[float, float]]] = {}
    for question, label, value in zip(paths.questions.tolist(), paths.labels.tolist(), values.tolist(), strict=True):
        pairs.setdefault(question, []).append((label, value))
    return [share for each in pairs.values() if (share := told_apart(each)) is not None]


def fit(paths: Paths, layer: int, decay: float) -> ValueHead:
    """A head of a layer's states, by cross-entropy with the labels as probabilities. The same each time."""
    states, labels = paths.states[layer].float(), paths.labels
    mean, scale = states.mean(0), states.std(0).clamp_min(1e-6)
    x = (states - mean) / scale
    weight, bias = torch.zeros(x.shape[1], requires_grad=True), torch.zeros((), requires_grad=True)
    _minimise(lambda: cross_entropy(x @ weight + bias, labels) + decay / 2 * weight.pow(2).sum(), [weight, bias], 200)
    return ValueHead(mean, scale, weight.detach(), bias.detach(), {"layer": layer})


def _minimise(loss: Callable[[], Tensor], parameters: Sequence[Tensor], steps: int) -> None:
    optimizer = torch.optim.LBFGS(parameters, max_iter=steps, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        found = loss()
        found.backward()  # type: ignore[no-untyped-call]
        return found

    with torch.enable_grad():
        optimizer.step(closure)  # type: ignore[no-untyped-call]


def _calibrated(head: ValueHead, paths: Paths) -> ValueHead:
    """The same order of values, as probabilities that hold on these paths (Platt, 1999)."""
    logits = head.logits(paths.states[head.layer])
    slope, shift = torch.ones((), requires_grad=True), torch.zeros((), requires_grad=True)
    _minimise(lambda: cross_entropy(slope.exp() / torch.e * logits + shift, paths.labels), [slope, shift], 50)
    factor = (slope.exp() / torch.e).detach()
    return replace(head, weight=head.weight * factor, bias=head.bias * factor + shift.detach())
