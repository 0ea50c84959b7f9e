"""Train a model to map any point of its Jacobi trajectories to the fixed point (CLLM, Algorithm 2).

A forward pass packs a few texts, each with several of its windows. The loss is the consistency loss plus w times the AR
loss on the model's own text. Randomness depends only on seed, epoch and row, so a resumed run ends with the same
weights.
"""

from __future__ import annotations

import json
import math
import random
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tot.decoders.errors import ModelError, OptionError
from tot.decoders.files import write_text
from tot.decoders.models.loaded import LoadedModel
from tot.decoders.models.loading import quiet_transformers, resolve_dtype
from tot.decoders.training.cllm.checkpoint import load_checkpoint, save_checkpoint, set_learning_rate
from tot.decoders.training.cllm.losses import Layout, Window, ar_loss, consistency_loss, layout
from tot.decoders.training.cllm.settings import TrainOptions
from tot.decoders.training.cllm.trajectories import trajectories

CHECKPOINT = "checkpoint.safetensors"
_ATTENTION = "tot_texts"
"""The name under which transformers finds `_attention`."""
_MOST_LOST = 180.0
"""Maximum seconds of training, plus one step, that are lost if the run is killed."""
CURVE = "losses.jsonl"


def train(
    loaded: LoadedModel,
    folder: Path,
    out: Path,
    options: TrainOptions,
    tell: Callable[[int, int, float], None] = lambda step, steps, loss: None,
) -> None:
    """Train `loaded` on the trajectories in `folder` and save it, in transformers' format, to `out`.

    Resumes from a checkpoint in `out`, and writes the losses of each step to `losses.jsonl` there. `tell` is called
    with (step, number of steps, loss in nats).

    Raises:
        ModelError: The trajectories are from another model, or the loss is not finite.
        OptionError: `folder` has no texts, or `out` has a model or a checkpoint with other options.
    """
    rows = list(trajectories(folder, loaded))
    if not rows:
        raise OptionError(f"{folder} holds no texts to train on: none were collected, or all were repetitive")
    if (out / "config.json").exists():
        raise OptionError(f"{out} already holds a model: give another folder for the new one")
    out.mkdir(parents=True, exist_ok=True)
    model = _trainable(loaded, options)
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=0.0)
    by_epoch = math.ceil(len(rows) / options.accumulate)
    steps = options.epochs * by_epoch
    try:
        done = load_checkpoint(model, optimizer, out / CHECKPOINT)
    except (KeyError, RuntimeError) as error:  # weights with other names or shapes
        raise OptionError(
            f"{out} was started with other options: resume with the same options, or give another folder"
        ) from error
    curve = out / CURVE
    known = curve.read_text().splitlines(keepends=True)[:done] if curve.exists() else []
    write_text(curve, known)  # drop the steps after the checkpoint
    model.train()
    last_saved = time.monotonic()
    for step in range(done, steps):
        set_learning_rate(optimizer, options.learning_rate, step, steps)
        epoch, at = step // by_epoch, step % by_epoch * options.accumulate
        numbers = _order(len(rows), f"{options.seed}/{epoch}")[at : at + options.accumulate]
        batch = [_text(rows[number], f"{options.seed}/{epoch}/{number}", options) for number in numbers]
        with text_attention(model):
            consistency, ar = _gradients(model, batch, loaded.device, options)
        loss = consistency + options.ar_weight * ar
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        if not math.isfinite(loss + norm):
            raise ModelError(
                f"the loss is {loss} (gradient {norm}) at step {step + 1}: the last good checkpoint is in {out}; "
                f"resume with a learning rate below {options.learning_rate}"
            )
        if step > done and time.monotonic() - last_saved > _MOST_LOST:
            # The finite loss shows that the weights after the previous step are good.
            save_checkpoint(model, optimizer, step, out / CHECKPOINT)
            last_saved = time.monotonic()
        optimizer.step()
        optimizer.zero_grad()
        with curve.open("a") as file:
            file.write(json.dumps({"step": step + 1, "loss": loss, "consistency": consistency, "ar": ar}) + "\n")
        tell(step + 1, steps, loss)
    _save(model, loaded, out)


def _gradients(model: nn.Module, batch: Sequence[Layout], device: str, options: TrainOptions) -> tuple[float, float]:
    """Accumulate a step's gradients, and return the mean consistency loss and the mean AR loss of the texts."""
    # bf16 only on devices that support it: emulated, it is many times slower than float32.
    mixed = resolve_dtype("auto", device) == "bfloat16"
    consistency = ar = 0.0
    for first in range(0, len(batch), options.together):
        texts = batch[first : first + options.together]
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=mixed):
            logits = _logits(model, texts, device)
        pairs = list(zip(logits, texts, strict=True))
        consistency_part = torch.stack([consistency_loss(*pair) for pair in pairs]).sum() / len(batch)
        ar_part = torch.stack([ar_loss(*pair) for pair in pairs]).sum() / len(batch)
        (consistency_part + options.ar_weight * ar_part).backward()  # type: ignore[no-untyped-call]
        consistency += consistency_part.item()
        ar += ar_part.item()
    return consistency, ar


def _trainable(loaded: LoadedModel, options: TrainOptions) -> Any:
    """Return the model in float32 with gradients for all weights, or only for LoRA's."""
    model: Any = loaded.model.float().requires_grad_(True)
    if options.lora is not None:
        try:
            from peft import LoraConfig, get_peft_model
        except ImportError as error:
            raise OptionError("lora needs peft: pip install peft, or remove lora") from error
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)  # from peft
            torch.manual_seed(options.seed)  # initial weights of the LoRA matrices
            model = get_peft_model(
                model, LoraConfig(r=options.lora, lora_alpha=2 * options.lora, target_modules="all-linear")
            )
    return model


def _logits(model: nn.Module, texts: Sequence[Layout], device: str) -> Sequence[Tensor]:
    """Return the logits (length - first, vocab) of each text, packed into one row. Runs in `text_attention`."""
    read = torch.cat([torch.arange(len(text.tokens)) >= text.first for text in texts])
    result = model(
        input_ids=torch.cat([text.tokens for text in texts])[None].to(device),
        position_ids=torch.cat([text.positions for text in texts])[None].to(device),
        use_cache=False,
        logits_to_keep=read.nonzero().flatten().to(device),
        masks=[text.mask.to(device) for text in texts],
    )
    return torch.split(result.logits[0], [len(text.tokens) - text.first for text in texts])


@contextmanager
def text_attention(model: Any) -> Iterator[None]:
    """Let the model's forward take `masks`, the mask of each text that is packed into its row."""
    from transformers import AttentionInterface

    AttentionInterface.register(_ATTENTION, _attention)
    own = model.config._attn_implementation
    model.set_attn_implementation(_ATTENTION)
    try:
        yield
    finally:
        model.set_attn_implementation(own)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _: None, *, masks: Sequence[Tensor], **options: Any
) -> tuple[Tensor, None]:
    """Attend within each text of a packed sequence, in the form that transformers calls.

    query is (1, heads, rows, head_dim), key and value (1, kv_heads, rows, head_dim), a mask (length, length) bool.
    Returns (1, rows, heads, head_dim).
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    lengths = [len(mask) for mask in masks]
    texts = zip(*(torch.split(states, lengths, dim=2) for states in (query, key, value)), masks, strict=True)
    attended = [sdpa_attention_forward(module, *states, mask[None, None], **options)[0] for *states, mask in texts]
    return torch.cat(attended, dim=1), None


def _save(model: Any, loaded: LoadedModel, out: Path) -> None:
    if hasattr(model, "merge_and_unload"):
        model = model.merge_and_unload()
    model.eval().requires_grad_(False)
    with quiet_transformers():
        model.to(getattr(torch, loaded.dtype.name)).save_pretrained(out)
        loaded.tokenizer.save_pretrained(out)
    (out / CHECKPOINT).unlink(missing_ok=True)


def _text(row: dict[str, Any], seed: str, options: TrainOptions) -> Layout:
    """Build the input of a text with randomly sampled windows of its trajectory."""
    rng = random.Random(seed)
    windows = []
    for i in sorted(rng.sample(range(len(row["starts"])), min(options.windows, len(row["starts"])))):
        start, points = row["starts"][i], row["points"][i]
        fixed = row["response"][start : start + len(points[0])]  # shorter than n at the end of the text
        at = rng.randrange(len(points))
        windows.append(Window(start, rng.choice((points, row["corrected"][i]))[at], fixed))
    return layout(row["prompt"], row["response"], windows)


@lru_cache(maxsize=2)
def _order(count: int, seed: str) -> list[int]:
    """Return the shuffled order of the texts in an epoch."""
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return order
