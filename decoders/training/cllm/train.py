"""Train a model to map any point of its Jacobi trajectories to the fixed point (CLLM, Algorithm 2).

A forward pass has a few texts, each with several of its windows. The loss is the consistency loss plus w times the AR
loss on the model's own text. Randomness depends only on seed, epoch and row, so a resumed run ends with the same
weights.
"""

from __future__ import annotations

import json
import math
import random
import time
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from tot.decoders.errors import ModelError, OptionError
from tot.decoders.files import replacing, write_text
from tot.decoders.models.loaded import LoadedModel
from tot.decoders.models.loading import quiet_transformers, resolve_dtype
from tot.decoders.training.cllm.losses import Layout, Window, ar_loss, consistency_loss, layout
from tot.decoders.training.cllm.settings import TrainOptions
from tot.decoders.training.cllm.trajectories import trajectories

CHECKPOINT = "checkpoint.pt"
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
    done = _load_checkpoint(model, optimizer, out / CHECKPOINT)
    curve = out / CURVE
    known = curve.read_text().splitlines(keepends=True)[:done] if curve.exists() else []
    write_text(curve, known)  # drop the steps after the checkpoint
    model.train()
    last_saved = time.monotonic()
    for step in range(done, steps):
        # Warmup over 5% of the steps, then a cosine decay to a tenth.
        warmup, decay = (step + 1) / max(1, steps // 20), 0.55 + 0.45 * math.cos(math.pi * step / steps)
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate * min(1.0, warmup) * decay
        epoch, at = step // by_epoch, step % by_epoch * options.accumulate
        numbers = _order(len(rows), f"{options.seed}/{epoch}")[at : at + options.accumulate]
        batch = [_text(rows[number], f"{options.seed}/{epoch}/{number}", options) for number in numbers]
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
            _save_checkpoint(model, optimizer, step, out / CHECKPOINT)
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
            pairs = list(zip(text_logits(model, texts, device), texts, strict=True))
        consistency_part = torch.stack([consistency_loss(*pair) for pair in pairs]).sum() / len(batch)
        ar_part = torch.stack([ar_loss(*pair) for pair in pairs]).sum() / len(batch)
        (consistency_part + options.ar_weight * ar_part).backward()  # type: ignore[no-untyped-call]
        consistency += consistency_part.item()
        ar += ar_part.item()
    return consistency, ar


def text_logits(model: nn.Module, texts: Sequence[Layout], device: str) -> list[Tensor]:
    """Return the logits (length - first, vocab) of each text, from one forward pass over a padded batch."""
    longest, begin = max(len(text.tokens) for text in texts), min(text.first for text in texts)
    rooms = [longest - len(text.tokens) for text in texts]
    masks = torch.stack([pad(text.mask, (0, room, 0, room)) for text, room in zip(texts, rooms, strict=True)])
    result = model(
        input_ids=pad_sequence([text.tokens for text in texts], batch_first=True).to(device),
        position_ids=pad_sequence([text.positions for text in texts], batch_first=True).to(device),
        attention_mask=(masks | torch.eye(longest, dtype=torch.bool))[:, None].to(device),  # padding sees itself
        use_cache=False,
        logits_to_keep=longest - begin,
    )
    spans = [slice(text.first - begin, len(text.tokens) - begin) for text in texts]
    return [logits[span] for logits, span in zip(result.logits, spans, strict=True)]


def _trainable(loaded: LoadedModel, options: TrainOptions) -> Any:
    """Return the model in float32 with gradients for all weights, or only for LoRA's."""
    model: Any = loaded.model.float().requires_grad_(True)
    model.set_attn_implementation("sdpa")  # takes masks of booleans
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


def _save_checkpoint(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, path: Path) -> None:
    """Replace the checkpoint: the trained weights, the optimizer's state and the step."""
    trained = {name: weight.detach() for name, weight in model.named_parameters() if weight.requires_grad}
    with replacing(path) as file:
        torch.save({"weights": trained, "optimizer": optimizer.state_dict(), "step": step}, file)


def _load_checkpoint(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> int:
    """Load a checkpoint. Returns the step to resume from, or 0 without a checkpoint."""
    if not path.exists():
        return 0
    saved = torch.load(path, weights_only=True)
    try:
        unknown = model.load_state_dict(saved["weights"], strict=False).unexpected_keys
    except RuntimeError as error:  # weights with other shapes
        unknown = [str(error)]
    if unknown:
        raise OptionError(
            f"{path.parent} was started with other options: resume with the same options, or give another folder"
        )
    optimizer.load_state_dict(saved["optimizer"])
    return int(saved["step"])


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
