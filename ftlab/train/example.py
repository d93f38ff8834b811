"""A train function to practise on: a small network on made-up data, with steps of a chosen length.

Drills and benches train it. It has dropout and BatchNorm on purpose: random numbers and buffers are where recoveries
usually lose bits.
"""

from __future__ import annotations

import time
from typing import Any

PROBES = 2048  # parameters that are returned, to tell how far two runs are apart


def train_network(ctx: Any, steps: int = 150, step_s: float = 0.02, global_batch: int = 64) -> dict[str, Any]:
    """Train MLP 256-512-256 with Adam; each step takes at least `step_s`."""
    import torch
    from torch import nn

    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(256, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Dropout(0.1), nn.Linear(512, 256))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=max(1, steps))
    inputs = torch.randn(2048, 256)
    targets = inputs.flip(1).relu()
    ctx.protect(model=model, optimizer=optimizer, scheduler=scheduler)
    data = ctx.sampler(len(inputs), global_batch=global_batch, seed=7)
    for step in ctx.steps(steps):
        with ctx.step():
            begin = time.monotonic()
            for ids in data.shards(step):
                loss = nn.functional.mse_loss(model(inputs[ids]), targets[ids])
                ctx.backward(loss)
            time.sleep(max(0.0, step_s - (time.monotonic() - begin)))
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            ctx.report(loss=loss)
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    return {"probe": flat[::max(1, flat.numel() // PROBES)].tolist(), "rank": ctx.rank}
