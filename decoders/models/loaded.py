"""LoadedModel: a model's config, tokenizer and weights, and its transformers module if one is needed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from ml_dtypes import bfloat16

from tot.decoders.errors import ModelError
from tot.decoders.models.families import FAMILIES, Mixture
from tot.decoders.models.shapes import EMBEDDING, EXPERTS, HEAD

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from tot.decoders.models.weights import Weights


def dtype_of(module: Any) -> np.dtype[Any]:
    """Return the dtype of a torch module's weights, as numpy's."""
    return number_type(str(module.dtype).removeprefix("torch."))


def number_type(name: str) -> np.dtype[Any]:
    """Return the dtype of a name: "float32" or "bfloat16"."""
    return np.dtype(bfloat16 if name == "bfloat16" else name)


@dataclass(eq=False)
class LoadedModel:
    """A model without gradients, and its tokenizer. The C backend packs `weights`; others run `model`."""

    config: Any
    tokenizer: Any
    name: str
    dtype: np.dtype[Any]
    """float32 or `ml_dtypes.bfloat16`."""
    device: str
    """"cpu" or "cuda:N"."""
    end_ids: tuple[int, ...] = ()
    """Tokens that end a text, beside the tokenizer's own."""
    module: PreTrainedModel | None = None
    """The transformers module, in eval mode; None until `model` is first used."""
    load: Callable[[], PreTrainedModel] | None = None
    """Function that loads the module."""
    stored: Weights | None = None
    """The weights in files, if they can be read without a module."""
    store_dtype: np.dtype[Any] | None = None
    """Number format of keys and values; None is `dtype`. float16 is for the C backend in float32."""

    @classmethod
    def of(cls, module: Any, tokenizer: Any = None, name: str = "") -> LoadedModel:
        """Wrap an existing transformers module."""
        ends = end_ids(getattr(getattr(module, "generation_config", None), "eos_token_id", None))
        return cls(module.config, tokenizer, name, dtype_of(module), str(module.device), ends, module)

    @property
    def model(self) -> Any:
        """The transformers module, loaded at first use. Raises ModelError if it cannot be loaded."""
        if self.module is None:
            if self.load is None:
                raise ModelError(f"{self.name} has no transformers module")
            self.module = self.load()
        return self.module

    @property
    def weights(self) -> Weights:
        """The weights of the module if it is loaded, otherwise of the files."""
        from tot.decoders.models.weights import ModuleWeights

        return ModuleWeights(self.model) if self.module is not None or self.stored is None else self.stored

    @property
    def size(self) -> int:
        """Number of parameters; tied weights count once."""
        tied = self.config.tie_word_embeddings
        shapes = self.weights.shapes
        return sum(math.prod(shape) for name, shape in shapes.items() if not (tied and name == HEAD))

    @property
    def linear_sizes(self) -> tuple[int, int]:
        """Number of parameters of the linear layers that each row uses, and of the output head."""
        mixture = Mixture.of(self.config) if self.config.model_type in FAMILIES else None
        sizes = {
            name: math.prod(shape)
            if mixture is None or EXPERTS not in name
            else math.prod(shape) * mixture.chosen // mixture.experts
            for name, shape in self.weights.shapes.items()
            if name != EMBEDDING and (len(shape) == 2 or name.endswith(".bias"))
        }
        head = sum(size for name, size in sizes.items() if name.startswith("lm_head."))
        return sum(sizes.values()) - head, head

    @property
    def identity(self) -> str:
        """A hash that identifies the model in any storage format."""
        return self.weights.identity


def end_ids(listed: Any) -> tuple[int, ...]:
    """Return the tokens that an `eos_token_id` lists: none, one, or several. Raises ModelError for other values."""
    ids = () if listed is None else tuple(listed) if isinstance(listed, list | tuple) else (listed,)
    if not all(type(one) is int for one in ids):
        raise ModelError(f"eos_token_id is {listed!r:.60}, which is not a token or a list of tokens")
    return ids
