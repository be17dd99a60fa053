"""Files of `torch.save` that others wrote, read without running anything that is in them.

Such a file is a pickle, which names the classes and functions that make its contents. torch's
restricted loader knows tensors and plain values; the few classes of DeepSpeed that its checkpoints
name are replaced by stand-ins, and a file that names anything else is refused.
"""

from __future__ import annotations

import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import torch


class _Fragment:
    """Where a parameter's part lies in a rank's flat group, in elements."""

    numel: int
    start: int


class _Scaler:
    """A loss scaler's attributes."""


STANDINS = {
    "deepspeed.utils.tensor_fragment.fragment_address": _Fragment,
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": _Scaler,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": _Scaler,
    "deepspeed.runtime.zero.config.ZeroStageEnum": int,
}


def load_pickle(path: Path) -> Any:
    """A file of `torch.save`, with tensors that stay on the disk until they are read.

    Raises:
        ValueError: it can't be read, or it names a class that is not needed for a checkpoint.
    """
    try:
        packed = zipfile.is_zipfile(path)  # the other format can't be mapped
        with torch.serialization.safe_globals([(c, name) for name, c in STANDINS.items()]):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=packed)
    except FileNotFoundError as error:
        raise ValueError(f"{path} is missing") from error
    except pickle.UnpicklingError as error:
        raise ValueError(f"{path.name}: {_refusal(path, error)}; it is not loaded") from error
    except (OSError, EOFError, RuntimeError, ValueError, KeyError) as error:
        text = " ".join(str(error).split())[:200]
        raise ValueError(f"{path} is damaged or no file of torch.save: {text}") from error


def _refusal(path: Path, error: Exception) -> str:
    if zipfile.is_zipfile(path):
        named = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
        strange = sorted(set(named) - STANDINS.keys())
    else:
        found = re.search(r"GLOBAL ([\w.]+)", str(error))
        strange = [found[1]] if found else []
    if not strange:
        return " ".join(str(error).split())[:200]
    return f"it would run code of {', '.join(strange)}, which no checkpoint needs"
