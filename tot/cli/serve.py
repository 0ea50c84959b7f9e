"""`tot serve`: a model and its decoders behind an OpenAI-compatible endpoint, until it is told to stop."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from tot.cli.options import writable
from tot.decoders.errors import OptionError
from tot.options import pairs


def serve_command(
    model: Annotated[str, typer.Option(help="A name, a hub id, a folder or a .gguf file.")] = "smollm2-135m",
    decoder: Annotated[str, typer.Option(help="The decoder that the model's plain name stands for.")] = "ar",
    decoder_option: Annotated[
        list[str] | None, typer.Option(help="As for tot solve; given to the decoders that have such an option.")
    ] = None,
    also: Annotated[
        str | None,
        typer.Option(help="Decoders served beside it, as MODEL:DECODER, with commas; by default all, none for none."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="What clients call the model; by default its own name.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen at; other machines reach only others than this.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    allowed_host: Annotated[
        list[str] | None, typer.Option(help="A name that requests may be for, or pages from, besides this machine's.")
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests decoded at once.")] = 64,
    queue: Annotated[int, typer.Option(min=0, help="Requests that may wait; more are refused (429).")] = 256,
    max_tokens_limit: Annotated[int, typer.Option(min=1, help="Most new tokens of a text.")] = 2048,
    max_prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens of a prompt; by default what the model can take.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds a request may take; then it ends by length.")] = 600.0,
    max_body: Annotated[int, typer.Option(min=1, help="Most bytes of a request (413).")] = 2**20,
    grace: Annotated[float, typer.Option(help="Seconds that running requests have to end when it is stopped.")] = 30.0,
    dtype: Annotated[
        Literal["auto", "bf16", "fp16", "fp32"], typer.Option(help="auto: bf16 where the machine computes in it.")
    ] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    quantize: Annotated[
        Literal["none", "int8", "int8-dynamic"],
        typer.Option(help="Weights in eight bits; int8-dynamic: their inputs as well. For Llama-like models on CPUs."),
    ] = "none",
    kv_budget: Annotated[
        str | None, typer.Option(help="Store of keys and values, in tokens or bytes (1.5GiB).")
    ] = None,
) -> None:
    """Serve a model to OpenAI clients; all of them are decoded in the same packed forwards. A key, if one is wanted, is
    taken from the environment variable TOT_SERVE_KEY."""
    try:
        from tot.decoders.serving.guard import is_loopback
        from tot.decoders.serving.limits import KEY_VARIABLE, Limits
    except ModuleNotFoundError as error:
        raise OptionError(f"tot serve needs {error.name}: pip install 'tot[serve]'") from None
    from tot.decoders.decoder import METHODS, checked_options, load_decoder, options_of
    from tot.decoders.errors import unknown
    from tot.decoders.models.model_names import find_model

    key = os.environ.get(KEY_VARIABLE)
    if key is not None and not key.strip():
        raise OptionError(f"{KEY_VARIABLE} is empty: unset it, or give a key")
    limits = Limits(
        concurrency=concurrency,
        queue=queue,
        max_tokens=max_tokens_limit,
        max_prompt_tokens=max_prompt_tokens,
        timeout=timeout,
        max_body=max_body,
        grace=grace,
    )
    offered = _offered(also, METHODS)
    options: dict[str, Any] = {**pairs(decoder_option or [])}
    for method in (decoder, *offered):
        if method not in METHODS:
            raise OptionError(unknown("decoder", method, METHODS))
    known = {option for method in {decoder, *offered} for option in options_of(method).model_fields}
    for option in options:
        if option not in known:
            raise OptionError(unknown(f"option of {', '.join(sorted({decoder, *offered}))}", option, known))
    own = {option: value for option, value in options.items() if option in options_of(decoder).model_fields}
    checked_options(decoder, own)
    find_model(model)
    try:
        from tot.decoders.serving.app import make_app
        from tot.decoders.serving.server import address_of, listen, serve
        from tot.decoders.serving.service import Service
    except ModuleNotFoundError as error:
        raise OptionError(f"tot serve needs {error.name}: pip install 'tot[serve]'") from None
    from tot.machine import describe

    with listen(host, port) as listening:
        packing = None if quantize == "none" else quantize
        loaded = load_decoder(decoder, model, dtype=dtype, device=device, kv_budget=kv_budget, quantize=packing, **own)
        with loaded:
            called = name or (Path(model).name if Path(model).exists() else model)
            service = Service(called, loaded, limits, options, offered)
            near = is_loopback(host)
            if not near and key is None:
                _say(f"{host} is within reach of other machines and there is no key: set {KEY_VARIABLE}")
            hosts = (allowed_host or []) if near or allowed_host else None
            app = make_app(service, key, hosts, describe(loaded.engine.loaded.device, loaded.engine.loaded.dtype))
            where = address_of(listening)
            try:
                serve(app, service, listening, lambda: _say(f"{called} ({decoder}) is served at {where}/v1"))
            finally:
                service.close()


def bench_command(
    model: Annotated[str, typer.Option(help="A name, a hub id, a folder or a .gguf file.")] = "smollm2-135m",
    decoder: Annotated[str, typer.Option(help="A decoder.")] = "ar",
    decoder_option: Annotated[list[str] | None, typer.Option(help="As for tot serve.")] = None,
    clients: Annotated[int, typer.Option(min=2, help="Clients at once, against one.")] = 16,
    requests: Annotated[int, typer.Option(min=1, help="Requests of each client in a round.")] = 2,
    tokens: Annotated[int, typer.Option(min=1, help="New tokens of each reply.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; the sides take turns and medians are compared.")] = 3,
    out: Annotated[Path | None, typer.Option(help="Write the numbers to this JSON file.")] = None,
) -> None:
    """A server with many clients at once against the same server with one: tokens a second, tokens a forward."""
    from tot.bench.serve import run
    from tot.report.terminal import console

    options = ["--decoder", decoder]
    for option in decoder_option or []:
        options += ["--decoder-option", option]
    run(model, options, clients, requests, tokens, rounds, None if out is None else writable(out), console())


def _offered(also: str | None, methods: Iterable[str]) -> tuple[str, ...]:
    if also is None:
        return tuple(methods)
    return tuple(name.strip() for name in also.split(",")) if also != "none" else ()


def _say(line: str) -> None:
    sys.stderr.write(f"tot serve: {line}\n")
    sys.stderr.flush()
