"""The packed weights of a GGUF file, in one memory-mapped file of the cache folder.

The weights are packed once, and processes that use the same model share their memory. The file also holds the config,
the tokenizer and all other weights, so that a later start does not read the GGUF file. Everything is checked before
use, and packed again if it does not match.

Layout: packed matrices, each from the beginning of a page; the head, which is the other weights, the tokenizer and an
index in JSON; where head and index begin; the seal, a SHA-256.
"""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import struct
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, get_args

import numpy as np
from filelock import FileLock
from ml_dtypes import bfloat16
from tokenizers import Tokenizer as Backend

from tot.decoders.cache import cache_folder, hash_files
from tot.decoders.errors import ModelError, reason
from tot.decoders.files import others_could_write, replacing
from tot.decoders.kernels.native.library import lanes, log_once
from tot.decoders.kernels.native.packing import Packed, PackedKind, pack_product, product_shape, products_of
from tot.decoders.machine import free_memory
from tot.decoders.models.gguf_model import GGUFWeights
from tot.decoders.models.loaded import LoadedModel, number_type
from tot.decoders.models.loading import check_room, of_gguf, open_model, resolve_device, resolve_dtype
from tot.decoders.models.model_names import find_model, gguf_parts
from tot.decoders.models.shapes import EMBEDDING, HEAD, Array, weight_shapes
from tot.decoders.models.tokenizer import Tokenizer
from tot.decoders.models.weights import Weights, hash_weights

_FORMAT = 6
"""Version of the file and of the packed layout; increment it when either changes."""
_PAGE, _MIB = 4096, 2**20
_HASHED_WHOLE = 16 * _MIB
"""Maximum bytes of matrices that the seal covers completely; of larger ones it covers a page of each MiB."""
_PLACES = struct.Struct("<QQ")
_SEAL = hashlib.sha256().digest_size


class PackedWeights(Weights):
    """The packed matrices of a model, by product, and its other weights by name."""

    def __init__(
        self,
        config: Any,
        kind: PackedKind,
        products: Mapping[str, Packed],
        others: Mapping[str, Any],
        files: Sequence[Path] = (),
        identity: str | None = None,
        integers: bool = False,
    ) -> None:
        self.shapes, self.kind, self.products = weight_shapes(config), kind, products
        self.integers, self.quantized = integers, kind == "gguf"
        self.files = files
        self._others, self._identity = others, identity

    def __getitem__(self, name: str) -> Any:
        return self._others[name]

    @cached_property
    def identity(self) -> str:
        if self._identity is None:
            assert isinstance(self._others, Weights)
            self._identity = hash_weights(self._others, bfloat16)
        return self._identity


def open_packed(
    name: Any, *, tokenizer: Any = None, dtype: str = "auto", device: str = "auto", integers: bool = False
) -> LoadedModel:
    """Open a model like `open_model`, from its packed weights if they are in the cache folder."""
    on_cpu = isinstance(name, str | Path) and resolve_device(device) == "cpu"
    if on_cpu and (path := find_model(name)).is_file():
        check_room(name)
        computed = resolve_dtype(dtype, "cpu")
        if (found := _mapped(packed_path(path, integers), path, integers, str(name), computed)) is not None:
            found.tokenizer = found.tokenizer if tokenizer is None else tokenizer
            return found
    return open_model(name, tokenizer=tokenizer, dtype=dtype, device=device, integers=integers)


def packed_path(path: Path, integers: bool) -> Path:
    """Return the packed file of a GGUF file for this processor's vectors. Raises ModelError if it can't be read."""
    try:
        digest = hash_files(gguf_parts(path))
    except OSError as error:
        raise ModelError(f"{path} can't be read ({reason(error)}): check the path and its permissions") from error
    name = f"{path.stem}-{digest[:16]}-{'gguf' if integers else 'none'}-{lanes()}-v{_FORMAT}.packed"
    return cache_folder() / "models" / name


def pack_model(loaded: LoadedModel, kind: PackedKind) -> PackedWeights:
    """Pack the weights of a model; of a GGUF file in the cache folder, if it can be written and is the user's alone.

    Waits while another process packs the same file.
    """
    weights, products = loaded.weights, products_of(loaded.config, kind)
    if isinstance(weights, GGUFWeights) and weights.tokenizer is not None:
        path = packed_path(weights.path, weights.integers)
        mapped = partial(_mapped, path, weights.path, weights.integers, loaded.name, loaded.dtype)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            problem = others_could_write(path.parent, trust_root=True)
            if not problem:
                with FileLock(path.with_suffix(".lock")):
                    if mapped() is None:  # otherwise another process has packed it
                        _write(path, loaded.config, weights, weights.tokenizer, kind, products)
                if (found := mapped()) is not None and isinstance(found.stored, PackedWeights):
                    return found.stored
                problem = others_could_write(path, trust_root=True) or "was changed"
        except OSError as error:
            problem = reason(error)
        log_once(
            logging.WARNING,
            f"packed weights can't be kept in {path.parent} ({problem}), so they are packed again for every process: "
            "free space there, make it private (chmod 700), or set TOT_CACHE to a folder that is",
        )
    packed = {name: pack_product(weights, name, parts, kind) for name, parts in products.items()}
    return PackedWeights(loaded.config, kind, packed, weights, weights.files, integers=weights.integers)


def _mapped(path: Path, gguf: Path, integers: bool, title: str, number: np.dtype[Any]) -> LoadedModel | None:
    """Map a packed file. Returns None if it is missing, damaged, or if other users could have written it.

    The model is computed in the format `number`, unless its weights need a wider one."""
    try:
        if any(others_could_write(place, trust_root=True) for place in (path.parent, path)):
            return None
        content = np.asarray(np.memmap(path, np.uint8, "r"))
        body = content[:-_SEAL]
        if content[-_SEAL:].tobytes() != _seal(path, len(body)):
            return None
        _, begin = _PLACES.unpack(body[-_PLACES.size :].tobytes())
        index = json.loads(body[begin : -_PLACES.size].tobytes())
        config, kind = SimpleNamespace(**index["config"]), index["kind"]
        if kind not in get_args(PackedKind):
            return None
        shapes = weight_shapes(config)

        def read(begin: int, size: int, dtype: str = "uint8") -> Array:
            if begin < 0 or size < 0 or begin % _PAGE or begin + size > len(body):
                raise ValueError("outside the file")
            return body[begin : begin + size].view(number_type(dtype))

        products = {}
        for name, parts in products_of(config, kind).items():
            begin, size, dtype, shape, *form = index["products"][name]
            products[name] = Packed(read(begin, size, dtype).reshape(shape), *form)
            if not products[name].fits(*product_shape(shapes, parts), kind):
                return None
        others = {name: read(*place).reshape(shapes[name]) for name, place in index["others"].items()}
        if others.keys() != set(_other_names(config, kind)):
            return None
        weights = PackedWeights(config, kind, products, others, gguf_parts(gguf), index["identity"], integers)
        if len(content) > (free := free_memory("cpu")):
            sizes = f"{len(content) / 2**30:.1f} GiB, and {free / 2**30:.1f} are free"
            log_once(logging.WARNING, f"the weights take {sizes}, so parts of them are read from disk repeatedly")
        parse = partial(Backend.from_buffer, read(*index["tokenizer"]).tobytes())
        number = number_type(index["dtype"]) if index["dtype"] else number
        return of_gguf(config, Tokenizer(parse, index["settings"]), weights, title, number, "cpu")
    except (
        *(OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError),
        *(struct.error, ModelError),
    ):
        return None


def _seal(path: Path, size: int) -> bytes:
    """Return a SHA-256 of the head, and of pages of the matrices, in the first `size` bytes of a file.

    Reads the file, because all pages near a mapped one would count as memory of the process."""
    with path.open("rb") as file:
        file.seek(size - _PLACES.size)
        head, _ = _PLACES.unpack(file.read(_PLACES.size))
        file.seek(head)
        digest = hashlib.sha256(file.read(size - head))
        for begin in range(0, head, _PAGE if head <= _HASHED_WHOLE else _MIB):
            file.seek(begin)
            digest.update(file.read(_PAGE))
    return digest.digest()


def _other_names(config: Any, kind: PackedKind) -> list[str]:
    """Return the weights that are in no product."""
    packed = {f"{part}.weight" for parts in products_of(config, kind).values() for part in parts}
    return [name for name in weight_shapes(config) if name not in packed and name != HEAD]


def _write(
    path: Path,
    config: Any,
    weights: GGUFWeights,
    tokenizer: Tokenizer,
    kind: PackedKind,
    products: Mapping[str, Sequence[str]],
) -> None:
    """Pack and write one product at a time, which bounds the memory.

    Deletes files of older formats and the unfinished files of killed processes."""
    older = path.parent.glob(f"{glob.escape(path.stem.rpartition('-')[0])}-v*.packed")
    for stale in (*older, *path.parent.glob(f".{glob.escape(path.name)}.*")):
        stale.unlink(missing_ok=True)
    with replacing(path, private=True) as file:
        placed: dict[str, list[Any]] = {}
        for name, parts in products.items():
            strips, *form = pack_product(weights, name, parts, kind)
            placed[name] = [*_add(file, strips), strips.dtype.name, strips.shape, *form]
        others: dict[str, list[Any]] = {}
        names = _other_names(config, kind)
        if EMBEDDING in names:
            embedding = weights.array(EMBEDDING).astype(weights.exact_dtype, copy=False)
            others[EMBEDDING] = [*_add(file, embedding), embedding.dtype.name]
        head = file.tell()
        for name in names:
            if name != EMBEDDING:
                others[name] = [*_add(file, weights.array(name).astype(np.float32)), "float32"]
        index = {
            "config": vars(config),
            "kind": kind,
            "dtype": weights.dtype.name if weights.exact_dtype == np.float32 else None,
            "settings": tokenizer.settings,
            "tokenizer": _add(file, np.frombuffer(tokenizer.to_json().encode(), np.uint8)),
            "identity": weights.identity,
            "products": placed,
            "others": others,
        }
        begin = file.tell()
        file.write(json.dumps(index).encode() + _PLACES.pack(head, begin))
        file.flush()
        file.write(_seal(Path(file.name), file.tell()))


def _add(file: IO[bytes], array: Array) -> list[int]:
    """Append an array, up to the end of a page. Return where it begins, and its bytes."""
    begin = file.tell()
    file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    file.write(bytes(-file.tell() % _PAGE))
    return [begin, array.nbytes]
