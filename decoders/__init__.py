"""Tokens in, tokens out, fast: decoding methods over one packed engine. Useful without the search layer.

Names are imported when first used, so that reading a request costs no import of torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tot.decoders.budget import Budget, Meter
    from tot.decoders.decoder import METHODS, Decoder, load_decoder
    from tot.decoders.engine.engine import Engine
    from tot.decoders.errors import ModelError, OptionError, RequestError, TaskError, TotError
    from tot.decoders.local import LocalDecoder
    from tot.decoders.methods.autoregressive import Autoregressive
    from tot.decoders.methods.method import Method, OpenedMethod
    from tot.decoders.models.loading import list_models, load_model
    from tot.decoders.open_models import close_models
    from tot.decoders.remote.decoder import RemoteDecoder
    from tot.decoders.request import Completion, Message, Request, Sampling, Usage

_HOME = {
    "budget": ("Budget", "Meter"),
    "decoder": ("METHODS", "Decoder", "load_decoder"),
    "engine.engine": ("Engine",),
    "models.loading": ("list_models", "load_model"),
    "errors": ("ModelError", "OptionError", "RequestError", "TaskError", "TotError"),
    "open_models": ("close_models",),
    "local": ("LocalDecoder",),
    "methods.autoregressive": ("Autoregressive",),
    "methods.method": ("Method", "OpenedMethod"),
    "remote.decoder": ("RemoteDecoder",),
    "request": ("Completion", "Message", "Request", "Sampling", "Usage"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "METHODS",
    "Autoregressive",
    "Budget",
    "Completion",
    "Decoder",
    "Engine",
    "LocalDecoder",
    "Message",
    "Meter",
    "Method",
    "ModelError",
    "OpenedMethod",
    "OptionError",
    "RemoteDecoder",
    "Request",
    "RequestError",
    "Sampling",
    "TaskError",
    "TotError",
    "Usage",
    "close_models",
    "list_models",
    "load_decoder",
    "load_model",
]


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{module}"), name)
