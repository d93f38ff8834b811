"""What hidden tests are made of: drawn per submission, from a secret of the course.

    with drawing(secret):              # the grader, around the graded cells of one submission
        draws("lab02_task1").random()  # a check that is told `unseen=True`

Equal secrets give equal draws, so a submission that is graded again meets the same tests. Without a secret, as when an
author tries a notebook, the draws are always the same.
"""

from __future__ import annotations

import contextlib
import hmac
import random
import secrets
from collections.abc import Iterator
from pathlib import Path

_now: list[str] = []


@contextlib.contextmanager
def drawing(secret: str) -> Iterator[None]:
    """Have all draws inside of this block follow from a secret."""
    _now.append(secret)
    try:
        yield
    finally:
        _now.pop()


def draws(name: str) -> random.Random:
    """The draws of one check."""
    return random.Random(hmac.digest((_now[-1] if _now else "").encode(), name.encode(), "sha256"))


def course_secret(file: Path) -> str:
    """The secret of a course, made when it is first asked for; only its owner can read it."""
    with contextlib.suppress(FileNotFoundError):
        return file.read_text(encoding="ascii")
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    new.touch(0o600)
    new.write_text(secrets.token_hex(32), encoding="ascii")
    with contextlib.suppress(FileExistsError):
        file.hardlink_to(new)  # whoever comes second takes the first one's
    new.unlink()
    return file.read_text(encoding="ascii")


def of_submission(secret: str, digest: str) -> str:
    """The secret of one submission: known from neither another's nor from the tests that it has seen."""
    return hmac.digest(secret.encode(), digest.encode(), "sha256").hex()
