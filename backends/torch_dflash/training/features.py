"""The target's features of the training rows: computed once, kept in one file of a bounded size.

Shapes: S tokens of the longest row in a batch, K taps, H hidden size. A token costs 2·H·(K+1) bytes: its taps and its
final hidden state (for soft labels), in bfloat16.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from dflash.errors import TrainingError
from dflash.records import ResponseRecord
from torch_dflash.taps import Taps


class FeatureStore:
    """Features of ``records`` under ``target``, streamed through ``folder`` (None keeps nothing).

    A row is computed at its first visit and read afterwards; rows beyond ``limit_bytes`` are computed at every visit.
    Raises ``TrainingError`` where the target makes values that bfloat16 cannot hold, or the disk is full."""

    def __init__(
        self,
        target: nn.Module,
        records: Sequence[ResponseRecord],
        layer_ids: Sequence[int],
        *,
        folder: Path | None = None,
        limit_bytes: int = 8 << 30,
        precision: str = "float32",
        fingerprint: str = "",
    ) -> None:
        self.target, self.records, self.precision = target, records, precision
        self.taps = Taps(target, layer_ids)
        self.hidden = target.config.get_text_config().hidden_size  # type: ignore[operator, union-attr]
        self.width = (len(layer_ids) + 1) * self.hidden
        lengths = np.array([len(record) for record in records])
        self.starts = np.concatenate(([0], np.cumsum(lengths)))
        self.device = next(target.parameters()).device
        self._file: np.ndarray | None = None
        self._done = np.zeros(len(records), dtype=np.uint8)
        if folder is not None and limit_bytes > 0:
            self._open(folder, limit_bytes, [list(map(int, layer_ids)), precision, fingerprint])

    def _open(self, folder: Path, limit_bytes: int, key: list[object]) -> None:
        digest = hashlib.sha256(json.dumps(key).encode())
        for record in self.records:
            digest.update(record.tokens.tobytes())
        fits = int(np.searchsorted(self.starts[1:] * self.width * 2, limit_bytes, side="right"))
        if not fits:
            return
        name, size = f"features-{digest.hexdigest()[:16]}-{fits}", int(self.starts[fits])
        try:
            folder.mkdir(parents=True, exist_ok=True)
            data, done = folder / f"{name}.bin", folder / f"{name}.rows"
            mode: Literal["r+", "w+"] = "r+" if data.exists() and done.exists() else "w+"
            if mode == "r+":
                self._refuse_short(data, size * self.width * 2)
                self._refuse_short(done, fits)
            self._refuse_full_disk(data, size * self.width * 2)
            self._file = np.memmap(data, np.int16, mode, shape=(size, self.width))
            self._done = np.memmap(done, np.uint8, mode, shape=(fits,))
        except OSError as error:
            raise TrainingError(f"the feature cache {folder / name}.bin cannot be written: {error.strerror}") from None

    @staticmethod
    def _refuse_short(path: Path, size: int) -> None:
        if (found := path.stat().st_size) != size:
            raise TrainingError(f"the feature cache {path} holds {found} bytes, and should hold {size}; delete it")

    @staticmethod
    def _refuse_full_disk(path: Path, size: int) -> None:
        """The file is sparse, and a disk that fills up under a memory map kills the process: look beforehand."""
        written = path.stat().st_blocks * 512 if path.exists() else 0
        if (free := shutil.disk_usage(path.parent).free) < size - written:
            raise TrainingError(
                f"the feature cache {path} will need {(size - written) / 1e9:.1f} GB more and the disk has "
                f"{free / 1e9:.1f} GB left; give it a smaller limit"
            )

    def batch(self, rows: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """``tokens`` [b, S], ``features`` [b, S, K*H] and ``final`` [b, S, H] of these rows, zero-padded."""
        length = max(len(self.records[row]) for row in rows)
        tokens = torch.zeros(len(rows), length, dtype=torch.long)
        both = torch.zeros(len(rows), length, self.width, dtype=torch.bfloat16)
        for place, row in enumerate(rows):
            tokens[place, : len(self.records[row])] = torch.from_numpy(self.records[row].tokens)
        missing = [place for place, row in enumerate(rows) if not (self._is_cached(row) and self._done[row])]
        if missing:
            both[missing] = self._compute(tokens[missing]).cpu()
        for place, row in enumerate(rows):
            size = len(self.records[row])
            both[place, size:] = 0
            if not self._is_cached(row):
                continue
            assert self._file is not None
            span = slice(self.starts[row], self.starts[row + 1])
            if place in missing:
                self._file[span] = both[place, :size].view(torch.int16).numpy()
                self._done[row] = 1
            else:
                both[place, :size] = torch.from_numpy(np.array(self._file[span])).view(torch.bfloat16)
        both, tokens = both.to(self.device), tokens.to(self.device)
        return tokens, both[..., : -self.hidden], both[..., -self.hidden :]

    def _is_cached(self, row: int) -> bool:
        return self._file is not None and row < len(self._done)

    @torch.no_grad()
    def _compute(self, tokens: Tensor) -> Tensor:
        tokens = tokens.to(self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bfloat16"):
            decoder = self.target.get_decoder()  # type: ignore[operator]
            final = decoder(input_ids=tokens, use_cache=False).last_hidden_state
        features = self.taps.take()
        assert features is not None
        both = torch.cat((features, final), dim=-1).to(torch.bfloat16)
        if not both.isfinite().all():
            raise TrainingError("the target's features are not finite in bfloat16; nothing can be learnt from them")
        return both

    def close(self) -> None:
        self.taps.close()
