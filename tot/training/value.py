"""`tot train-value`: train a head that predicts from a model's hidden states whether a path leads to a correct answer.

Questions are searched by trees without pruning. A path's label is the share of its solutions that are correct
(Math-Shepherd, Wang et al., 2024, section 3.2), so only final answers are needed. Intermediate files allow an
interrupted run to resume.
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

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy

from tot.decoders.budget import Meter
from tot.decoders.decoder import Decoder
from tot.decoders.errors import OptionError
from tot.decoders.files import replacing, writing
from tot.decoders.request import Purpose
from tot.decoders.training.options import ValueOptions
from tot.decoders.training.resuming import check_settings
from tot.evaluation.estimate import Estimate, estimate, told_apart
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
"""Number of trees whose states are read concurrently."""
_FREE = ("limit", "concurrency")
"""Settings that may change when a run resumes; the limit may only rise."""
_HELD_OUT = 5
"""Every 5th question is held out for choosing a head."""
_DECAYS = (1e-3, 1e-2, 1e-1)
"""Weight decays to try."""
_CURVE = (50, 100, 200, 400, 800, 1600)
"""Numbers of questions of the learning curve."""


def run(source: str, model: str, options: ValueOptions, out: Path, folder: Path | None, console: Console) -> Path:
    """Search, read states, train and choose a head, write it to `out`, and print its accuracy.

    `source` is "task=file"; `folder` has the intermediate files, by default beside `out`.
    """
    name, equals, data = source.partition("=")
    if not equals:
        raise OptionError(f"--questions {source!r} can't be read: write TASK=FILE, such as gsm8k=train.jsonl")
    folder = out.with_name(f"{out.stem}-work") if folder is None else folder
    search = f"bfs:thoughts=2,breadth={options.samples},select=all,aggregate=majority"
    requested = {"task": name, "data": data, "model": model, "limit": options.limit, "seed": options.seed}
    requested |= {"search": search, "evaluator": "random"}
    requested |= {"dtype": options.dtype, "quantize": options.quantize, "concurrency": options.concurrency}
    work = Evaluated.read(requested)
    if not isinstance(work.parts["generator"], Continue):
        raise OptionError(
            f"the thoughts of {name} are not parts of one message, which value heads need: choose a task whose "
            "generator is continue, and a model with a chat template if the task has prompts for chat models"
        )
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        decoders = work.config.open(stack)
        engine = getattr(decoders["generate"], "engine", None)
        if engine is None:
            raise OptionError(f"{model} provides no hidden states: give a local model")
        layers = options.layers or _layers(engine.loaded.config.num_hidden_layers)
        fixed = {name: value for name, value in requested.items() if name not in _FREE}
        check_settings(folder / "settings.json", {**fixed, "layers": list(layers)})
        keeping = Keep(folder=folder / "states", read=layers)
        keeping.folder.mkdir(exist_ok=True)
        rollouts = folder / "rollouts"
        recording = replace(work, parts={**work.parts, "evaluator": keeping})
        results = run_evaluation(recording, rollouts, rollouts.exists(), None)
        console.print(f"{results.score_text}, {results.questions} questions, in {rollouts}")
        about = {"model": model, "identity": engine.loaded.identity, "prompts": work.task.prompts, "task": name}
        paths = run_to_end(read_paths(work, rollouts, keeping, decoders))
    head = choose(paths, layers, about, console)
    head.save(out)
    console.print(f"{out}: layer {head.layer}; use it as --evaluator head:path={out}")
    return out


def _layers(last: int) -> tuple[int, ...]:
    """Return the layers at 1/2, 2/3, 5/6 and all of the depth."""
    return tuple(sorted({max(1, round(last * share)) for share in (1 / 2, 2 / 3, 5 / 6, 1)}))


# -- states -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Paths:
    """Partial solutions with their states and labels."""

    states: dict[int, Tensor]
    """By layer, (paths, hidden) in float16."""
    labels: Tensor
    """(paths,): the share of the solutions from there that are correct."""
    along: Tensor
    """(paths,): depth relative to the mean depth of those solutions; 1 is a leaf."""
    questions: Tensor
    """(paths,): the index of the question."""

    def only(self, which: Tensor) -> Paths:
        """Return the paths where the mask `which`, (paths,), is true."""
        states = {layer: tensor[which] for layer, tensor in self.states.items()}
        return Paths(states, self.labels[which], self.along[which], self.questions[which])


class Keep(Evaluator):
    """Evaluate all paths as 0, and save the states at their ends in half precision, one shard per search."""

    folder: Path
    read: tuple[int, ...]
    """Layers."""

    @property
    def layers(self) -> tuple[int, ...]:
        return self.read

    async def evaluate(self, ctx: Context, nodes: Sequence[Node]) -> list[Evaluation]:
        replies = await ctx.each(nodes, lambda node: ctx.ending(node, self.read))
        new = {str(node.id): states for node, (states, _) in zip(nodes, replies, strict=True) if states is not None}
        path = self._shard(ctx)
        with writing(path), replacing(path) as file:
            save_file({**self.kept(ctx), **new}, file.name, {"question": ctx.state(ctx.tree.root).question})
        return [Evaluation(0.0) if reply is None else reply.evaluation(0.0) for _, reply in replies]

    def kept(self, ctx: Context) -> dict[str, np.ndarray[Any, Any]]:
        """Return the states at the ends of a search's paths, (layers, hidden), by node; {} for a damaged shard."""
        try:
            return load_file(self._shard(ctx))
        except (OSError, SafetensorError):
            return {}

    def _shard(self, ctx: Context) -> Path:
        return self.folder / f"{ctx.random('shard').getrandbits(64):016x}.safetensors"


async def read_paths(work: Evaluated, rollouts: Path, keeping: Keep, decoders: dict[Purpose, Decoder]) -> Paths:
    """Return the paths of the searches in a folder with their states, and compute missing states.

    Raises OptionError if no question has a complete solution.
    """
    semaphore, task, done = asyncio.Semaphore(_AT_ONCE), CheckedTask(work.task), 0
    samples = sorted(read_samples(rollouts), key=lambda sample: (sample["index"], sample["repeat"]))

    async def one(sample: dict[str, Any]) -> list[tuple[np.ndarray[Any, Any], float, float]]:
        nonlocal done
        async with semaphore:
            tree, leaves = await asyncio.to_thread(read_leaves, rollouts, sample, work.task)
            ends: dict[int, list[tuple[float, int]]] = {}
            for leaf, (_, score) in leaves.items():
                path = tree.path(tree[leaf])
                for node in path[1:]:
                    ends.setdefault(node.id, []).append((score, len(path) - 1))
            seed = derive(work.config.seed, sample["index"], sample["repeat"])
            context = Context(task, tree, Backend(decoders, Meter()), seed=seed).to("evaluate")
            states = keeping.kept(context)
            if missing := [tree[node] for node in ends if str(node) not in states]:
                await keeping.evaluate(context, missing)
                states = keeping.kept(context)
        done += 1
        tell(done, f"{done} of {len(samples)} questions")
        result = []
        for end, solutions in ends.items():
            label, depth = map(fmean, zip(*solutions, strict=True))
            result.append((states[str(end)], label, tree[end].depth / depth))
        return result

    with counting("reading states", len(samples)) as tell:
        questions = [paths for paths in await asyncio.gather(*map(one, samples)) if paths]
    if not questions:
        raise OptionError("no question has a complete solution: give more, or a model that finishes its answers")
    states, labels, along = zip(*chain.from_iterable(questions), strict=True)
    return Paths(
        dict(zip(keeping.read, torch.from_numpy(np.stack(states, axis=1)), strict=True)),
        torch.tensor(labels),
        torch.tensor(along),
        torch.repeat_interleave(torch.arange(len(questions)), torch.tensor([*map(len, questions)])),
    )


# -- heads --------------------------------------------------------------------------------------------------------


def choose(paths: Paths, layers: Sequence[int], about: dict[str, Any], console: Console) -> ValueHead:
    """Return the head with the best AUROC on held-out questions, of all layers, calibrated on these questions.

    Prints the AUROC of each layer and the learning curve. Raises OptionError if all paths of every question are equal.
    """
    is_held_out = paths.questions % _HELD_OUT == _HELD_OUT - 1
    train, held_out = paths.only(~is_held_out), paths.only(is_held_out)
    for subset, name in ((train, "training"), (held_out, "held-out")):
        if not _aurocs(subset, subset.labels):
            count = len(set(subset.questions.tolist()))
            raise OptionError(
                f"no question of the {count} {name} ones has both correct and incorrect paths "
                f"({float(paths.labels.mean()):.0%} of all paths are correct): give more, or other, questions with "
                "--limit and --questions"
            )
    trials = [(layer, decay, fit(train, layer, decay)) for layer in layers for decay in _DECAYS]
    rows = Table("layer", "weight decay", *_PLACES, title=f"{_TITLE}; {len(set(held_out.questions.tolist()))} held out")
    for layer, decay, head in trials:
        rows.add_row(str(layer), f"{decay:g}", *(_formatted(figure) for figure in _figures(head, held_out).values()))
    console.print(rows)
    layer, decay, best = max(
        trials, key=lambda trial: fmean(_aurocs(held_out, trial[2].logits(held_out.states[trial[0]])))
    )
    curve = Table("questions", *_PLACES, title=f"layer {layer}: {_TITLE}, by number of training questions")
    questions = sorted(set(train.questions.tolist()))
    for count in [number for number in _CURVE if number < len(questions)]:
        subset = train.only(torch.isin(train.questions, torch.tensor(questions[:count])))
        if _aurocs(subset, subset.labels):
            figures = _figures(fit(subset, layer, decay), held_out)
            curve.add_row(str(count), *map(_formatted, figures.values()))
    figures = _figures(best, held_out)
    curve.add_row(str(len(questions)), *map(_formatted, figures.values()))
    console.print(curve)
    aurocs = {place: None if figure is None else asdict(figure) for place, figure in figures.items()}
    about = {**about, "layer": layer, "questions": len(questions), "auroc": aurocs}
    return _calibrated(replace(best, about=about), held_out)


_TITLE = "AUROC over pairs of paths of one question, with 95% intervals"
_PLACES: dict[str, Callable[[Tensor], Tensor]] = {
    "all": lambda along: along > 0,
    "ends": lambda along: along == 1,
    "half way": lambda along: (along - 0.5).abs() < 0.17,
}


def _figures(head: ValueHead, paths: Paths) -> dict[str, Estimate | None]:
    values = head.logits(paths.states[head.layer])
    figures = {}
    for place, select in _PLACES.items():
        mask: Tensor = select(paths.along)
        shares = _aurocs(paths.only(mask), values[mask])
        figures[place] = estimate(shares) if shares else None
    return figures


def _formatted(figure: Estimate | None) -> str:
    return "" if figure is None else figure.format(".2f")


def _aurocs(paths: Paths, values: Tensor) -> list[float]:
    """Return the AUROC of values for each question whose paths have different labels."""
    pairs: dict[int, list[tuple[float, float]]] = {}
    for question, label, value in zip(paths.questions.tolist(), paths.labels.tolist(), values.tolist(), strict=True):
        pairs.setdefault(question, []).append((label, value))
    return [share for judged in pairs.values() if (share := told_apart(judged)) is not None]


def fit(paths: Paths, layer: int, decay: float) -> ValueHead:
    """Fit a linear head to a layer's states by cross-entropy with the labels as probabilities. Deterministic."""
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
        value = loss()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    with torch.enable_grad():
        optimizer.step(closure)  # type: ignore[no-untyped-call]


def _calibrated(head: ValueHead, paths: Paths) -> ValueHead:
    """Rescale a head's logits to calibrated probabilities on these paths, keeping their order (Platt, 1999)."""
    logits = head.logits(paths.states[head.layer])
    slope, shift = torch.ones((), requires_grad=True), torch.zeros((), requires_grad=True)
    _minimise(lambda: cross_entropy(slope.exp() / torch.e * logits + shift, paths.labels), [slope, shift], 50)
    factor = (slope.exp() / torch.e).detach()
    return replace(head, weight=head.weight * factor, bias=head.bias * factor + shift.detach())
