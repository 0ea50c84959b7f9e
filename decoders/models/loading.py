"""A model's name -> a LoadedModel on a device, in a dtype.

Takes what `find_model` takes, or a model object. Weights come from safetensors or GGUF only, code from the hub is never
run, and a model the engine can't run is refused before its weights are read. Knows nothing of KV or decoding.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tot.decoders.errors import ModelError, OptionError, TotError, reason
from tot.decoders.models.loaded import LoadedModel
from tot.decoders.models.model_names import find_model
from tot.decoders.models.supported import LLAMA_LIKE, check_supported, missing_weights, read_config

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


def load_model(
    name: str | Path | PreTrainedModel,
    *,
    tokenizer: Any = None,
    dtype: str = "auto",
    device: str = "auto",
    cache_dir: Path | None = None,
) -> LoadedModel:
    """Load a model as a transformers module, and its tokenizer.

    `name`: a known name, a folder in transformers format, a .gguf file, a hub id (`org/name`; a whole copy in the hub
    cache is used as it is), or a model object: that needs `tokenizer`, is changed in place, and keeps its dtype and
    device under "auto". `dtype`: a key of DTYPES, "auto" being bfloat16 where the device computes in it, else float32.
    `device`: "auto", "cpu", "cuda" or "cuda:N". `cache_dir` takes the place of $TOT_CACHE.

    Raises ModelError for a model that can't be found, read or run, OptionError for a bad dtype, device or tokenizer.
    """
    loaded = open_model(name, tokenizer=tokenizer, dtype=dtype, device=device, cache_dir=cache_dir)
    loaded.module = loaded.model
    return loaded


def open_model(
    name: str | Path | PreTrainedModel,
    *,
    tokenizer: Any = None,
    dtype: str = "auto",
    device: str = "auto",
    cache_dir: Path | None = None,
    unread: bool = False,
) -> LoadedModel:
    """As `load_model`, but weights are read when they are asked for, and a module is made only then. `unread` takes the
    whole numbers of a .gguf file as they are: for an Engine that is given quantize="gguf", and nothing else."""
    chosen = resolve_device(device)
    if not isinstance(name, str | Path):
        if tokenizer is None:
            raise OptionError("a model object comes without a tokenizer: pass tokenizer= as well")
        check_supported(name.config)
        object_dtype = name.dtype if dtype == "auto" else resolve_dtype(dtype, chosen)
        title = name.config.name_or_path or type(name).__name__
        placed = _place(name, title, object_dtype, name.device if device == "auto" else chosen)
        return LoadedModel.of(placed, tokenizer, title, object_dtype)
    wanted = resolve_dtype(dtype, chosen)
    source = find_model(name)
    with quiet_transformers():
        if source.is_dir():
            return _open_folder(source, str(name), wanted, chosen, tokenizer)
        return _open_gguf(source, str(name), wanted, chosen, tokenizer, cache_dir, unread)


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


def _open_gguf(
    path: Path,
    name: str,
    dtype: torch.dtype,
    device: torch.device,
    tokenizer: Any,
    cache_dir: Path | None,
    unread: bool,
) -> LoadedModel:
    from tot.decoders.models.gguf_cache import cache_folder, cached_model

    root, source, build = (cache_dir or cache_folder()) / "models", path if unread else None, ""

    def open_cached(distrust: str | None = None) -> LoadedModel:
        nonlocal build
        cached = cached_model(path, root, distrust, matrices=not unread)
        build = cached.build
        loaded = _open_folder(cached.folder, name, dtype, device, tokenizer, source, converted=True)
        if loaded.stored is None:
            loaded.module = loaded.model
        return loaded

    try:
        return open_cached()
    except ModelError:  # whole by its manifest, and yet unreadable: made anew, once
        if not build:
            raise
        return open_cached(distrust=build)


def _open_folder(
    folder: Path,
    name: str,
    dtype: torch.dtype,
    device: torch.device,
    tokenizer: Any,
    unread: Path | None = None,
    converted: bool = False,
) -> LoadedModel:
    """From a folder in transformers format: a GGUF file's when `converted`, which may leave the matrices in the file,
    `unread`."""
    from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

    from tot.decoders.models.weights import FolderWeights, GGUFWeights, Weights

    check_supported(read_config(folder))  # also for families that this transformers does not know
    if problem := missing_weights(folder):
        raise ModelError(f"{name} can't be loaded: {problem}")
    stored: Weights | None = None
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        check_supported(config)  # again, with the defaults that config.json leaves out
        if unread is not None:
            stored = GGUFWeights(unread, folder, config, dtype)
        elif config.model_type in LLAMA_LIKE:
            with suppress(LookupError):  # transformers knows more names of weights
                stored = FolderWeights(folder, config, dtype)
        if tokenizer is None:
            if converted:  # it is whole: the family's class would build it again, from vocabulary and merges, beside it
                tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
            else:
                tokenizer = AutoTokenizer.from_pretrained(folder, config=config, trust_remote_code=False)
        settings = _generation_config(folder, config)
    except (TotError, MemoryError):
        raise
    except Exception as error:  # three libraries read these files, and tokenizers raises plain Exception
        raise _unreadable(name, error) from error
    if unread is None:
        load = partial(_load_module, folder, name, config, dtype, device)
    else:
        load = partial(_load_whole_gguf, unread, folder.parent.parent, dtype, device, tokenizer)
    return LoadedModel(config, tokenizer, name, dtype, device, settings, load=load, stored=stored)


def _generation_config(folder: Path, config: Any) -> Any:
    """That of the folder, or what the config says."""
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(folder)
    except (OSError, TypeError):
        return GenerationConfig.from_model_config(config)


def _load_module(folder: Path, name: str, config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        with quiet_transformers():
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
    except Exception as error:
        raise _unreadable(name, error) from error
    if report["missing_keys"]:  # transformers would give them random values
        raise ModelError(f"{name} can't be loaded: its files lack {min(report['missing_keys'])}; download it again")
    return _place(model, name, dtype, device)


def _load_whole_gguf(path: Path, cache_dir: Path, dtype: torch.dtype, device: torch.device, tokenizer: Any) -> Any:
    """The module of a GGUF file, its numbers converted."""
    kind = str(dtype).removeprefix("torch.")
    return load_model(path, tokenizer=tokenizer, dtype=kind, device=str(device), cache_dir=cache_dir).module


def _unreadable(name: str, error: Exception) -> ModelError:
    return ModelError(f"{name} can't be loaded ({reason(error)}): download it or save it again")


def _place(model: Any, name: str, dtype: torch.dtype, device: torch.device) -> Any:
    """A module in eval mode, on a device and in a dtype."""
    import torch

    try:
        for weight in model.parameters():  # not model.to(dtype): that rounds RoPE's float32 frequencies too
            if weight.is_floating_point():
                weight.data = weight.data.to(dtype)
        model.to(device)
    except torch.OutOfMemoryError as error:
        raise ModelError(f"{name} does not fit on {device}: use dtype='bf16', device='cpu' or another model") from error
    return model.eval().requires_grad_(False)


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
