"""Training state: model, optimizer, scheduler, scaler, gradients and extras, which survive together or not at all.

`capture` and `restore` move the whole of it. `mark` and `rollback` undo what an unfinished step changed before its
gradients were agreed on: buffers (BatchNorm counts in the forward pass), gradients and the extras. Parameters and
optimizer state change only after the agreement, so they need no copy: marking costs next to nothing for a model
without buffers. A step that changed parameters before a collective of its own that failed cannot be undone; `rollback`
says so, and the state has to come from another rank. Random numbers are not part of the state: they are a function of
(seed, step, shard), see `ftlab.elastic.seeding`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.data import DataLoader

from ftlab.checkpoint import tree
from ftlab.checkpoint.rng import Generators
from ftlab.errors import ConfigError

_GRAD_AND_VERSION = attrgetter("grad", "_version")


class TrainingState:
    """The parts a job protects, by name, and the number of committed steps."""

    def __init__(self) -> None:
        self.parts: dict[str, Any] = {}
        self.step = 0
        self._marked: _Mark | None = None
        self._in_step = False  # between `mark` and `commit`
        self.rider: Any = None  # has a state_dict: travels with the state, and is no part of its digest

    def protect(self, parts: Mapping[str, Any]) -> None:
        """Add parts; raises ConfigError for one that cannot be saved."""
        for name, part in parts.items():
            _require_protectable(name, part)
            tree.pack(_save(part))  # what cannot travel is better known now than in a recovery
            self.parts[name] = part

    @classmethod
    def of(cls, parts: Mapping[str, Any], step: int) -> TrainingState:
        """A state of these parts, to be saved or loaded at once."""
        state = cls()
        for name, part in parts.items():
            _require_protectable(name, part)
        state.parts, state.step = {name: _bare(part) for name, part in parts.items()}, step
        return state

    def rebuild(self, parts: Mapping[str, Any]) -> None:
        """Take parts that were built anew for the ones of their names; they are at step 0."""
        for name, part in parts.items():
            _require_protectable(name, part)
        self.parts = {**self.parts, **parts}
        self.step, self._marked, self._in_step = 0, None, False

    @property
    def sharded(self) -> bool:
        """Whether each rank holds only a part of the parameters."""
        return any(tree.is_sharded(parameter) for parameter in self.parameters())

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The parts that are modules."""
        return {name: part for name, part in self.parts.items() if isinstance(part, nn.Module)}

    def parameters(self) -> list[nn.Parameter]:
        """All trainable parameters, each once, in a fixed order."""
        found = [parameter for module in self.modules.values() for parameter in module.parameters()
                 if parameter.requires_grad]
        return list(dict.fromkeys(found))

    def signature(self) -> list[list[Any]]:
        """Names, shapes and types of the modules' state: equal on all ranks of a healthy job."""
        return [[f"{part}.{name}", list(value.shape), str(value.dtype)] for part, module in self.modules.items()
                for name, value in module.state_dict().items() if isinstance(value, torch.Tensor)]

    def capture(self) -> dict[str, Any]:
        """The whole state as a tree whose tensors are the live ones."""
        riding = {"rider": self.rider.state_dict()} if self.rider is not None else {}
        return {"step": self.step, "parts": {name: _save(part) for name, part in self.parts.items()},
                "grads": [None if p.grad is None else p.grad for p in self.parameters()], **riding}

    def capture_only(self, part: str) -> dict[str, Any]:
        """One part alone: what differs between ranks that hold the same state."""
        return {"step": self.step, "parts": {part: _save(self.parts[part])} if part in self.parts else {}, "grads": []}

    def restore(self, captured: Mapping[str, Any]) -> None:
        """Load a captured tree into the live parts."""
        random = [name for name in captured["parts"] if isinstance(self.parts[name], Generators | torch.Generator)]
        for name in [*(each for each in captured["parts"] if each not in random), *random]:  # loading may draw numbers
            _load(self.parts[name], captured["parts"][name])
        for parameter, grad in zip(self.parameters(), captured["grads"], strict=True):
            parameter.grad = grad
        self.step = int(captured["step"])
        if self.rider is not None and "rider" in captured:
            self.rider.load_state_dict(captured["rider"])

    def digest(self) -> str:
        """SHA-256 of the whole state: equal means the same bits."""
        return tree.digest({name: value for name, value in self.capture().items() if name != "rider"})

    def mark(self) -> None:
        """Remember what an unfinished step may change before its gradients are agreed on."""
        if self._marked is None:
            self._marked = _Mark(self)
        self._marked.take()
        self._in_step = True

    def commit(self) -> None:
        """The step is done: what it changed stays, whatever comes."""
        self.step += 1
        self._in_step = False

    def rollback(self) -> bool:
        """Undo what an unfinished step changed since `mark`; False if it changed what cannot be undone."""
        if self._marked is None or not self._in_step:
            return True
        return self._marked.undo()

    def changed_buffers(self) -> list[torch.Tensor]:
        """Buffers the forward pass has changed since `mark` (BatchNorm's statistics): ranks must agree on them."""
        return self._marked.changed() if self._marked else []

    def reset_buffers(self) -> None:
        """Put changed buffers back to where they were at `mark`: every shard of a step starts from the same ones."""
        if self._marked is not None:
            self._marked.undo_buffers()


class _Mark:
    """What `rollback` needs. Buffers are copied only when they changed since the last mark.

    A buffer has changed if its version says so; the kernels of the normalisation layers do not count versions, so
    theirs (small ones) are compared by value.
    """

    def __init__(self, state: TrainingState) -> None:
        self.parameters = state.parameters()
        layers = [layer for module in state.modules.values() for layer in module.modules()]
        self.places = [(layer._buffers, name) for layer in layers for name, buffer in layer._buffers.items()
                       if buffer is not None]
        self.uncounted = [isinstance(layer, _NormBase) for layer in layers for buffer in layer._buffers.values()
                          if buffer is not None]
        self.small = {name: part for name, part in state.parts.items()
                      if not isinstance(part, nn.Module | torch.optim.Optimizer)}
        self.buffers = [self._buffer(index) for index in range(len(self.places))]
        self.copies = [buffer.detach().clone() for buffer in self.buffers]
        self.versions = [buffer._version for buffer in self.buffers]
        self.seen: list[tuple[torch.Tensor | None, int]] = []  # each parameter's gradient and version
        self.saved: dict[str, Any] = {}

    def _buffer(self, index: int) -> torch.Tensor:
        """The buffer that is in this place now; a forward pass may have put a new one there."""
        layer, name = self.places[index]
        buffer = layer[name]
        assert buffer is not None
        return buffer

    def take(self) -> None:
        for index in self.changed_indices() if self.buffers else ():
            self.buffers[index] = self._buffer(index)
            self.copies[index] = self.buffers[index].detach().clone()
            self.versions[index] = self.buffers[index]._version
        self.seen = list(map(_GRAD_AND_VERSION, self.parameters))  # in every step, so without a loop in Python
        if self.small:
            self.saved = {name: copy.deepcopy(_save(part)) for name, part in self.small.items()}

    def changed_indices(self) -> list[int]:
        return [index for index, then in enumerate(self.buffers)
                if (now := self._buffer(index)) is not then or now._version != self.versions[index]
                or (self.uncounted[index] and not torch.equal(now, self.copies[index]))]

    def changed(self) -> list[torch.Tensor]:
        return [buffer for index in self.changed_indices() if (buffer := self._buffer(index)).is_floating_point()]

    def undo_buffers(self) -> None:
        with torch.no_grad():
            for index in self.changed_indices():
                layer, name = self.places[index]
                layer[name] = self.buffers[index]
                self.buffers[index].copy_(self.copies[index])
                self.versions[index] = self.buffers[index]._version

    def undo(self) -> bool:
        self.undo_buffers()
        for parameter, (grad, _) in zip(self.parameters, self.seen, strict=True):
            parameter.grad = grad
        for name, saved in self.saved.items():
            _load(self.small[name], copy.deepcopy(saved))
        return all(parameter._version == version
                   for parameter, (_, version) in zip(self.parameters, self.seen, strict=True))


def differences(mine: list[list[Any]], theirs: list[list[Any]]) -> Iterator[str]:
    """What differs between two signatures, one line each."""
    left, right = ({row[0]: row[1:] for row in rows} for rows in (mine, theirs))
    for name in sorted(left.keys() | right.keys()):
        if left.get(name) != right.get(name):
            yield f"{name}: {_describe(left.get(name))} here, {_describe(right.get(name))} there"


def _describe(entry: list[Any] | None) -> str:
    return "missing" if entry is None else f"{tuple(entry[0])} {entry[1].removeprefix('torch.')}"


def _require_protectable(name: str, part: Any) -> None:
    has_both = hasattr(part, "state_dict") and hasattr(part, "load_state_dict")
    if not (has_both or isinstance(part, dict | torch.Generator)):
        raise ConfigError(f"cannot protect {name}={type(part).__name__}: it has no state_dict() and load_state_dict()",
                          hint="pass a module, an optimizer, a dict, or give it both")


def _bare(part: Any) -> Any:
    """The module under DistributedDataParallel: its names do not depend on how it is trained."""
    return part.module if isinstance(part, nn.parallel.DistributedDataParallel) else part


def _save(part: Any) -> Any:
    if isinstance(part, dict):
        return dict(part)
    if isinstance(part, torch.Generator):
        return {"generator": part.get_state()}
    return part.state_dict()


def _load(part: Any, saved: Any) -> None:
    if isinstance(part, dict):
        part.clear()
        part.update(saved)
    elif isinstance(part, torch.Generator):
        part.set_state(saved["generator"])
    else:
        part.load_state_dict(saved)
        if isinstance(part, DataLoader) and hasattr(part, "state_dict"):
            part.state_dict()  # makes its iterator, which draws random numbers: now, before the generators are set
