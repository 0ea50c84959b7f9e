"""The decoding methods by name, one line each. Importing this imports no torch: a method is imported when it is opened.

A speculative method is a drafter, and options that describe its tree: `k_config` (candidates at each position), and
where they differ from the defaults `rule`, `adapt`, `probes` and `trajectory`, as for `Speculation`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from tot.decoders.methods import options as of
from tot.decoders.methods.method import Method, OpenedMethod

if TYPE_CHECKING:
    from tot.decoders.engine.engine import Engine

_Open = Callable[["Engine", Any, ExitStack], OpenedMethod]


def _part(place: str) -> Any:
    """The object at "module:name" of this folder."""
    module, _, name = place.partition(":")
    return getattr(import_module(f"tot.decoders.methods.{module}"), name)


def _speculative(drafter: str) -> _Open:
    """Speculative decoding with a drafter that the function at this place makes."""

    def opened(engine: Engine, options: Any, stack: ExitStack) -> OpenedMethod:
        from tot.decoders.methods.speculative import Speculation, Speculative

        made = _part(drafter)(engine, options, stack)
        special = {
            name: getattr(options, name) for name in ("rule", "adapt", "probes", "trajectory") if hasattr(options, name)
        }
        shared = Speculation(engine, made, options.k_config, **special)
        return OpenedMethod(partial(Speculative, speculation=shared), made)

    return opened


def _own(place: str) -> _Open:
    """A method with a policy of its own."""
    return lambda engine, options, stack: _part(place)(engine, options, stack)


def _seed(engine: Engine, options: of.SEEDOptions, stack: ExitStack) -> OpenedMethod:
    """SEED: packed is speculative decoding with adaptive trees; rounds is the paper's queue."""
    opened = _speculative("speculative:make_drafter") if options.policy == "packed" else _own("seed:open_rounds")
    return opened(engine, options, stack)


PRESETS: dict[str, Method] = {
    "ar": Method(lambda *_: OpenedMethod(_part("autoregressive:Autoregressive"))),
    "auto": Method(_speculative("auto:make_auto_drafter"), of.AutoOptions),
    "fastcot": Method(_own("fastcot:open_fastcot"), of.FastCoTOptions, few_shot=True),
    "jacobi": Method(_speculative("jacobi:make_jacobi_drafter"), of.JacobiOptions),
    "lookahead": Method(_speculative("lookahead:make_lookahead_drafter"), of.LookaheadOptions),
    "mcsd": Method(_speculative("speculative:make_drafter"), of.MCSDOptions),
    "pdos": Method(_own("pdos.parallel_steps:open_pdos"), of.PDOSOptions, few_shot=True),
    "sd": Method(_speculative("speculative:make_drafter"), of.SDOptions),
    "seed": Method(_seed, of.SEEDOptions),
}
FEW_SHOT = tuple(name for name, method in PRESETS.items() if method.few_shot)
