"""`tot serve`: serve a model and its decoders at an OpenAI-compatible endpoint."""

from __future__ import annotations

from contextlib import ExitStack, closing
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from tot.cli.flags import takes
from tot.config import read_options
from tot.decoders.decoder import REMOTE, find_method, method_names
from tot.decoders.errors import OptionError, unknown
from tot.decoders.models.engine_options import EngineOptions
from tot.decoders.remote.network import is_loopback, key_from
from tot.decoders.serving.limits import KEY_VARIABLE, Limits
from tot.report.terminal import complain

if TYPE_CHECKING:
    from tot.decoders.remote.decoder import RemoteDecoder


class ServeOptions(Limits):
    """The options of the server: model, decoders, address and limits."""

    model: str = Field("smollm2-135m", description="A name, a hub id, a folder or a .gguf file.")
    decoder: str = Field(
        "auto",
        description="The decoder of requests for MODEL, and of searches; MODEL:DECODER selects another. openai: the "
        "server at base_url.",
    )
    decoder_option: list[str] = Field([], description="As for tot solve; applies to each decoder that has the option.")
    searches: Path | None = Field(
        None, description="YAML file of searches, each served as MODEL:NAME; by default vote, best, tree and code."
    )
    live: bool | None = Field(
        None, description="Show the searches on a page while they run; by default only if --host is loopback."
    )
    name: str | None = Field(None, description="The model's name for clients; by default its own name.")
    host: str = Field("127.0.0.1", description="Address to listen on; by default, only this machine can connect.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 chooses a free port.")
    allowed_host: list[str] = Field(
        [], description="Additional host name that requests may be addressed to, or come from (Origin)."
    )


@takes(ServeOptions, EngineOptions)
def serve_command(given: dict[str, Any]) -> None:
    """Serve a model to OpenAI clients, whose requests share packed forward passes. The environment variable
    TOT_SERVE_KEY sets an optional API key."""
    settings = ServeOptions(**{name: value for name, value in given.items() if name in ServeOptions.model_fields})
    key = key_from(KEY_VARIABLE)
    if key == "":
        raise OptionError(f"{KEY_VARIABLE} is empty: unset it, or set a key")
    engine = EngineOptions(**{name: one for name, one in given.items() if name in EngineOptions.model_fields})
    options = read_options(settings.decoder_option)
    loading = {**engine.model_dump(exclude_defaults=True), **_own_options(settings.decoder, options)}
    from tot.decoders.decoder import LocalDecoder, load_decoder
    from tot.decoders.machine import describe
    from tot.decoders.serving.app import make_app
    from tot.decoders.serving.completions import DecodingMethods
    from tot.decoders.serving.server import address_of, listen, serve
    from tot.decoders.serving.service import Service, Source
    from tot.llm.decoders import FILTERS, filters_of
    from tot.serving.live import LiveSearches
    from tot.serving.pages import Pages
    from tot.serving.search_models import SearchModels
    from tot.serving.searches import load_searches

    local = is_loopback(settings.host)
    with (
        listen(settings.host, settings.port) as socket,
        load_decoder(settings.decoder, settings.model, **loading) as decoder,
        ExitStack() as stack,
    ):
        name = settings.name or (Path(settings.model).name if Path(settings.model).exists() else settings.model)
        about, sources = {"model": name, "decoder": settings.decoder, "machine": None}, list[Source]()
        if isinstance(decoder, LocalDecoder):
            about["machine"] = describe(decoder.engine.loaded.device, decoder.engine.loaded.dtype)
            sampling = filters_of(settings.model, {}, names=("temperature", *FILTERS))
            methods = DecodingMethods(name, decoder, settings, options, sampling)
            sources.append(stack.enter_context(closing(methods)))
        else:
            _check_model(decoder)
        runs = LiveSearches() if settings.live or (settings.live is None and local) else None
        served = load_searches(settings.searches, decoder, tuple(method_names()))
        searches = SearchModels(name, served, settings, runs)
        service = Service([*sources, searches], settings, about)
        if not local and key is None:
            _log(f"{settings.host} accepts other machines without an API key: set {KEY_VARIABLE}")
        hosts = settings.allowed_host if local or settings.allowed_host else None
        gate, address = searches.gate, address_of(socket)
        pages = None if runs is None else Pages(runs, f"Searches of {name}", lambda: gate.closed and not gate.running)

        def ready() -> None:
            if pages is not None:
                _log(f"searches are shown at {address}{pages.path}")
            _log(f"{name} ({settings.decoder}) is served at {address}/v1")

        serve(make_app(service, key, hosts, None if pages is None else pages.router), service, socket, ready)


def _own_options(decoder: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of the chosen decoder. Raises OptionError if no decoder has one."""
    if decoder in REMOTE:
        return options
    fields_of = {method: find_method(method).options.model_fields for method in method_names()}
    known = {option for fields in fields_of.values() for option in fields}
    for option in options:
        if option not in known:
            raise OptionError(unknown(f"option of {', '.join(sorted(fields_of))}", option, known))
    own = find_method(decoder).options.model_fields
    return {option: value for option, value in options.items() if option in own}


def _check_model(decoder: RemoteDecoder) -> None:
    """Raise OptionError if a server lists models, but not the decoder's."""
    models = decoder.served_models  # Ollama adds a tag to a name, and LiteLLM lists patterns
    if models and not any(fnmatchcase(decoder.model, one) or one == f"{decoder.model}:latest" for one in models):
        raise OptionError(f"the server of --decoder openai: {unknown('model', decoder.model, models)}")


def _log(line: str) -> None:
    complain(f"tot serve: {line}")
