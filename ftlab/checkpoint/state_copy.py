"""A whole copy of a training state, to go back to where a mark is not enough.

Some steps change parameters between two collectives (two optimizers that take turns, a metric that is reduced after
`optimizer.step()`), or in ways that leave no trace (`parameter.data`). For them everything is copied when the step
begins: one memory copy, into buffers that are used again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ftlab.checkpoint import tree
from ftlab.checkpoint.fingerprint import leaves, same_bits

if TYPE_CHECKING:
    from ftlab.checkpoint.state import TrainingState


class StateCopy:
    """The state at one moment."""

    def __init__(self) -> None:
        self._header = b""
        self._tensors: list[torch.Tensor] = []

    @property
    def bytes(self) -> int:
        """How much memory it takes."""
        return sum(each.numel() * each.element_size() for each in self._tensors)

    def take(self, state: TrainingState) -> None:
        """Copy what is protected."""
        packed = tree.pack(state.capture())
        here, there = self._tensors, packed.tensors
        self._header = packed.header
        if [(each.shape, each.dtype) for each in here] == [(each.shape, each.dtype) for each in there]:
            if there:
                torch._foreach_copy_(here, there)
        else:
            self._tensors = [each.detach().clone() for each in there]

    def put_back(self, state: TrainingState) -> None:
        """Load it, as a rank does that receives its state from another one."""
        state.restore(tree.unpack(tree.Packed(self._header, [each.clone() for each in self._tensors])))

    def differences(self, state: TrainingState) -> list[str]:
        """The places where the state has other bits than the copy."""
        then = dict(leaves(tree.unpack(tree.Packed(self._header, self._tensors))))
        now = dict(leaves(state.capture()))
        return sorted(path for path in then.keys() | now.keys() if not path.startswith("rider")
                      and not (path in then and path in now and same_bits(then[path], now[path])))
