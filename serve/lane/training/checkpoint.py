"""Checkpoints of a training: weights, optimiser and random numbers between two steps.

A file is renamed into place, so there is a whole one at any moment.
"""

import os
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from serve.lane.training.step import TrainStep

#: Key of the file's metadata.
STEPS = "steps"


def save_checkpoint(path: Path, step: TrainStep, steps_done: int) -> None:
    """Write a checkpoint after so many steps; raises OSError."""
    tensors = {f"module.{name}": one for name, one in step.module.state_dict().items()}
    for index, state in step.optimizer.state_dict()["state"].items():
        tensors |= {f"adam.{index}.{name}": one for name, one in state.items()}
    tensors["random"] = torch.get_rng_state()
    _replace(path, tensors, {STEPS: str(steps_done)})


def load_checkpoint(path: Path, step: TrainStep) -> int:
    """Go back to the checkpoint, if there is one; returns how many steps are done."""
    if not path.exists():
        return 0
    found = load_file(path)
    with safe_open(path, "pt") as file:
        steps_done = int(file.metadata()[STEPS])
    module = {name[7:]: one for name, one in found.items() if name.startswith("module.")}
    step.module.load_state_dict(module)
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in found.items():
        if name.startswith("adam."):
            _, index, key = name.split(".")
            state.setdefault(int(index), {})[key] = tensor
    groups = step.optimizer.state_dict()["param_groups"]
    step.optimizer.load_state_dict({"state": state, "param_groups": groups})
    torch.set_rng_state(found["random"])
    return steps_done


def save_weights(path: Path, step: TrainStep) -> None:
    """Write the weights as a model repository has them; raises OSError."""
    _replace(path, dict(step.module.state_dict()), {})


def _replace(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    part = path.with_suffix(".part")
    # Tensors that share memory, as tied weights do, are written under each name.
    save_file({name: one.detach().clone() for name, one in tensors.items()}, part, metadata)
    with part.open("rb") as file:
        os.fsync(file.fileno())
    part.replace(path)
