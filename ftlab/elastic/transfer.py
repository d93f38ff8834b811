"""Training state from ranks that hold it to ranks that need it, in as few rounds as possible.

Receivers of one round are senders of the next, so feeding a whole new world from one rank takes log2(world) rounds,
and feeding one replacement takes one send that nobody else takes part in.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

_SMALL = 1 << 20  # tensors below this many bytes travel together


def plan_transfers(holders: Sequence[int], receivers: Sequence[int]) -> list[tuple[int, int]]:
    """(sender, receiver) pairs in order; a receiver may send once it has received."""
    able, waiting = list(holders), list(receivers)
    pairs: list[tuple[int, int]] = []
    while waiting:
        batch, waiting = waiting[:len(able)], waiting[len(able):]
        pairs += zip(able, batch, strict=False)
        able += batch
    return pairs


def send(header: bytes, tensors: Sequence[torch.Tensor], digest: str, to: int) -> None:
    """Send a packed tree and its digest to one rank."""
    preamble = digest.encode() + header
    dist.send(torch.tensor([len(preamble)]), to)
    dist.send(torch.frombuffer(bytearray(preamble), dtype=torch.uint8), to)
    small = [_raw(tensor) for tensor in tensors if _is_small(tensor)]
    if small:
        dist.send(torch.cat(small), to)
    for tensor in tensors:
        if not _is_small(tensor):
            dist.send(_raw(tensor), to)


def receive_header(source: int) -> tuple[str, bytes]:
    """The digest and the header that one rank sends."""
    length = torch.empty(1, dtype=torch.int64)
    dist.recv(length, source)
    preamble = torch.empty(int(length), dtype=torch.uint8)
    dist.recv(preamble, source)
    raw = preamble.numpy().tobytes()
    return raw[:64].decode(), raw[64:]


def receive_tensors(tensors: Sequence[torch.Tensor], source: int) -> None:
    """Fill the tensors with what one rank sends."""
    small = [tensor for tensor in tensors if _is_small(tensor)]
    if small:
        together = torch.empty(sum(_bytes(tensor) for tensor in small), dtype=torch.uint8)
        dist.recv(together, source)
        for tensor, raw in zip(small, together.split([_bytes(tensor) for tensor in small]), strict=True):
            _raw(tensor).copy_(raw)
    for tensor in tensors:
        if not _is_small(tensor):
            dist.recv(_raw(tensor), source)


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _is_small(tensor: torch.Tensor) -> bool:
    return _bytes(tensor) < _SMALL
