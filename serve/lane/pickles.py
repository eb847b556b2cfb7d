"""Reads what `torch.save` wrote, and runs no code that a file brings."""

import re
import warnings
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from serve.errors import ConfigError

_CODE = re.compile(r"(?:Unsupported global: GLOBAL |GLOBAL )([\w.]+)")


def read_pickle(source: Path, what: str, advice: str) -> Any:
    """Return what `torch.save` wrote to `source`, as long as it holds no code.

    Raises ConfigError otherwise, saying that `what` is wanted, and with the advice what to save.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(source, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise ConfigError(f"{source}: does not exist") from error
    except UnpicklingError as error:
        code = _CODE.search(str(error))
        held = f"'{code[1]}'" if code else "objects that are no tensors"
        raise ConfigError(
            f"{source}: it holds {held}, which would be code to run; nothing was loaded. {advice}"
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, AttributeError) as error:
        raise ConfigError(f"{source}: cannot be read as {what}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
