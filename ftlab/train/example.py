"""A train function to practise on: a small network on made-up data, with steps of a chosen length.

Drills and benches train it. It has dropout and BatchNorm on purpose: random numbers and buffers are where recoveries
usually lose bits.
"""

from __future__ import annotations

import time
from typing import Any

TIGHT: dict[str, dict[str, float]] = {  # to run out of memory: MB each sample takes, and MB that are left to a worker
    "allocation": {"sample_mb": 3.0, "room_mb": 36}, "kernel": {"sample_mb": 6.0, "room_mb": 75}}
PROBES = 2048  # parameters that are returned, to tell how far two runs are apart


def train_network(ctx: Any, steps: int = 150, step_s: float = 0.02, global_batch: int = 64,
                  sample_mb: float = 0.0, noisy: bool = True) -> dict[str, Any]:
    """Train MLP 256-512-256 with Adam; a forward pass takes at least `step_s`, and `sample_mb` of memory per sample.

    Without `noisy` it has neither BatchNorm nor dropout: then a batch in pieces gives the gradient of the whole.
    """
    import torch
    from torch import nn

    torch.manual_seed(1)
    noise = [nn.BatchNorm1d(512), nn.Dropout(0.1)] if noisy else []
    model = nn.Sequential(nn.Linear(256, 512), *noise[:1], nn.ReLU(), *noise[1:], nn.Linear(512, 256))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=max(1, steps))
    inputs = torch.randn(2048, 256)
    targets = inputs.flip(1).relu()
    ctx.protect(model=model, optimizer=optimizer, scheduler=scheduler)
    data = ctx.sampler(len(inputs), global_batch=global_batch, seed=7)
    for step in ctx.steps(steps):
        with ctx.step():
            end = time.monotonic() + step_s
            for ids in data.shards(step):
                scratch = torch.ones(len(ids), int(sample_mb * (1 << 18)))
                loss = nn.functional.mse_loss(model(inputs[ids]), targets[ids])
                time.sleep(max(0.0, end - time.monotonic()))
                ctx.backward(loss)
                del scratch
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            ctx.report(loss=loss)
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    return {"probe": flat[::max(1, flat.numel() // PROBES)].tolist(), "rank": ctx.rank}
