"""Conversion of a GGUF file to transformers format: config, generation config, tokenizer, bfloat16 safetensors.

Files with features that cannot be converted (an unknown pre-tokenizer, long RoPE, missing tensors) are refused.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tot.decoders.errors import ModelError, reason
from tot.decoders.models.gguf_model import build_config, build_weights, refusal
from tot.decoders.models.gguf_reader import GGUFFile
from tot.decoders.models.gguf_tokenizer import UnknownTokenizerError, build_tokenizer

if TYPE_CHECKING:
    from pathlib import Path


def convert(file: GGUFFile, folder: Path, matrices: bool = True) -> None:
    """Write the model of a GGUF file into `folder`, in transformers format; `matrices` as for build_weights.

    Raises ModelError for a model that can't be converted faithfully; OSError or SafetensorError if writing fails.
    """
    from safetensors.numpy import save_file

    try:
        config, tokenizer = build_config(file), build_tokenizer(file.metadata)
        weights = build_weights(file, config, matrices)
    except (ModelError, OSError, MemoryError):
        raise
    except UnknownTokenizerError as error:
        raise refusal(file, str(error)) from error
    except Exception as error:  # libraries raise various errors for missing or invalid metadata
        cause = f"no {error}" if isinstance(error, KeyError) else reason(error)
        raise ModelError(f"{file.path} is not a readable GGUF file ({cause}): download it again") from error
    (folder / "config.json").write_text(json.dumps(vars(config), indent=1))
    ends = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (folder / "generation_config.json").write_text(json.dumps(ends))
    tokenizer.save_pretrained(folder)
    metadata = {"format": "pt", "matrices": file.matrices}
    save_file(weights, folder / "model.safetensors", metadata=metadata)
