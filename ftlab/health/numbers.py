"""Are the numbers of a step well? Looks for NaN, Inf and spikes in the loss and in the norm of the gradients.

A spike is a value far above the usual: further from the median of the last committed steps than `threshold` typical
deviations (the median distance from that median, which one wild step cannot move, unlike a mean and its standard
deviation). Only upwards: a loss that falls is what we train for.

Guarantees: decisions depend on nothing but the numbers that were given, so ranks that see the same averaged loss and
norm decide the same, and a replacement that was sent the history decides as its predecessor would have. Where it
stops: a loss that rises for good is called a spike for ever, as refused steps never become usual; the budget of the
cause "numbers" ends that. And a gradient that is wrong but of a usual size is not seen.
"""

from __future__ import annotations

import math
import numbers
import sys
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ftlab.config import HealthConfig
from ftlab.errors import HealthError

_NORMAL = 1.4826  # times the median distance is the standard deviation, for values that are spread normally
_SHARE, _LEAST = 0.05, 1e-6  # a deviation is at least this share of the median, and this: a history may be constant


class NumberWatch:
    """Judges the loss and the gradient norm of each step by those of the steps before it."""

    def __init__(self, config: HealthConfig) -> None:
        self._loss = _Usual("the loss", config.loss_spike, config)
        self._norm = _Usual("the gradient norm", config.grad_spike, config)

    def judge(self, loss: float | None, norm: float | None) -> str:
        """What is wrong with a step, in words; "" if it is well. None stands for a number that is not known."""
        return self._loss.judge(loss) or self._norm.judge(norm)

    def accept(self, loss: float | None, norm: float | None) -> None:
        """The step with these numbers was committed: they are part of what is usual from now on."""
        self._loss.accept(loss)
        self._norm.accept(norm)

    def state_dict(self) -> dict[str, Any]:
        """The history as JSON-able data."""
        return {"loss": list(self._loss.recent), "norm": list(self._norm.recent)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the history that `state_dict` described."""
        self._loss.replace(state["loss"])
        self._norm.replace(state["norm"])


class _Usual:
    """What one number usually is: its last values, once in the order they came and once in the order of their size."""

    def __init__(self, name: str, threshold: float | None, config: HealthConfig) -> None:
        self._name, self._threshold = name, threshold
        self._numbers, self._settle = config.numbers, config.settle
        self.recent: deque[float] = deque(maxlen=config.history)
        self._sorted: list[float] = []

    def judge(self, value: float | None) -> str:
        if value is None:
            return ""
        if not math.isfinite(value):  # with `numbers` off it is no spike either: a GradScaler means to see Inf
            return f"{self._name} is {in_words(value)}" if self._numbers else ""
        if self._threshold is None or len(self._sorted) < self._settle:
            return ""
        middle = _middle(self._sorted)
        least, above = max(_SHARE * abs(middle), _LEAST), value - middle
        if above <= self._threshold * least:  # a deviation is never smaller: no need to know it
            return ""
        deviation = max(_NORMAL * _middle(sorted([abs(each - middle) for each in self._sorted])), least)
        if above <= self._threshold * deviation:
            return ""
        return (f"{self._name} {value:.4g} is {above / deviation:.3g} deviations above its usual {middle:.3g} ± "
                f"{deviation:.2g}")

    def accept(self, value: float | None) -> None:
        if value is None or self._threshold is None or not math.isfinite(value):
            return
        if len(self.recent) == self.recent.maxlen:
            del self._sorted[bisect_left(self._sorted, self.recent[0])]
        self.recent.append(value)
        insort(self._sorted, value)

    def replace(self, values: Iterable[float]) -> None:
        self.recent.clear()
        self.recent.extend(values)
        self._sorted = sorted(self.recent)


def _middle(ordered: Sequence[float]) -> float:
    """The median of numbers in order (`statistics.median` sorts once more)."""
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def in_words(value: float) -> str:
    """The name of a number that is not finite."""
    return "NaN" if math.isnan(value) else "Inf" if value > 0 else "-Inf"


def check_loss(loss: Any) -> float:
    """The value of a loss: a Python or NumPy float, or a tensor that holds one floating-point number.

    Reading a tensor on a GPU waits for the GPU. Raises HealthError for anything else, with what to do.
    """
    if isinstance(loss, torch.Tensor):
        return _check_tensor(loss)
    if isinstance(loss, numbers.Integral):  # bool too
        raise _refused(f"the {type(loss).__name__} {loss!r}", "a loss that counts has no gradient: give the float that "
                                                              "is minimised")
    if not isinstance(loss, numbers.Real):
        raise _refused(f"a {type(loss).__name__}", "give a float or a scalar tensor, such as F.cross_entropy returns")
    return float(loss)


def _check_tensor(loss: torch.Tensor) -> float:
    what = f"a tensor of {str(loss.dtype).removeprefix('torch.')} with shape {list(loss.shape)}"
    if loss.numel() == 0:
        raise _refused(what, "it holds nothing: was the batch empty?")
    if loss.numel() > 1:
        raise _refused(what, "take loss.mean()")
    if loss.is_complex():
        raise _refused(what, "take loss.abs() or loss.real")
    if not loss.is_floating_point():
        raise _refused(what, "a loss that counts has no gradient: give the float that is minimised")
    if loss.is_meta:
        raise _refused(f"{what} on the meta device", "it has no value there: compute the loss on a real device")
    return float(loss.item())


def _refused(what: str, hint: str) -> HealthError:
    return HealthError(f"a loss is one floating-point number, not {what}", hint=hint, got=what)


@torch.no_grad()
def gradient_norm(gradients: Iterable[torch.Tensor | None] | torch.Tensor) -> float:
    """The 2-norm of all gradients together; NaN or Inf exactly if one of them holds such a number.

    Sharded gradients (DTensor) are looked at as a whole, which is a collective: all ranks have to call it.
    """
    given = [gradients] if isinstance(gradients, torch.Tensor) else gradients
    found = [_dense(each) for each in given if each is not None]
    if not found:
        return 0.0
    norm = _value(torch.linalg.vector_norm(found[0]) if len(found) == 1 else torch.nn.utils.get_total_norm(found))
    return norm if math.isfinite(norm) else _careful_norm(found)


def _careful_norm(gradients: Sequence[torch.Tensor]) -> float:
    """The norm without overflow, at twice the price: a square may be too large for its type though no value is."""
    peaks = [_value(torch.linalg.vector_norm(each, math.inf)) for each in gradients if each.numel()]
    largest = math.nan if any(map(math.isnan, peaks)) else max(peaks)
    if not math.isfinite(largest):
        return largest
    parts = [_value(torch.linalg.vector_norm(each / largest)) for each in gradients]
    return min(largest * math.hypot(*parts), sys.float_info.max)


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    if gradient.requires_grad and gradient.is_leaf:  # only a parameter is both, and the weights' norm says nothing
        raise HealthError("these are parameters, not gradients",
                          hint="give their gradients: [p.grad for p in model.parameters()]")
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _value(norm: torch.Tensor) -> float:
    """The number in a tensor; a DTensor is put together from all ranks first."""
    whole = getattr(norm, "full_tensor", None)
    return float(whole() if whole else norm)
