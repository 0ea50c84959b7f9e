"""The decoding methods by name. Importing this module does not import torch: opening a method imports its module.

A speculative method is an entry with its options, its drafter and its `SpeculativeConfig`. Other methods name a
function that opens them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from tot.decoders.methods import options
from tot.decoders.methods.method import Method, OpenedMethod, SpeculativeConfig

if TYPE_CHECKING:
    from tot.decoders.drafting.drafters import Drafter
    from tot.decoders.engine.engine import Engine


def _call(path: str, *arguments: Any) -> Any:
    """Import the function at "folder.module:name" and call it."""
    return resolve_name(f"tot.decoders.{path}")(*arguments)


def _speculative(
    options_class: type[options.MethodOptions],
    drafter: Callable[[Any, Engine, ExitStack], Drafter],
    config: Callable[[Any], SpeculativeConfig],
) -> Method:
    """Return a method with the policy `Speculative`, and with a drafter and a config made from its options."""

    def open_method(engine: Engine, given: Any, stack: ExitStack) -> OpenedMethod:
        from tot.decoders.methods.speculative import Speculation, Speculative

        shared = Speculation(engine, drafter(given, engine, stack), config(given))
        return OpenedMethod(partial(Speculative, speculation=shared), shared.drafter)

    return Method(open_method, options_class)


def _named_drafter(given: Any, engine: Engine, stack: ExitStack) -> Any:
    """Open the drafter that the option `draft` names."""
    return _call("drafting.opening:make_drafter", given.draft, engine, stack)


_PACKED = _speculative(options.SEEDOptions, _named_drafter, lambda o: SpeculativeConfig(o.k_config, o.rule, o.adapt))


def _open_seed(engine: Engine, given: options.SEEDOptions, stack: ExitStack) -> Any:
    if given.policy == "packed":
        return _PACKED.open(engine, given, stack)
    return _call("methods.seed:open_rounds", engine, given, stack)


PRESETS: dict[str, Method] = {
    "ar": Method(lambda *_: OpenedMethod(resolve_name("tot.decoders.methods.autoregressive:Autoregressive"))),
    "auto": _speculative(
        options.AutoOptions,
        drafter=lambda o, engine, stack: _call("methods.auto:make_auto_drafter", o.draft, engine, stack),
        config=lambda o: SpeculativeConfig((1,) * options.LONGEST, adapt=True),
    ),
    "fastcot": Method(partial(_call, "methods.fastcot:open_fastcot"), options.FastCoTOptions),
    "jacobi": _speculative(
        options.JacobiOptions,
        drafter=lambda o, *_: _call("methods.jacobi:JacobiDrafter", o.n),
        config=lambda o: SpeculativeConfig((1,) * o.n, adapt=o.adapt, trajectory=o.trajectory),
    ),
    "lookahead": _speculative(
        options.LookaheadOptions,
        drafter=lambda o, *_: _call("methods.lookahead:LookaheadDrafter", o),
        config=lambda o: SpeculativeConfig(
            (o.guesses, *(1,) * (o.ngram - 2)), adapt=o.adapt, probes=o.window * (o.ngram - 1)
        ),
    ),
    "mcsd": _speculative(
        options.MCSDOptions, drafter=_named_drafter, config=lambda o: SpeculativeConfig(o.k_config, o.rule)
    ),
    "pdos": Method(partial(_call, "methods.pdos.parallel_steps:open_pdos"), options.PDOSOptions, few_shot=True),
    "sd": _speculative(
        options.SDOptions, drafter=_named_drafter, config=lambda o: SpeculativeConfig((1,) * o.k, o.rule)
    ),
    "seed": Method(_open_seed, options.SEEDOptions),
}
