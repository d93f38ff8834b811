"""Where a step began, and how to get back there while its gradients are not yet agreed on.

Remembered are buffers (BatchNorm counts in the forward pass), gradients, which parameters are trained, the optimizers'
hyper-parameters (a scheduler changes the learning rate) and the small parts. Parameters and optimizer state change only
after the agreement, so they are not copied: a mark costs next to nothing for a model without buffers. `undo` says
whether that held.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as registry
from torch.nn.modules.batchnorm import _NormBase

from ftlab.checkpoint.parts import load_part, save_part

_SEEN = attrgetter("grad", "_version", "requires_grad")
_registered = [0, 0]  # how many parameters and modules were registered anywhere; whether that is counted


def registrations() -> int:
    """A number that changes whenever a module may have got other parameters; counted from the first call on."""
    if not _registered[1]:
        _registered[1] = 1
        registry.register_module_parameter_registration_hook(_count)
        registry.register_module_module_registration_hook(_count)
    return _registered[0]


def _count(module: nn.Module, name: str, value: object) -> None:
    _registered[0] += 1


class StepMark:
    """What is needed to undo an unfinished step. Buffers are copied only when they changed since the last mark.

    A buffer has changed if its version says so; the kernels of the normalisation layers do not count versions, so
    theirs (small ones) are compared by value.
    """

    def __init__(self, parts: Mapping[str, Any]) -> None:
        self.registered = registrations()
        modules = [part for part in parts.values() if isinstance(part, nn.Module)]
        self.parameters = list(dict.fromkeys(each for module in modules for each in module.parameters()))
        layers = [layer for module in modules for layer in module.modules()]
        self.places = [(layer._buffers, name) for layer in layers for name, buffer in layer._buffers.items()
                       if buffer is not None]
        self.uncounted = [isinstance(layer, _NormBase) for layer in layers for buffer in layer._buffers.values()
                          if buffer is not None]
        self.optimizers = [part for part in parts.values() if isinstance(part, torch.optim.Optimizer)]
        self.small = {name: part for name, part in parts.items()
                      if not isinstance(part, nn.Module | torch.optim.Optimizer)}
        self.buffers = [self._buffer(index) for index in range(len(self.places))]
        self.copies = [buffer.detach().clone() for buffer in self.buffers]
        self.versions = [buffer._version for buffer in self.buffers]
        self.seen: list[tuple[torch.Tensor | None, int, bool]] = []  # each parameter's gradient, version, requires_grad
        self.groups: list[list[dict[str, Any]]] = []  # each optimizer's hyper-parameters
        self.saved: dict[str, Any] = {}

    def _buffer(self, index: int) -> torch.Tensor:
        """The buffer that is in this place now; a forward pass may have put a new one there."""
        layer, name = self.places[index]
        buffer = layer[name]
        assert buffer is not None
        return buffer

    def take(self) -> None:
        """A step begins here."""
        for index in self._changed_indices() if self.buffers else ():
            self.buffers[index] = self._buffer(index)
            self.copies[index] = self.buffers[index].detach().clone()
            self.versions[index] = self.buffers[index]._version
        self.seen = list(map(_SEEN, self.parameters))  # in every step, so without a loop in Python
        self.groups = [[_copied(group) for group in optimizer.param_groups] for optimizer in self.optimizers]
        if self.small:
            self.saved = {name: copy.deepcopy(save_part(part, name)) for name, part in self.small.items()}

    def changed_buffers(self) -> list[torch.Tensor]:
        """The buffers with fractions that have changed since: those that ranks average."""
        return [buffer for index in self._changed_indices() if (buffer := self._buffer(index)).is_floating_point()]

    def touched(self) -> bool:
        """Whether a parameter has changed since, as far as its version tells."""
        return any(parameter._version != version
                   for parameter, (_, version, _) in zip(self.parameters, self.seen, strict=True))

    def undo_buffers(self) -> None:
        """Put changed buffers back."""
        with torch.no_grad():
            for index in self._changed_indices():
                layer, name = self.places[index]
                layer[name] = self.buffers[index]
                self.buffers[index].copy_(self.copies[index])
                self.versions[index] = self.buffers[index]._version

    def undo(self) -> bool:
        """Go back; False if the step changed parameters, which are not remembered."""
        self.undo_buffers()
        for parameter, (grad, _, trained) in zip(self.parameters, self.seen, strict=True):
            parameter.grad = grad
            if parameter.requires_grad != trained:
                parameter.requires_grad_(trained)
        for optimizer, groups in zip(self.optimizers, self.groups, strict=True):
            _put_back(optimizer.param_groups, groups)
        for name, saved in self.saved.items():
            load_part(self.small[name], copy.deepcopy(saved), name)
        return not self.touched()

    def _changed_indices(self) -> list[int]:
        return [index for index, then in enumerate(self.buffers)
                if (now := self._buffer(index)) is not then or now._version != self.versions[index]
                or (self.uncounted[index] and not torch.equal(now, self.copies[index]))]


def _copied(group: dict[str, Any]) -> dict[str, Any]:
    if isinstance(group.get("lr"), torch.Tensor):  # may be changed in place
        return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in group.items()}
    return dict(group)


def _put_back(groups: list[dict[str, Any]], saved: list[dict[str, Any]]) -> None:
    del groups[len(saved):]
    for group, before in zip(groups, saved, strict=True):
        for key in group.keys() - before.keys():
            del group[key]
        for key, value in before.items():
            if isinstance(value, torch.Tensor) and isinstance(group.get(key), torch.Tensor):
                group[key].copy_(value)
            else:
                group[key] = value
