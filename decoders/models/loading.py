"""A model's name -> a model in eval mode and its tokenizer, on a device, in a dtype.

Takes what `find_model` takes, or a model object. Weights come from safetensors or GGUF only, code from the hub is never
run, and a model the engine can't run is refused before its weights are read. Knows nothing of KV or decoding.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tot.decoders.errors import ModelError, OptionError, TotError, reason
from tot.decoders.models.model_names import find_model
from tot.decoders.models.supported import check_supported, missing_weights, read_config

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

DTYPES = {
    "auto": None,
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "float16": "float16",
    "fp32": "float32",
    "float32": "float32",
}


@dataclass(frozen=True)
class LoadedModel:
    """A model in eval mode whose weights take no gradient, and its tokenizer."""

    model: PreTrainedModel
    tokenizer: Any
    name: str
    dtype: torch.dtype
    device: torch.device


def load_model(
    name: str | Path | PreTrainedModel,
    *,
    tokenizer: Any = None,
    dtype: str = "auto",
    device: str = "auto",
    cache_dir: Path | None = None,
    unread: bool = False,
) -> LoadedModel:
    """Load a model and its tokenizer.

    `name`: a known name, a folder in transformers format, a .gguf file, a hub id (`org/name`; a whole copy in the hub
    cache is used as it is), or a model object: that needs `tokenizer`, is changed in place, and keeps its dtype and
    device under "auto". `dtype`: a key of DTYPES, "auto" being bfloat16 where the device computes in it, else float32.
    `device`: "auto", "cpu", "cuda" or "cuda:N". `cache_dir` takes the place of $TOT_CACHE. `unread` leaves the matrices
    of a .gguf file where they are: for an Engine that is given quantize="gguf", and nothing else.

    Raises ModelError for a model that can't be found, read or run, OptionError for a bad dtype, device or tokenizer.
    """
    chosen = resolve_device(device)
    if not isinstance(name, str | Path):
        if tokenizer is None:
            raise OptionError("a model object comes without a tokenizer: pass tokenizer= as well")
        check_supported(name.config)
        object_dtype = name.dtype if dtype == "auto" else resolve_dtype(dtype, chosen)
        title = name.config.name_or_path or type(name).__name__
        return _finish(name, tokenizer, title, object_dtype, name.device if device == "auto" else chosen)
    wanted = resolve_dtype(dtype, chosen)
    source = find_model(name)
    with quiet_transformers():
        if source.is_dir():
            model, own_tokenizer = _load_folder(source, str(name), wanted, tokenizer)
        else:
            model, own_tokenizer = _load_gguf(source, str(name), wanted, tokenizer, cache_dir, unread)
    return _finish(model, own_tokenizer, str(name), wanted, chosen)


def resolve_device(device: str) -> torch.device:
    """The device of that name; "auto" is CUDA where there is one. Raises OptionError for one torch can't use."""
    import torch

    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise OptionError(f"device {device!r} is not known: choose auto, cpu, cuda or cuda:N")
    count = torch.cuda.device_count()
    if device != "cpu" and int(device.partition(":")[2] or 0) >= count:
        raise OptionError(f"torch finds no device {device!r} ({count} CUDA devices): choose cpu or auto")
    return torch.device(device)


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """The torch dtype of that name; "auto" is bfloat16 where `device` computes in it. Raises OptionError."""
    import torch

    if dtype not in DTYPES:
        raise OptionError(f"dtype {dtype!r} is not known: choose {', '.join(DTYPES)}")
    native = device.type == "cuda" or _cpu_computes_in_bf16()
    chosen: torch.dtype = getattr(torch, DTYPES[dtype] or ("bfloat16" if native else "float32"))
    return chosen


def _cpu_computes_in_bf16() -> bool:
    import torch

    if platform.machine().lower() in ("arm64", "aarch64"):
        # oneDNN's check asks for bf16 instructions there; on x86 it is content with AVX512, and emulates them.
        return bool(getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", bool)())
    held = torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2")  # by ATEN_CPU_CAPABILITY, or it has no more
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return not held and any(getattr(torch.cpu, check, bool)() for check in checks)


def _load_gguf(
    path: Path, name: str, dtype: torch.dtype, tokenizer: Any, cache_dir: Path | None, unread: bool
) -> tuple[Any, Any]:
    from tot.decoders.models.gguf_cache import cache_folder, cached_model

    root, source = (cache_dir or cache_folder()) / "models", path if unread else None
    cached = cached_model(path, root, matrices=not unread)
    try:
        return _load_folder(cached.folder, name, dtype, tokenizer, source, converted=True)
    except ModelError:  # whole by its manifest, and yet unreadable: made anew, once
        cached = cached_model(path, root, distrust=cached.build, matrices=not unread)
        return _load_folder(cached.folder, name, dtype, tokenizer, source, converted=True)


def _load_folder(
    folder: Path,
    name: str,
    dtype: torch.dtype,
    tokenizer: Any,
    unread: Path | None = None,
    converted: bool = False,
) -> tuple[Any, Any]:
    """(model on the CPU, tokenizer) from a folder in transformers format: a GGUF file's when `converted`, which may
    leave the matrices in the file, `unread`."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

    from tot.decoders.models.gguf_open import open_unread

    check_supported(read_config(folder))  # also for families that this transformers does not know
    if problem := missing_weights(folder):
        raise ModelError(f"{name} can't be loaded: {problem}")
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        check_supported(config)  # again, with the defaults that config.json leaves out
        model = None if unread is None else open_unread(unread, folder, config, dtype)
        if tokenizer is None:
            if converted:  # it is whole: the family's class would build it again, from vocabulary and merges, beside it
                tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
            else:
                tokenizer = AutoTokenizer.from_pretrained(folder, config=config, trust_remote_code=False)
        if model is not None:
            return model, tokenizer
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (TotError, MemoryError):
        raise
    except Exception as error:  # three libraries read these files, and tokenizers raises plain Exception
        raise ModelError(f"{name} can't be loaded ({reason(error)}): download it or save it again") from error
    if report["missing_keys"]:  # transformers would give them random values
        raise ModelError(f"{name} can't be loaded: its files lack {min(report['missing_keys'])}; download it again")
    return model, tokenizer


def _finish(model: Any, tokenizer: Any, name: str, dtype: torch.dtype, device: torch.device) -> LoadedModel:
    import torch

    try:
        for weight in model.parameters():  # not model.to(dtype): that rounds RoPE's float32 frequencies too
            if weight.is_floating_point():
                weight.data = weight.data.to(dtype)
        model.to(device)
    except torch.OutOfMemoryError as error:
        raise ModelError(f"{name} does not fit on {device}: use dtype='bf16', device='cpu' or another model") from error
    return LoadedModel(model.eval().requires_grad_(False), tokenizer, name, dtype, device)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars and no warnings from transformers inside; its settings are put back after."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
