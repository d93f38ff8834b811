"""Learning rates: lowered by a recovery, and kept in order where a batch comes in pieces."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from ftlab.checkpoint.state import TrainingState

LRScheduler = torch.optim.lr_scheduler.LRScheduler


def lower_rate(parts: Mapping[str, Any], factor: float) -> None:
    """Multiply the learning rate of every optimizer, also where schedulers keep it."""
    for part in parts.values():
        if isinstance(part, torch.optim.Optimizer):
            for group in part.param_groups:
                group["lr"] = group["lr"] * factor
                if "initial_lr" in group:
                    group["initial_lr"] = group["initial_lr"] * factor
        elif hasattr(part, "base_lrs"):  # a scheduler computes the rate anew from these
            part.base_lrs = [rate * factor for rate in part.base_lrs]


class Rates:
    """Learning rates at the beginning of a batch: a loop that moves its scheduler on after each step moves it on after
    each piece of a batch too, of which only the last counts. Schedulers are known if they are among the parts."""

    def __init__(self, optimizer: torch.optim.Optimizer, state: TrainingState) -> None:
        schedulers = [part for part in state.parts.values() if isinstance(part, LRScheduler)]
        self._schedulers = [(part, copy.deepcopy(part.state_dict())) for part in schedulers]
        self._groups = [(group, {name: value for name, value in group.items() if name != "params"})
                        for group in optimizer.param_groups] if schedulers else []

    def put_back(self) -> None:
        """As they were."""
        for scheduler, saved in self._schedulers:
            scheduler.load_state_dict(copy.deepcopy(saved))
        for group, saved in self._groups:
            group.update(saved)
