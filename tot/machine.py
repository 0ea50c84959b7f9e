"""What a model runs on, in words: the processor or GPU, the threads, the versions."""

from __future__ import annotations

import torch
import transformers

from tot.decoders.kernels.native import processor


def describe(device: torch.device, dtype: torch.dtype) -> str:
    """One line: processor or GPU, threads, versions, number format."""
    if device.type == "cuda":
        place = torch.cuda.get_device_name(device)
    else:
        place = f"{processor()}, {torch.get_num_threads()} threads"
    return f"{place}; torch {torch.__version__}, transformers {transformers.__version__}, {str(dtype).split('.')[-1]}"
