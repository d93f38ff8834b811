"""A network of a cluster's own: a loopback that only its processes can reach.

The launcher leaves for it before it starts anything; whatever it forks is there too. Two things come of it. The kernel
lets its owner drop packets there, so that ordinary users get partitions also where it refuses them socket filters.
And nobody else can connect to what listens there: the TCPStore and gloo know no token, so on the host's network every
user of the machine could talk to them.

Who is not root needs a user namespace around it, in which he stays who he is, and in which the launcher has rights that
he does not have outside. The launcher needs them, to drop packets; what it forks, and above all code of the user's,
gives them up. A socket stays in the network it was made in: what listened before is still reached from outside, and so
are socket files. Where this stops: there is no way out of this network. Storage behind a URL cannot be reached, nor can
a train function download anything.
"""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

from ftlab.cluster import packets
from ftlab.cluster.jailed import NEWNET, bring_loopback_up, check, unshare
from ftlab.errors import ClusterError

_TRY = ("import sys; sys.path.insert(0, sys.argv[1]); from ftlab.cluster.private_network import attempt; "
        "sys.stdout.write(attempt())")
_TRY_S = 20.0
_CAPABILITY_VERSION = 0x20080522
_SYSCTLS = {"user/max_user_namespaces": "0", "kernel/unprivileged_userns_clone": "0",
            "kernel/apparmor_restrict_unprivileged_userns": "1"}  # with this value each forbids user namespaces


def choose_network(wanted: str) -> str:
    """What `auto` means here: the host's network where packets can be dropped on it, else a private one if there can be
    one, else the host's, without partitions."""
    if wanted != "auto":
        return wanted
    return "private" if packets.available() and not why_not() else "host"


def enter() -> None:
    """Leave the host's network for a new one; only for a process with a single thread. Raises ClusterError."""
    try:
        if sys.platform != "linux":
            raise OSError(errno.ENOSYS, "other systems than Linux have no network namespaces")
        unshare(NEWNET)
        bring_loopback_up()
    except OSError as error:
        reason = forbidden_by() or f"the kernel gives this user no network namespace ({error.strerror})"
        raise ClusterError("a cluster cannot have a network of its own here", seen=reason,
                           hint="network='auto' takes the host's where there is no other") from None


def give_up_rights() -> None:
    """Drop what a user namespace has given to this process; root keeps what he had before."""
    if os.geteuid() == 0:
        return
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    none = (ctypes.c_uint32 * 6)()
    check(ctypes.CDLL(None, use_errno=True).capset(header, none), "capset")


@cache
def why_not() -> str:
    """Empty if a cluster can have a network of its own here, and lose packets in it, else why not. Tried once, in a
    process that is gone after it."""
    root = str(Path(__file__).parents[2])
    try:
        tried = subprocess.run([sys.executable, "-I", "-S", "-c", _TRY, root], capture_output=True, text=True,
                               timeout=_TRY_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"it could not be tried: {error}"
    last = tried.stderr.strip().splitlines()[-1:] or [f"exit code {tried.returncode}"]
    return tried.stdout if tried.returncode == 0 else f"it could not be tried: {last[0]}"


def attempt() -> str:
    """Enter a network, and drop packets in it; what went wrong, if anything did."""
    try:
        enter()
    except ClusterError as error:
        return error.seen
    return packets.available()


def forbidden_by(settings: Path = Path("/proc/sys")) -> str:
    """Which of the machine's settings keeps ordinary users from namespaces, if one does."""
    for name, value in _SYSCTLS.items():
        file = settings / name
        if file.exists() and file.read_text().strip() == value:
            return f"user namespaces are switched off here ({name.replace('/', '.')}={value})"
    return ""
