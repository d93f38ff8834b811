"""`ftlab image build`: the image of a node, for where the host's own environment cannot be bound."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from dataclasses import asdict

from ftlab.cluster import builder, engine
from ftlab.cluster.progress import Progress


def build(arguments: argparse.Namespace) -> int:
    """Build the image, tell how it went."""
    began, line = time.monotonic(), Progress()
    with contextlib.closing(engine.connect(timeout_s=600.0)) as client:

        def say(text: str) -> None:
            line.say(text)

        def detail(text: str) -> None:
            if arguments.verbose:
                sys.stderr.write(text + "\n")

        built = builder.build(client, base=arguments.base, tag=arguments.tag, wheels=not arguments.no_wheels, say=say,
                              detail=detail)
        gained = builder.forget_stages(client) if arguments.forget else 0
    line.done()
    took = round(time.monotonic() - began, 1)
    facts = {**asdict(built), "base": arguments.base, "seconds": took, "forgotten_mb": gained // 1_000_000}
    text = (f"{built.tag}: {built.megabytes} MB, Python {built.python}, built in {took:g} s on {arguments.base}, "
            f"packages {'sent along' if built.offline else 'fetched inside the build'}\n"
            f"  in Python:  ftlab.Cluster(backend=\"docker\", image=\"{built.tag}\")")
    sys.stdout.write((json.dumps(facts) if arguments.json else text) + "\n")
    return 0
