"""`tot serve`: a model and its decoders behind an OpenAI-compatible endpoint, until it is told to stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from tot.cli.options import takes
from tot.config import SearchConfig
from tot.decoders.decoder import find_method, method_names
from tot.decoders.errors import OptionError, unknown
from tot.decoders.models.model_names import Quantize
from tot.decoders.remote.network import is_loopback, key_from
from tot.decoders.serving.options import KEY_VARIABLE, Limits
from tot.report.terminal import complain


class ServeOptions(Limits):
    """What is served, to whom, and how much of it."""

    model: str = Field("smollm2-135m", description="A name, a hub id, a folder or a .gguf file.")
    decoder: str = Field("auto", description="The decoder that MODEL stands for; each is MODEL:DECODER.")
    decoder_option: list[str] = Field(
        [], description="As for tot solve; given to the decoders that have such an option."
    )
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = Field("auto", description="As for tot solve.")
    quantize: Quantize = Field("auto", description="As for tot solve.")
    device: str = Field("auto", description="As for tot solve.")
    kv_budget: str | None = Field(None, description="As for tot solve.")
    name: str | None = Field(None, description="What clients call the model; by default its own name.")
    host: str = Field("127.0.0.1", description="Address to listen at; other machines reach only others than this.")
    port: int = Field(8000, ge=0, le=65535, description="0 takes a free one.")
    allowed_host: list[str] = Field(
        [], description="A name that requests may be for, or pages from, besides this machine's."
    )
    max_tokens_limit: int = Field(2048, ge=1, description="Most new tokens of a text.")

    @property
    def limits(self) -> Limits:
        given = {name: getattr(self, name) for name in Limits.model_fields}
        return Limits(**given | {"max_tokens": self.max_tokens_limit})


@takes(ServeOptions)
def serve_command(given: dict[str, Any]) -> None:
    """Serve a model to OpenAI clients; all of them are decoded in the same packed forwards. A key, if one is wanted, is
    taken from the environment variable TOT_SERVE_KEY."""
    from tot.decoders.decoder import checked_options, load_decoder
    from tot.decoders.models.model_names import find_model

    asked = ServeOptions(**given)
    key = key_from(KEY_VARIABLE)
    if key == "":
        raise OptionError(f"{KEY_VARIABLE} is empty: unset it, or give a key")
    methods = method_names()
    if asked.decoder not in methods:
        raise OptionError(unknown("decoder", asked.decoder, methods))
    limits = asked.limits
    shared = ("model", "decoder", "decoder_option", "dtype", "quantize", "device", "kv_budget")
    config = SearchConfig.of(None, {name: getattr(asked, name) for name in shared})
    options = config.model_options
    known_by = {method: find_method(method).options.model_fields for method in methods}
    known = {option for fields in known_by.values() for option in fields}
    for option in options:
        if option not in known:
            raise OptionError(unknown(f"option of {', '.join(sorted(known_by))}", option, known))
    own: dict[str, Any] = {option: value for option, value in options.items() if option in known_by[asked.decoder]}
    checked_options(asked.decoder, own)
    find_model(asked.model)
    try:
        from tot.decoders.serving.app import make_app
        from tot.decoders.serving.server import address_of, listen, serve
        from tot.decoders.serving.service import Service
    except ModuleNotFoundError as error:
        raise OptionError(f"tot serve needs {error.name}: pip install fastapi uvicorn prometheus-client") from None
    from tot.decoders.machine import describe

    loading = config.model_copy(update={"model_options": own}).loading
    with listen(asked.host, asked.port) as listening, load_decoder(asked.decoder, asked.model, **loading) as loaded:
        called = asked.name or (Path(asked.model).name if Path(asked.model).exists() else asked.model)
        service = Service(called, loaded, limits, options)
        near = is_loopback(asked.host)
        if not near and key is None:
            _say(f"{asked.host} is within reach of other machines and there is no key: set {KEY_VARIABLE}")
        hosts = asked.allowed_host if near or asked.allowed_host else None
        app = make_app(service, key, hosts, describe(loaded.engine.loaded.device, loaded.engine.loaded.dtype))
        where = address_of(listening)
        try:
            serve(app, service, listening, lambda: _say(f"{called} ({asked.decoder}) is served at {where}/v1"))
        finally:
            service.close()


def _say(line: str) -> None:
    complain(f"tot serve: {line}")
