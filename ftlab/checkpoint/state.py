"""Training state: model, optimizer, scheduler, scaler, gradients and extras, which survive together or not at all.

`capture` and `restore` move the whole of it. `mark` and `rollback` undo what an unfinished step changed, whatever ran
since its entry: what changes before the gradients are agreed on is remembered by a mark (`ftlab.checkpoint.step_mark`);
for a step that is seen to change more, a whole copy is kept (`ftlab.checkpoint.state_copy`). Without one, `rollback`
says that the step cannot be undone, and the state has to come from another rank. Random numbers are not part of the
state: they are a function of (seed, step, shard), see `ftlab.elastic.seeding`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ftlab.checkpoint import tree
from ftlab.checkpoint.parts import bare, is_generator, is_loader, load_part, prepare, require_protectable, save_part
from ftlab.checkpoint.rng import Generators
from ftlab.checkpoint.state_copy import StateCopy
from ftlab.checkpoint.step_mark import StepMark, registrations
from ftlab.errors import ConfigError


class TrainingState:
    """The parts a job protects, by name, and the number of committed steps."""

    def __init__(self) -> None:
        self.parts: dict[str, Any] = {}
        self.step = 0
        self.in_step = False  # between `mark` and `commit`
        self.copying = False  # the steps of this job change what a mark does not remember: each begins with a copy
        self._marked: StepMark | None = None
        self._copy: StateCopy | None = None  # of where the present step began
        self._keeps_copy = False  # it stays as it is although the step begins once more
        self._all: tuple[int, list[nn.Parameter]] = (-1, [])  # all parameters, as of so many registrations
        self.rider: Any = None  # has a state_dict: travels with the state, and is no part of its digest

    def protect(self, parts: Mapping[str, Any]) -> None:
        """Add parts; raises ConfigError for one that cannot be saved."""
        for name, part in parts.items():
            prepare(name, part)
            tree.pack(save_part(part, name))  # what cannot travel is better known now than in a recovery
            self.parts[name] = part
        self._all = (-1, [])

    @classmethod
    def of(cls, parts: Mapping[str, Any], step: int) -> TrainingState:
        """A state of these parts, to be saved or loaded at once."""
        state = cls()
        for name, part in parts.items():
            require_protectable(name, part)
        state.parts, state.step = {name: bare(part) for name, part in parts.items()}, step
        return state

    def rebuild(self, parts: Mapping[str, Any]) -> None:
        """Take parts that were built anew for the ones of their names; they are at step 0."""
        for name, part in parts.items():
            require_protectable(name, part)
        self.parts = {**self.parts, **parts}
        self.step, self._marked, self.in_step, self._all = 0, None, False, (-1, [])

    def forget(self) -> None:
        """Let go of all parts: others are protected next."""
        self.parts, self.copying = {}, False
        self.step, self._marked, self.in_step, self._all = 0, None, False, (-1, [])
        self.let_go()

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
        return [parameter for parameter in self.all_parameters() if parameter.requires_grad]

    def all_parameters(self) -> list[nn.Parameter]:
        """Those that are frozen too; found anew only when a module may have got others."""
        if self._all[0] != registrations():
            found = (parameter for module in self.modules.values() for parameter in module.parameters())
            self._all = (registrations(), list(dict.fromkeys(found)))
        return self._all[1]

    def signature(self) -> list[list[Any]]:
        """Names, shapes and types of the modules' state: equal on all ranks of a healthy job."""
        return [[f"{part}.{name}", list(value.shape), str(value.dtype)] for part, module in self.modules.items()
                for name, value in module.state_dict().items() if isinstance(value, torch.Tensor)]

    def capture(self) -> dict[str, Any]:
        """The whole state as a tree whose tensors are the live ones."""
        riding = {"rider": self.rider.state_dict()} if self.rider is not None else {}
        transient = {name: found for name, module in self.modules.items() if (found := _transient_buffers(module))}
        return {"step": self.step, "parts": {name: save_part(part, name) for name, part in self.parts.items()},
                "grads": [parameter.grad for parameter in self.parameters()],
                "frozen": [index for index, each in enumerate(self.all_parameters()) if not each.requires_grad],
                "transient": transient, "groups": self._groups(), **riding}

    def _groups(self) -> dict[str, list[list[int]]]:
        """Which parameters each optimizer trains, by group: a loop may add some."""
        places = {id(parameter): index for index, parameter in enumerate(self.all_parameters())}
        return {name: [[places.get(id(each), -1) for each in group["params"]] for group in part.param_groups]
                for name, part in self.parts.items() if isinstance(part, torch.optim.Optimizer)}

    def _regroup(self, groups: Mapping[str, list[list[int]]]) -> None:
        """Give the optimizers the groups that they had where the state comes from."""
        here, everything = self._groups(), self.all_parameters()
        for name, wanted in groups.items():
            if name not in here or here[name] == wanted or any(index < 0 for group in wanted for index in group):
                continue
            optimizer = self.parts[name]
            del optimizer.param_groups[len(wanted):]
            for number, indices in enumerate(wanted):
                parameters = [everything[index] for index in indices]
                if number < len(optimizer.param_groups):
                    optimizer.param_groups[number]["params"] = parameters
                else:
                    optimizer.add_param_group({"params": parameters})

    def capture_only(self, part: str) -> dict[str, Any]:
        """One part alone: what differs between ranks that hold the same state."""
        found = {part: save_part(self.parts[part], part)} if part in self.parts else {}
        return {"step": self.step, "parts": found, "grads": []}

    def restore(self, captured: Mapping[str, Any]) -> None:
        """Load a captured tree into the live parts."""
        self._regroup(captured.get("groups", {}))
        random = [name for name in captured["parts"]
                  if isinstance(self.parts[name], Generators) or is_generator(self.parts[name])]
        for name in [*(each for each in captured["parts"] if each not in random), *random]:  # loading may draw numbers
            load_part(self.parts[name], captured["parts"][name], name)
        with torch.no_grad():
            for name, buffers in captured.get("transient", {}).items():
                here = _transient_buffers(self.modules[name])
                for place, value in buffers.items():
                    here[place].copy_(value)
        if "frozen" in captured:
            frozen = set(captured["frozen"])
            for index, parameter in enumerate(self.all_parameters()):
                parameter.requires_grad_(index not in frozen)
        for parameter, grad in zip(self.parameters(), captured["grads"], strict=True):
            parameter.grad = grad
        self.step = int(captured["step"])
        if self.rider is not None and "rider" in captured:
            self.rider.load_state_dict(captured["rider"])

    def shared(self) -> dict[str, Any]:
        """What is the same on every rank of a healthy job, to be compared."""
        captured = self.capture()
        captured.pop("rider", None)
        return {**captured, "parts": {name: part for name, part in captured["parts"].items()
                                      if not is_loader(self.parts[name])}}

    def digest(self) -> str:
        """SHA-256 of the whole state: equal means the same bits."""
        return tree.digest(self.shared())

    # ---- one step ------------------------------------------------------------------------------------------

    def mark(self) -> None:
        """A step begins: remember what it may change before its gradients are agreed on, or all where it is known to
        change more."""
        if self._marked is None or self._marked.registered != registrations():
            self._marked = StepMark(self.parts)
        self._marked.take()
        if self._keeps_copy:
            pass
        elif self.copying:
            self._copy = self._copy or StateCopy()
            self._copy.take(self)
        else:
            self._copy = None
        self.in_step = True

    def keep_copy(self) -> StateCopy:
        """Copy everything now, and keep that while the step is tried again and again, until `let_go`."""
        self._copy, self._keeps_copy = StateCopy(), True
        self._copy.take(self)
        return self._copy

    def let_go(self) -> None:
        """The copy is not needed any more."""
        self._copy, self._keeps_copy = None, False

    def commit(self) -> None:
        """The step is done: what it changed stays, whatever comes."""
        self.step += 1
        self.in_step = False

    def rollback(self) -> bool:
        """Undo what an unfinished step changed since `mark`; False if it changed what cannot be undone."""
        if self._marked is None or not self.in_step:
            return True
        undone = self._marked.undo()
        if self._copy is None:
            return undone
        self._copy.put_back(self)
        self._marked.take()  # loading counts as a change of the parameters: what comes back is where the step begins
        return True

    def undo_by_mark(self) -> bool:
        """As `rollback`, without the copy; whether the mark alone was enough, as far as it can tell."""
        return self._marked is None or self._marked.undo()

    def touched(self) -> bool:
        """Whether the step has changed parameters already, as far as their versions tell."""
        return self._marked is not None and self._marked.touched()

    def changed_buffers(self) -> list[torch.Tensor]:
        """Buffers the forward pass has changed since `mark` (BatchNorm's statistics): ranks must agree on them."""
        return self._marked.changed_buffers() if self._marked else []

    def reset_buffers(self) -> None:
        """Put changed buffers back to where they were at `mark`: every shard of a step starts from the same ones."""
        if self._marked is not None:
            self._marked.undo_buffers()


def check_optimizers(state: TrainingState) -> None:
    """Raise ConfigError for an optimizer that trains what no protected module has."""
    ours = {id(parameter) for parameter in state.all_parameters()}
    for name, part in state.parts.items():
        if isinstance(part, torch.optim.Optimizer):
            strange = sum(id(each) not in ours for group in part.param_groups for each in group["params"])
            if strange:
                raise ConfigError(f"{name} trains {strange} tensors that belong to no protected module",
                                  hint="protect the very model that it trains: ctx.protect(model=model, ...); single "
                                       "tensors go into an nn.ParameterDict")


def differences(mine: list[list[Any]], theirs: list[list[Any]]) -> Iterator[str]:
    """What differs between two signatures, one line each."""
    left, right = ({row[0]: row[1:] for row in rows} for rows in (mine, theirs))
    for name in sorted(left.keys() | right.keys()):
        if left.get(name) != right.get(name):
            yield f"{name}: {_describe(left.get(name))} here, {_describe(right.get(name))} there"


def _describe(entry: list[Any] | None) -> str:
    return "missing" if entry is None else f"{tuple(entry[0])} {entry[1].removeprefix('torch.')}"


def _transient_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that are in no state_dict: a forward pass may change them all the same."""
    return {f"{prefix}.{name}" if prefix else name: buffer for prefix, layer in module.named_modules()
            for name in layer._non_persistent_buffers_set if (buffer := layer._buffers.get(name)) is not None}
