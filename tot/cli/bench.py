"""`tot bench`: benchmarks, both sides in one run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tot.cli import fastcot, pdos, peers, serve
from tot.cli.options import writable
from tot.decoders.errors import OptionError
from tot.options import ModelOptions
from tot.report.terminal import console

app = typer.Typer(
    no_args_is_help=True, help="Benchmarks: both sides in one run, ratios printed.", rich_markup_mode=None
)
app.command("fastcot")(fastcot.bench_command)
app.command("pdos")(pdos.bench_command)
app.command("peers")(peers.bench_command)
app.command("serve")(serve.bench_command)


@app.command("packed")
def packed_command(
    model: Annotated[str, typer.Option(help="A name, a hub id, a folder or a .gguf file.")] = "smollm2-135m",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; the sides take turns and medians are compared.")] = 3,
    out: Annotated[Path | None, typer.Option(help="Write the numbers to this JSON file.")] = None,
) -> None:
    """Packed decoding against model.generate: speed, reuse of prompts, cost of attention, memory."""
    from tot.bench.packed import run

    run(model, rounds, out, console())


@app.command("decoders")
def decoders_command(
    decoders: Annotated[str, typer.Option(help="Decoders, with commas; ar is always among them.")] = "ar,sd,mcsd,seed",
    model: Annotated[str, typer.Option(help="A name, a hub id, a folder or a .gguf file.")] = "smollm2-135m",
    decoder_option: Annotated[
        list[str] | None, typer.Option(help="As for tot solve; given to the decoders that have such an option.")
    ] = None,
    temperatures: Annotated[str, typer.Option(help="With commas.")] = "0.2,1.0",
    samples: Annotated[int, typer.Option(min=1, help="Samples of each prompt (n).")] = 3,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; the sides take turns and medians are compared.")] = 3,
    out: Annotated[Path, typer.Option(help="Write the numbers to this .json file, and pictures beside it.")] = Path(
        "bench-decoders.json"
    ),
) -> None:
    """Decoding methods side by side, as in SEED's tables: serial, in rounds and packed; speed and acceptance."""
    from tot.bench.decoders import run

    try:
        heats = [float(heat) for heat in temperatures.split(",")]
    except ValueError:
        raise OptionError(f"--temperatures {temperatures!r} can't be read: write numbers, such as 0.2,1.0") from None
    run(
        decoders.split(","),
        model,
        ModelOptions(decoder_option=decoder_option or []).decoder_options,
        heats,
        samples,
        rounds,
        writable(out),
        console(),
    )


@app.command("planning")
def planning_command(
    data: Annotated[Path, typer.Option(help="Blocksworld instances: rows with `pddl` and `steps`.")],
    model: Annotated[str, typer.Option(help="A name, a hub id, a folder or a .gguf file.")] = "smollm2-135m",
    count: Annotated[int, typer.Option(min=1, help="Instances, drawn from those that fit.")] = 100,
    steps: Annotated[int, typer.Option(min=1, help="Only instances whose known plan is not longer.")] = 6,
    nodes: Annotated[int, typer.Option(min=1, help="Thoughts a search may grow.")] = 25,
    seeds: Annotated[int, typer.Option(min=1, help="Runs that the sides without a model are averaged over.")] = 10,
) -> None:
    """BFS, RAP and best-first on Blocksworld, each with the model and with chance in its place."""
    from tot.bench.planning import run

    run(data, model, count, steps, nodes, seeds, console())


@app.command("eval")
def eval_command(
    data: Annotated[Path, typer.Option(help="Questions with answers, as for tot eval.")],
    task: Annotated[str, typer.Option(help="What they are questions of.")] = "gsm8k",
    model: Annotated[str, typer.Option(help="A name, a hub id, a folder or a .gguf file.")] = "smollm2-135m",
    searches: Annotated[str, typer.Option(help="Searches, with spaces between them.")] = "cot bfs",
    limit: Annotated[int, typer.Option(min=1, help="Questions.")] = 16,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Most new tokens of any text.")] = None,
    concurrency: Annotated[int, typer.Option(min=2, help="Searches at once, against one at a time.")] = 16,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; the sides take turns and medians are compared.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Write the numbers to this JSON file.")] = None,
) -> None:
    """Evaluating many questions at once against one at a time; what evaluating costs beside decoding."""
    from tot.bench.evaluation import run

    run(task, data, model, searches.split(), limit, max_tokens, concurrency, rounds, out, console())


@app.command("ray")
def ray_command(
    data: Annotated[Path, typer.Option(help="Questions with answers, as for tot eval.")],
    task: Annotated[str, typer.Option(help="What they are questions of.")] = "gsm8k",
    model: Annotated[str, typer.Option(help="A name, a hub id, a folder or a .gguf file.")] = "smollm2-135m",
    search: Annotated[str | None, typer.Option(help="As for tot eval; the task's own by default.")] = None,
    limit: Annotated[int, typer.Option(min=2, help="Questions.")] = 32,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Most new tokens of any text.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Searches at once on each worker.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; the sides take turns and medians are compared.")] = 3,
    out: Annotated[Path | None, typer.Option(help="Write the numbers to this JSON file.")] = None,
) -> None:
    """Two Ray workers of one core each against one, on the same questions."""
    from tot.bench.ray import run

    place = None if out is None else writable(out)
    run(task, data, model, limit, concurrency, rounds, place, console(), search=search, max_tokens=max_tokens)


@app.command("servers")
def servers_command(
    base_url: Annotated[str, typer.Option(help="The server, such as http://127.0.0.1:8000/v1.")],
    model: Annotated[str, typer.Option(help="The model's name at the server.")],
    data: Annotated[Path, typer.Option(help="Questions with answers, as for tot eval.")],
    task: Annotated[str, typer.Option(help="What they are questions of.")] = "gsm8k",
    search: Annotated[str, typer.Option(help="The search, as for tot eval.")] = "bfs:thoughts=3,breadth=2,depth=3",
    limit: Annotated[int, typer.Option(min=1, help="Questions, searched at once on both sides.")] = 16,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most new tokens of any text.")] = 48,
    concurrency: Annotated[int, typer.Option(min=2, help="Most requests in flight, against one at a time.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; the sides take turns and medians are compared.")] = 3,
    out: Annotated[Path | None, typer.Option(help="Write the numbers to this .json file.")] = None,
) -> None:
    """All requests of a level in flight at an OpenAI-compatible server, against one request at a time."""
    from tot.bench.servers import Asked, run

    asked = Asked(base_url, model, data, task, search, limit, max_tokens, concurrency)
    run(asked, rounds, None if out is None else writable(out), console())


@app.command("gpu")
def gpu_command(
    shapes: Annotated[
        str, typer.Option(help="Sizes of models, whose weights are random: llama-2-7b, qwen2.5-7b, tiny; with commas.")
    ] = "llama-2-7b,qwen2.5-7b",
    parts: Annotated[
        str, typer.Option(help="In order of importance, with commas.")
    ] = "limits,packed,pdos,seed,figure_2,caps",
    device: Annotated[str, typer.Option(help="cuda or cpu, for a try with tiny models.")] = "cuda",
    minutes: Annotated[float, typer.Option(min=0, help="What has no time is left out, and named.")] = 9.0,
    branches: Annotated[str, typer.Option(help="Samples of one prompt, with commas.")] = "1,4,16,64,128,256",
    new_tokens: Annotated[int, typer.Option(min=2, help="New tokens of each of them.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; the sides take turns and medians are compared.")] = 3,
    acceptance: Annotated[
        float, typer.Option(min=0, max=1, help="How often the draft model is right: it is made so.")
    ] = 0.6,
    out: Annotated[Path, typer.Option(help="Write the numbers to this .json file, after every round.")] = Path(
        "bench-gpu.json"
    ),
) -> None:
    """Packed decoding against model.generate, parallel steps, SEED and FastCoT on models of 7B's sizes, in bfloat16."""
    from tot.bench.gpu.run import Options, run
    from tot.bench.gpu.sides import Amounts

    try:
        counts = tuple(sorted({int(count) for count in branches.split(",")}))
    except ValueError:
        counts = (0,)
    if counts[0] < 1:
        raise OptionError(f"--branches {branches!r} can't be read: write numbers from 1 on, such as 1,16")
    amounts = Amounts(counts, new_tokens, rounds, acceptance)
    sizes, measured = (tuple(name.strip() for name in given.split(",")) for given in (shapes, parts))
    options = Options(writable(out), sizes, measured, device, minutes, amounts)
    run(options, console())
