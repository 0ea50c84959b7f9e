"""Loading of models by name or from a module: a LoadedModel on a device, in a dtype.

Names are resolved by `find_model`. Weights are loaded from safetensors or GGUF only, and code from the hub is never
run. Unsupported models are rejected before their weights are read.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tot.decoders.errors import ModelError, OptionError, TotError, reason, unknown
from tot.decoders.machine import free_in_limit, processor_flags
from tot.decoders.models.config import model_config
from tot.decoders.models.families import FAMILIES, Mixture
from tot.decoders.models.gguf_model import open_gguf
from tot.decoders.models.loaded import LoadedModel, dtype_of, end_ids, number_type
from tot.decoders.models.model_names import find_model
from tot.decoders.models.supported import check_supported, missing_weights, read_config
from tot.decoders.models.tokenizer import Tokenizer
from tot.decoders.models.weights import LANGUAGE_MODEL, FolderWeights, ModuleWeights, Weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)
_MIN_FREE = 2**27
"""Bytes that opening a small model needs, most of them to parse its tokenizer."""
DTYPES = {"auto": "", "bf16": "bfloat16", "bfloat16": "bfloat16", "fp32": "float32", "float32": "float32"}


def load_model(
    name: str | Path | PreTrainedModel,
    *,
    tokenizer: Any = None,
    dtype: str = "auto",
    device: str = "auto",
) -> LoadedModel:
    """Load a model as a transformers module, and its tokenizer.

    Args:
        name: A known name, a folder in transformers format, a .gguf file, a hub id (`org/name`; a complete copy in the
            hub cache is used without network access), or a model object, which is changed in place.
        tokenizer: The tokenizer; required for a model object.
        dtype: A key of DTYPES. "auto" is bfloat16 if the device computes in it, otherwise float32; a model object keeps
            its dtype. "bf16" is computed in float32 on a CPU without bfloat16 products.
        device: "auto", "cpu", "cuda" or "cuda:N". With "auto", a model object keeps its device.

    Raises:
        ModelError: The model can't be found, read or run.
        OptionError: The dtype, device or tokenizer is invalid.
    """
    loaded = open_model(name, tokenizer=tokenizer, dtype=dtype, device=device)
    loaded.module = loaded.model
    return loaded


def open_model(
    name: str | Path | PreTrainedModel,
    *,
    tokenizer: Any = None,
    dtype: str = "auto",
    device: str = "auto",
    integers: bool = False,
) -> LoadedModel:
    """Open a model like `load_model`, but load its weights and its module only when they are first used.

    With `integers`, the weights of a .gguf file are its quantized integers, which only the backend in C computes."""
    on_device = resolve_device(device)
    if not isinstance(name, str | Path):
        if tokenizer is None:
            raise OptionError("a model object comes without a tokenizer: pass tokenizer= as well")
        check_supported(name.config)
        object_dtype = dtype_of(name) if dtype == "auto" else resolve_dtype(dtype, on_device)
        title = name.config.name_or_path or type(name).__name__
        placed = _place(name, title, object_dtype, str(name.device) if device == "auto" else on_device)
        return LoadedModel.of(placed, tokenizer, title)
    weight_type = resolve_dtype(dtype, on_device)
    source = find_model(name)
    check_room(name)
    if source.is_dir():
        return _open_folder(source, str(name), weight_type, on_device, tokenizer)
    config, own_tokenizer, weights = open_gguf(source, weight_type, integers)
    tokenizer = own_tokenizer if tokenizer is None else tokenizer
    return of_gguf(config, tokenizer, weights, str(name), weights.dtype, on_device)


def resolve_device(device: str) -> str:
    """Return the device of a name; "auto" is CUDA if available. Raises OptionError if torch can't use the device."""
    if device == "cpu" or (device == "auto" and not _has_gpu_driver()):
        return "cpu"
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cuda(:\d+)?", device):
        raise OptionError(f"device {device!r} is not known: choose auto, cpu, cuda or cuda:N")
    count = torch.cuda.device_count()
    if int(device.partition(":")[2] or 0) >= count:
        raise OptionError(f"torch finds no device {device!r} ({count} CUDA devices): choose cpu or auto")
    return device


def _has_gpu_driver() -> bool:
    """Return whether torch could find a GPU, without importing it."""
    if Path("/dev/kfd").exists():  # AMD
        return True
    with suppress(OSError):
        ctypes.CDLL("libcuda.so.1")
        return True
    return False


def resolve_dtype(dtype: str, device: str) -> np.dtype[Any]:
    """Return the dtype of a name; "auto" is bfloat16. Raises OptionError.

    A CPU without bfloat16 products computes in float32 instead: weights in bfloat16 stay exact, and it is faster."""
    if dtype not in DTYPES:
        raise OptionError(unknown("dtype", dtype, DTYPES))
    name = DTYPES[dtype] or "bfloat16"
    if name == "bfloat16" and device == "cpu" and not _cpu_computes_in_bf16():
        if DTYPES[dtype]:
            log.warning("this processor has no bfloat16 products, so dtype=%s is computed in float32", dtype)
        name = "float32"
    return number_type(name)


def _cpu_computes_in_bf16() -> bool:
    """Return whether C has bfloat16 products for this processor, within the limits that are set for torch and for C."""
    limits = {"ATEN_CPU_CAPABILITY": ("default", "avx2"), "TOT_ISA": ("avx2", "avx2-vnni", "avx512")}
    limited = any(os.environ.get(variable) in values for variable, values in limits.items())
    return not limited and "avx512_bf16" in processor_flags()


def check_room(name: str | Path) -> None:
    """Raise ModelError if too little memory is free: a parser of tokenizers ends the process if an allocation fails."""
    if (free := free_in_limit()) < _MIN_FREE:
        raise ModelError(
            f"{free / 2**20:.0f} MiB of the process's memory are free, and opening {name} needs "
            f"{_MIN_FREE / 2**20:.0f}: raise its limit (ulimit -v)"
        )


def of_gguf(config: Any, tokenizer: Any, weights: Weights, name: str, dtype: np.dtype[Any], device: str) -> LoadedModel:
    """Return the model of a GGUF file, whose module is loaded from the file when it is first used."""
    load = partial(_load_gguf_module, weights.files[0], name, dtype, device)
    return LoadedModel(config, tokenizer, name, dtype, device, end_ids(config.eos_token_id), load=load, stored=weights)


def _open_folder(folder: Path, name: str, dtype: np.dtype[Any], device: str, tokenizer: Any) -> LoadedModel:
    """Open a folder in transformers format."""
    check_supported(read_config(folder))
    if problem := missing_weights(folder):
        raise ModelError(f"{name} can't be loaded: {problem}")
    stored: Weights | None = None
    try:
        if tokenizer is None:
            tokenizer = _read_tokenizer(folder)
        config = folder_config(folder)
        if config.model_type in FAMILIES:
            Mixture.of(config)  # refuses impossible sizes
            with suppress(LookupError):  # transformers accepts more weight names
                stored = FolderWeights(folder, config, dtype)
        ends = _end_ids(folder, config)
    except (TotError, MemoryError):
        raise
    except Exception as error:  # three libraries read these files, and tokenizers raises plain Exception
        raise unreadable(name, error) from error
    load = partial(_load_module, folder, name, dtype, device)
    return LoadedModel(config, tokenizer, name, dtype, device, ends, load=load, stored=stored)


def folder_config(folder: Path) -> Any:
    """Return a folder's config with the defaults of its family. Raises ModelError if the engine can't run the model."""
    settings = read_config(folder)
    check_supported(settings)
    if settings.model_type in FAMILIES:
        config: Any = model_config(vars(settings))
    else:
        from transformers import AutoConfig

        with quiet_transformers():
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False).get_text_config()
    check_supported(config)  # again, with the defaults that config.json leaves out
    return config


def _read_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of a folder; one without a tokenizer.json is converted by transformers."""
    if (folder / "tokenizer.json").exists():
        return Tokenizer.read(folder)
    from transformers import AutoTokenizer

    with quiet_transformers():
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def _end_ids(folder: Path, config: Any) -> tuple[int, ...]:
    """Return the tokens that end a text by the folder's generation config; by its model config if it has none."""
    try:
        listed = json.loads((folder / "generation_config.json").read_text(encoding="utf-8")).get("eos_token_id")
    except (OSError, ValueError, AttributeError):
        listed = config.eos_token_id
    return end_ids(listed)


def _load_module(folder: Path, name: str, dtype: np.dtype[Any], device: str) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        with quiet_transformers():
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
            text: Any = config.get_text_config()
            renamed = {} if text is config else {"config": text, "key_mapping": LANGUAGE_MODEL}
            model, report = AutoModelForCausalLM.from_pretrained(
                folder,
                **renamed,
                dtype=getattr(torch, dtype.name),
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
    except (TotError, MemoryError):
        raise
    except Exception as error:
        raise unreadable(name, error) from error
    if report["missing_keys"]:  # transformers initializes them with random values
        raise ModelError(f"{name} can't be loaded: its files lack {min(report['missing_keys'])}; download it again")
    return _place(model, name, dtype, device)


def _load_gguf_module(path: Path, name: str, dtype: np.dtype[Any], device: str) -> Any:
    """Load the module of a GGUF file, with its weights rounded to bfloat16."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
    from transformers.initialization import no_init_weights

    config, _, weights = open_gguf(path, dtype)
    with quiet_transformers(), no_init_weights():
        settings = AutoConfig.for_model(config.model_type).from_dict(vars(config))
        module = AutoModelForCausalLM.from_config(settings, dtype=getattr(torch, dtype.name))
    module.tie_weights()
    ModuleWeights(module).assign(weights)
    ends = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    module.generation_config = GenerationConfig(**ends)
    return _place(module, name, dtype, device)


def unreadable(name: str, error: Exception) -> ModelError:
    """Return the error of a model whose files can't be read."""
    return ModelError(f"{name} can't be loaded ({reason(error)}): download it or save it again")


def _place(model: Any, name: str, dtype: np.dtype[Any], device: str) -> Any:
    """Put a module in eval mode, on a device and in a dtype."""
    import torch

    try:
        for weight in model.parameters():  # model.to(dtype) would also round RoPE's float32 frequencies
            if weight.is_floating_point():
                weight.data = weight.data.to(getattr(torch, dtype.name))
        model.to(device)
    except torch.OutOfMemoryError as error:
        raise ModelError(f"{name} does not fit on {device}: use dtype='bf16', device='cpu' or another model") from error
    return model.eval().requires_grad_(False)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Context without progress bars and warnings from transformers; restores its settings afterwards."""
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
