"""The training run: steps, schedule, checkpoints, held-out evaluation, and a stop that loses nothing.

Loss is Σ w·CE / Σ w with both sums over all micro-batches and ranks before dividing, so it does not depend on how a
batch is split. Everything random derives from the recipe's seed and the step number, so a resumed run is
bit-identical to one that was never interrupted (same machine, same number of threads).
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dflash.errors import TrainingError
from dflash.recipe import Recipe
from torch_dflash.modeling import DraftModel
from torch_dflash.rotary import Rotary
from torch_dflash.training.batches import BatchPlan, Blocks
from torch_dflash.training.features import FeatureStore
from torch_dflash.training.forward import training_forward
from torch_dflash.training.heldout import HeldOut, evaluate_heldout
from torch_dflash.training.loss import chunked_cross_entropy
from torch_dflash.training.setup import draft_config, fresh_drafter

STATE_FILE, LOG_FILE, RECIPE_FILE = "state.pt", "log.jsonl", "recipe.json"


@dataclass(frozen=True)
class Progress:
    """What a progress bar shows after a step. ``loss`` is this step's, ``heldout`` the newest evaluation's length."""

    step: int
    steps: int
    loss: float
    learning_rate: float
    heldout: float | None
    seconds: float
    seconds_left: float


class Trainer:
    """One run in ``folder``. Resumes from its checkpoint where there is one; refuses a folder of another recipe.

    ``micro_batches`` splits each step to fit memory, without changing it. Under ``torchrun`` the rows of a step are
    divided among the ranks."""

    def __init__(
        self,
        target: nn.Module,
        store: FeatureStore,
        recipe: Recipe,
        folder: Path,
        *,
        micro_batches: int = 1,
        evaluate_every: int = 250,
        save_every: int = 100,
    ) -> None:
        self.recipe, self.folder, self.store = recipe, folder, store
        self.micro_batches, self.evaluate_every, self.save_every = micro_batches, evaluate_every, save_every
        self.plan = BatchPlan(store.records, recipe)
        if self.plan.steps_per_epoch < 1:
            raise TrainingError(
                f"{len(self.plan.train)} usable rows are left for training after {len(self.plan.heldout)} held-out "
                f"ones; a step takes {recipe.batch_rows}"
            )
        self.device = next(target.parameters()).device
        self.model: DraftModel = fresh_drafter(draft_config(recipe, target), recipe, target)
        self.rotary = Rotary(self.model.config.rope, self.model.config.head_dim, self.device)
        self.embedding: Tensor = target.get_input_embeddings().weight.detach()  # type: ignore[operator]
        self.head: Tensor = target.get_output_embeddings().weight.detach()  # type: ignore[operator]
        self.labels_of, self.loss_head = self._loss_vocabulary()
        self.optimiser = torch.optim.AdamW(
            self.model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=recipe.weight_decay
        )
        self.step, self.spent = 0, 0.0
        self._whole = True  # no step is half done
        self.heldout: HeldOut | None = None
        self.rank, self.ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self._open()

    def _loss_vocabulary(self) -> tuple[Tensor | None, Tensor]:
        """The head rows that the loss normalises over, in its precision, and token id → row (None: the same)."""
        dtype = torch.bfloat16 if self.recipe.precision == "bfloat16" else self.head.dtype
        if self.recipe.loss_vocab == "full":
            return None, self.head.to(dtype)
        seen = np.unique(np.concatenate([record.tokens for record in self.store.records]))
        rows = torch.zeros(len(self.head), dtype=torch.long)
        rows[seen] = torch.arange(len(seen))
        return rows.to(self.device), self.head[torch.from_numpy(seen).to(self.device)].to(dtype)

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, then a cosine to zero."""
        warm = max(1, round(self.recipe.warmup * self.recipe.steps))
        if step < warm:
            return self.recipe.learning_rate * (step + 1) / warm
        done = (step - warm) / max(1, self.recipe.steps - warm)
        return self.recipe.learning_rate * 0.5 * (1 + math.cos(math.pi * done))

    def loss_sum(self, blocks: Blocks) -> Tensor:
        """Σ w·CE of some blocks, with its graph."""
        tokens, features, final = self.store.batch(blocks.rows)
        recipe, device = self.recipe, self.device
        anchors = torch.from_numpy(blocks.anchors).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=recipe.precision == "bfloat16"):
            hidden = training_forward(
                self.model, self.embedding, self.rotary, features.to(self.embedding.dtype), tokens, anchors
            )
        weights = torch.from_numpy(blocks.weights).to(device)
        used = weights > 0
        labels = torch.from_numpy(blocks.labels).to(device)[used]
        teacher = None
        if recipe.soft_labels:
            before = (anchors[:, :, None] + torch.arange(-1, recipe.block_size - 1, device=device)).clamp(
                min=0, max=tokens.shape[1] - 1
            )
            teacher = torch.stack([row[places] for row, places in zip(final, before, strict=True)])[used]
            teacher = teacher.to(self.loss_head.dtype)
        return chunked_cross_entropy(
            hidden[used],
            self.loss_head,
            labels if self.labels_of is None else self.labels_of[labels],
            weights[used],
            chunk=recipe.loss_chunk,
            teacher=teacher,
            soft=recipe.soft_labels,
        )

    def accumulate(self, blocks: Blocks) -> float:
        """Gradients of the whole step's Σ w·CE / Σ w, over micro-batches and ranks; returns that loss."""
        denominator = float(blocks.weights.sum())
        mine = blocks.split(self.ranks)
        numerator = torch.zeros((), device=self.device)
        if self.rank < len(mine):
            for part in mine[self.rank].split(self.micro_batches):
                loss = self.loss_sum(part) / denominator
                loss.backward()
                numerator += loss.detach()
        if self.ranks > 1:
            dist.all_reduce(numerator)
            for weight in self.model.parameters():
                if weight.grad is None:
                    weight.grad = torch.zeros_like(weight)
                dist.all_reduce(weight.grad)
        return float(numerator)

    def train_step(self) -> float:
        """One optimiser step; returns its loss. Raises ``TrainingError`` where it is not finite."""
        for group in self.optimiser.param_groups:
            group["lr"] = self.learning_rate(self.step)
        loss = self.accumulate(self.plan.step(self.step))
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
        if not math.isfinite(loss) or not torch.isfinite(norm):
            raise TrainingError(
                f"the loss is {loss} and the gradient's norm {float(norm)} at step {self.step}, which changed nothing; "
                f"the state before it is in {self.folder}. A lower learning rate (now {self.recipe.learning_rate:g}) "
                "may help"
            )
        self._whole = False
        self.optimiser.step()
        self.step, self._whole = self.step + 1, True
        self.optimiser.zero_grad(set_to_none=True)
        return loss

    def dry_step(self) -> None:
        """Forward and backward over the longest rows, so that a lack of memory shows before the run, not in it."""
        self.accumulate(self.plan.longest())
        self.optimiser.zero_grad(set_to_none=True)

    def evaluate(self) -> HeldOut:
        self.heldout = evaluate_heldout(
            self.model,
            self.embedding,
            self.loss_head if self.recipe.loss_vocab == "full" else self.head.to(self.loss_head.dtype),
            self.rotary,
            self.store,
            self.plan.heldout,
            precision=self.recipe.precision,
        )
        return self.heldout

    def run(self, report: Callable[[Progress], None], *, until: int | None = None) -> None:
        """Train to ``until`` (default: the recipe's end), saving and evaluating on the way. An interruption
        (``KeyboardInterrupt``) saves the state of the last whole step and is raised again."""
        until = min(until or self.recipe.steps, self.recipe.steps)
        if self.step == 0:
            self.dry_step()
        begun, first = time.monotonic(), self.step
        try:
            while self.step < until:
                at = time.monotonic()
                loss = self.train_step()
                self.spent += time.monotonic() - at
                if self.step % self.evaluate_every == 0 or self.step == until:
                    self._log({"step": self.step, "seconds": round(self.spent, 1), **asdict(self.evaluate())})
                if self.step % self.save_every == 0:
                    self.save()
                each = (time.monotonic() - begun) / (self.step - first)
                heldout = self.heldout.acceptance_length if self.heldout else None
                rate = self.learning_rate(self.step)
                if self.step % 25 == 0:
                    self._log({"step": self.step, "loss": round(loss, 5), "learning_rate": rate})
                report(Progress(self.step, until, loss, rate, heldout, self.spent, each * (until - self.step)))
        finally:
            if self.step > first and self._whole:  # else the optimiser was interrupted, and the last save stands
                self.save()

    def _open(self) -> None:
        path = self.folder / RECIPE_FILE
        if path.exists():
            found = Recipe.from_dict(json.loads(path.read_text()))
            if found != self.recipe:
                changed = [k for k, v in self.recipe.to_dict().items() if found.to_dict()[k] != v]
                raise TrainingError(
                    f"{self.folder} holds a run with another {', '.join(changed)}; resume it with the same recipe or "
                    "choose another folder"
                )
        elif self.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(self.recipe.to_dict(), indent=2) + "\n")
        state = self.folder / STATE_FILE
        if state.exists():
            saved = torch.load(state, map_location=self.device, weights_only=True)
            self.model.load_state_dict(saved["model"])
            self.optimiser.load_state_dict(saved["optimiser"])
            self.step, self.spent = saved["step"], saved["spent"]
            self.heldout = HeldOut(**saved["heldout"]) if saved["heldout"] else None

    def save(self) -> None:
        """The whole state, atomically: a killed run finds the old one or the new one, never half of it. Raises
        ``TrainingError`` where it cannot be written."""
        if self.rank:
            return
        state = {
            "model": self.model.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "step": self.step,
            "spent": self.spent,
            "heldout": asdict(self.heldout) if self.heldout else None,
        }
        partial = self.folder / (STATE_FILE + ".partial")
        try:
            torch.save(state, partial)
            os.replace(partial, self.folder / STATE_FILE)
        except (OSError, RuntimeError) as error:  # on a full disk torch's writer raises the latter
            partial.unlink(missing_ok=True)
            reason = str(error).splitlines()[0]
            raise TrainingError(f"{self.folder} cannot be written ({reason}); the state saved before stands") from error

    def _log(self, record: dict[str, Any]) -> None:
        if self.rank == 0:
            with (self.folder / LOG_FILE).open("a") as stream:
                stream.write(json.dumps(record) + "\n")
