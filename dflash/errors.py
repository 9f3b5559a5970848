"""Every error a user can cause, one class a kind, so that callers can tell them apart.

A message is one sentence that names what is wrong, where, and what would be right. ``exit_code`` is what the
command line ends with: 2 for a request that could never work, 1 for something that failed.
"""


class DFlashError(Exception):
    """Base of every error raised on purpose by dflash."""

    exit_code = 1


class UsageError(DFlashError):
    """An argument that can never work: a negative budget, a temperature below zero, an unknown rule."""

    exit_code = 2


class PromptError(UsageError):
    """A prompt that cannot be used: empty, longer than the model's context, ids outside the vocabulary."""


class BackendError(DFlashError):
    """A backend that is unknown, not installed, or cannot do what was asked."""


def not_numbers(dtype: str) -> BackendError:
    """For a target whose logits overflowed."""
    return BackendError(
        f"the target's logits are not numbers in {dtype}; bfloat16 and float32 reach further than float16"
    )


class ModelNotFoundError(DFlashError):
    """A model name that is neither a registry name, nor a local folder, nor reachable on the hub."""


class StorageError(DFlashError):
    """A file or folder that cannot be read or written: full disk, read-only cache, failed hash."""


class CheckpointError(DFlashError):
    """A drafter checkpoint that cannot be loaded: its files, keys, values or tensors."""


class ConfigError(CheckpointError):
    """A drafter ``config.json`` with a missing, unknown, contradictory or impossible value."""


class DialectError(ConfigError):
    """A drafter in a dialect that is recognised but not supported."""


class WeightsError(CheckpointError):
    """Drafter weights that are corrupt, missing, left over or of the wrong shape."""


class PairError(CheckpointError):
    """A drafter that does not fit the target it was loaded with."""


class RewindError(DFlashError):
    """A target whose cache cannot forget rejected tokens."""


class TrainingError(DFlashError):
    """A training run that cannot start, continue or resume."""
