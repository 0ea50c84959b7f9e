"""`tot bench`: benchmarks, all sides in one run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tot.cli.options import writable
from tot.decoders.errors import OptionError
from tot.options import ModelOptions
from tot.report.terminal import console

app = typer.Typer(no_args_is_help=True, help="Benchmarks: all sides in one run, ratios printed.", rich_markup_mode=None)

Model = Annotated[str, typer.Option(help="A name, a hub id, a folder or a .gguf file.")]
Rounds = Annotated[int, typer.Option(min=1, help="Rounds; the sides take turns and medians are compared.")]
Out = Annotated[
    Path | None,
    typer.Option(help="Write the numbers to this .json file as they come, or go on with it."),
]
OutPictures = Annotated[
    Path, typer.Option(help="Write the numbers to this .json file as they come, and pictures beside it.")
]
Data = Annotated[Path, typer.Option(help="Questions with answers, as for tot eval.")]
TaskName = Annotated[str, typer.Option("--task", help="What they are questions of.")]
MaxTokens = Annotated[int | None, typer.Option(min=1, help="Most new tokens of any text.")]


@app.command("packed")
def packed_command(model: Model = "smollm2-135m", rounds: Rounds = 3, out: Out = None) -> None:
    """Packed decoding against model.generate: speed, reuse of prompts, cost of attention, memory."""
    from tot.bench.packed import run

    run(model, rounds, _checked(out), console())


@app.command("decoders")
def decoders_command(
    decoders: Annotated[str, typer.Option(help="Decoders, with commas; ar is always among them.")] = "ar,sd,mcsd,seed",
    model: Model = "smollm2-135m",
    decoder_option: Annotated[
        list[str] | None, typer.Option(help="As for tot solve; given to the decoders that have such an option.")
    ] = None,
    temperatures: Annotated[str, typer.Option(help="With commas.")] = "0.2,1.0",
    samples: Annotated[int, typer.Option(min=1, help="Samples of each prompt (n).")] = 3,
    rounds: Rounds = 3,
    out: OutPictures = Path("bench-decoders.json"),
) -> None:
    """Decoding methods side by side, as in SEED's tables: serial, in rounds and packed; speed and acceptance."""
    from tot.bench.decoders import run

    heats = _numbers("temperatures", temperatures, "0.2,1.0", float)
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


@app.command("fastcot")
def fastcot_command(
    data: Annotated[str, typer.Option(help="Questions with answers, as for tot eval.")],
    task: TaskName = "multiple_choice",
    model: Model = "smollm2-135m",
    limit: Annotated[int, typer.Option(min=4, help="Questions, half to calibrate on, half to test.")] = 100,
    timed: Annotated[int, typer.Option(min=1, help="Questions of the latter that are timed.")] = 16,
    max_tokens: Annotated[int, typer.Option(min=2, help="Most tokens of a rationale.")] = 128,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of what is masked in rationales.")] = 5,
    out: OutPictures = Path("bench-fastcot.json"),
) -> None:
    """FastCoT against whole rationales: time, accuracy, answers unchanged; the paper's tables and figures."""
    from tot.bench.fastcot import run

    run(task, data, model, limit, timed, max_tokens, seeds, writable(out), console())


@app.command("pdos")
def pdos_command(
    tasks: Annotated[
        str | None,
        typer.Option(help="With commas: retrieval, planning, qa. By default the first two, and qa where --data is."),
    ] = None,
    model: Model = "smollm2-135m",
    people: Annotated[
        str | None, typer.Option(help="Retrieval: how many people, 4 to 100, with commas; by default 10.")
    ] = None,
    aspects: Annotated[
        str | None, typer.Option(help="Planning: how many aspects, 2 to 10, with commas; by default 2,4,6,8,10.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="QA: a .jsonl file in the format of LongBench's 2WikiMultihopQA, with input, context, answers."
        ),
    ] = None,
    judge: Annotated[
        str | None,
        typer.Option(help="The model that marks plans and answers from 1 to 5; by default the one that writes them."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Questions of each kind; the sides take turns at each.")] = 3,
    out: Out = None,
) -> None:
    """Parallel steps against normal decoding, skeleton-of-thought and chain-of-draft: quality, speed, memory."""
    from tot.bench.pdos import Chosen, run

    named = tasks or ("retrieval,planning" if data is None else "retrieval,planning,qa")
    chosen = Chosen(
        _names(named),
        _numbers("people", people, "4,10"),
        _numbers("aspects", aspects, "4,10"),
        data,
        judge,
        rounds,
    )
    run(model, chosen, _checked(out), console())


@app.command("peers")
def peers_command(
    model: Model = "smollm2-135m",
    parts: Annotated[
        str, typer.Option(help="With commas: decode, limit, tree, evaluations, answers.")
    ] = "decode,limit,tree,evaluations,answers",
    sides: Annotated[
        str,
        typer.Option(
            help="What to compare with, with commas: int8 (our own), batched, serial, assisted, continuous (all "
            "transformers), llama, vllm."
        ),
    ] = "int8,batched,serial,assisted,continuous,llama,vllm",
    branches: Annotated[str, typer.Option(help="Samples of one prompt, with commas.")] = "1,3,5,15,32,64",
    new_tokens: Annotated[int, typer.Option(min=1, help="New tokens of each of them.")] = 64,
    rounds: Rounds = 3,
    problems: Annotated[int, typer.Option(min=1, help="Problems that are searched, one a round.")] = 8,
    data: Annotated[Path | None, typer.Option(help="GSM8K problems, as for tot eval; the task's own without.")] = None,
    patience: Annotated[
        float, typer.Option(min=0, help="Seconds: what will take longer is done once; three times as long, not at all.")
    ] = 60.0,
    vllm: Annotated[Path, typer.Option(help="The Python that has vLLM (make peers).")] = Path(".venv-vllm/bin/python"),
    llama: Annotated[Path, typer.Option(help="The Python that has llama-cpp-python (make peers).")] = Path(
        ".venv-llama/bin/python"
    ),
    out: Out = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the tables as Markdown.")] = False,
) -> None:
    """Branches and whole searches, here and in transformers, llama.cpp and vLLM."""
    from tot.bench.peers import Options, run
    from tot.bench.peers_sides import Plan

    options = Options(
        Plan(model, vllm, llama, _names(sides)),
        branches=_counts("branches", branches),
        rounds=rounds,
        new_tokens=new_tokens,
        problems=problems,
        data=data,
        patience=patience,
        parts=_names(parts),
    )
    run(options, _checked(out), markdown, console())


@app.command("serve")
def serve_command(
    model: Model = "smollm2-135m",
    decoder: Annotated[str, typer.Option(help="A decoder.")] = "ar",
    decoder_option: Annotated[list[str] | None, typer.Option(help="As for tot serve.")] = None,
    clients: Annotated[int, typer.Option(min=2, help="Clients at once, against one.")] = 16,
    requests: Annotated[int, typer.Option(min=1, help="Requests of each client in a round.")] = 2,
    tokens: Annotated[int, typer.Option(min=1, help="New tokens of each reply.")] = 64,
    rounds: Rounds = 3,
    out: Out = None,
) -> None:
    """A server with many clients at once against the same server with one: tokens a second, tokens a forward."""
    from tot.bench.serve import run

    options = ["--decoder", decoder, *(part for each in decoder_option or [] for part in ("--decoder-option", each))]
    run(model, options, clients, requests, tokens, rounds, _checked(out), console())


@app.command("planning")
def planning_command(
    data: Annotated[Path, typer.Option(help="Blocksworld instances: rows with `pddl` and `steps`.")],
    model: Model = "smollm2-135m",
    count: Annotated[int, typer.Option(min=1, help="Instances, drawn from those that fit.")] = 100,
    steps: Annotated[int, typer.Option(min=1, help="Only instances whose known plan is not longer.")] = 6,
    nodes: Annotated[int, typer.Option(min=1, help="Thoughts a search may grow.")] = 25,
    seeds: Annotated[int, typer.Option(min=1, help="Runs that the sides without a model are averaged over.")] = 10,
    out: Out = None,
) -> None:
    """BFS, RAP and best-first on Blocksworld, each with the model and with chance in its place."""
    from tot.bench.planning import run

    run(data, model, count, steps, nodes, seeds, _checked(out), console())


@app.command("eval")
def eval_command(
    data: Data,
    task: TaskName = "gsm8k",
    model: Model = "smollm2-135m",
    searches: Annotated[str, typer.Option(help="Searches, with spaces between them.")] = "cot bfs",
    limit: Annotated[int, typer.Option(min=1, help="Questions.")] = 16,
    max_tokens: MaxTokens = None,
    concurrency: Annotated[int, typer.Option(min=2, help="Searches at once, against one at a time.")] = 16,
    rounds: Rounds = 1,
    out: Out = None,
) -> None:
    """Evaluating many questions at once against one at a time; what evaluating costs beside decoding."""
    from tot.bench.evaluation import run

    asked: dict[str, Any] = {"task": task, "model": model, "limit": limit, "max_tokens": max_tokens}
    run(data, searches.split(), concurrency, rounds, _checked(out), console(), **asked)


@app.command("ray")
def ray_command(
    data: Data,
    task: TaskName = "gsm8k",
    model: Model = "smollm2-135m",
    search: Annotated[str | None, typer.Option(help="As for tot eval; the task's own by default.")] = None,
    limit: Annotated[int, typer.Option(min=2, help="Questions.")] = 32,
    max_tokens: MaxTokens = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Searches at once on each worker.")] = 8,
    rounds: Rounds = 3,
    out: Out = None,
) -> None:
    """Two Ray workers of one core each against one, on the same questions."""
    from tot.bench.ray import run

    asked: dict[str, Any] = {"task": task, "model": model, "search": search, "limit": limit, "max_tokens": max_tokens}
    run(data, concurrency, rounds, _checked(out), console(), **asked)


@app.command("servers")
def servers_command(
    base_url: Annotated[str, typer.Option(help="The server, such as http://127.0.0.1:8000/v1.")],
    model: Annotated[str, typer.Option(help="The model's name at the server.")],
    data: Data,
    task: TaskName = "gsm8k",
    search: Annotated[str, typer.Option(help="The search, as for tot eval.")] = "bfs:thoughts=3,breadth=2,depth=3",
    limit: Annotated[int, typer.Option(min=1, help="Questions, searched at once on both sides.")] = 16,
    max_tokens: MaxTokens = 48,
    concurrency: Annotated[int, typer.Option(min=2, help="Most requests in flight, against one at a time.")] = 64,
    rounds: Rounds = 3,
    out: Out = None,
) -> None:
    """All requests of a level in flight at an OpenAI-compatible server, against one request at a time."""
    from tot.bench.servers import run

    asked: dict[str, Any] = {"task": task, "search": search, "limit": limit, "max_tokens": max_tokens}
    run(base_url, model, data, concurrency, rounds, _checked(out), console(), **asked)


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
    rounds: Rounds = 3,
    out: OutPictures = Path("bench-gpu.json"),
) -> None:
    """Packed decoding against model.generate, parallel steps, SEED and FastCoT on models of 7B's sizes, in bfloat16."""
    from tot.bench.gpu import Options, run

    counts = _counts("branches", branches)
    options = Options(_names(shapes), _names(parts), device, minutes, counts, new_tokens, rounds)
    run(options, writable(out), console())


def _checked(out: Path | None) -> Path | None:
    return None if out is None else writable(out)


def _names(given: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in given.split(","))


def _numbers(option: str, given: str | None, example: str, kind: Any = int) -> tuple[Any, ...]:
    """None given are none."""
    try:
        return tuple(kind(number) for number in given.split(",")) if given is not None else ()
    except ValueError:
        raise OptionError(f"--{option} {given!r} can't be read: write numbers, such as {example}") from None


def _counts(option: str, given: str) -> tuple[int, ...]:
    """In order, from the least."""
    counts = tuple(sorted(set(_numbers(option, given, "1,15"))))
    if counts[0] < 1:
        raise OptionError(f"--{option} {given!r} can't be read: write numbers from 1 on, such as 1,15")
    return counts
