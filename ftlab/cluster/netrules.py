"""Packets of one container that are lost, slow or late: rules in its own network namespace, set from the host.

The container itself needs no capability and cannot see who did it. Rules go with the namespace, so nothing of them
outlives the container. Losing packets takes iptables, a slower link `tc` with tbf, a longer one `tc` with netem, and
all of them root on the engine's own machine; each is tried for real, in a throw-away namespace, before it is promised.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ftlab.errors import FaultError

CUT, LOSS = "FTLAB-CUT", "FTLAB-LOSS"  # chains: a partition, and a lossy link
_TIMEOUT_S = 10.0
_PROBES = {  # what must work, and the rule that tells
    "cut": "*filter\n:FTLAB-TRY - [0:0]\n-A FTLAB-TRY -s 127.0.0.2 -j RETURN\n-A FTLAB-TRY -j DROP\nCOMMIT\n",
    "loss": "*filter\n:FTLAB-TRY - [0:0]\n-A FTLAB-TRY -m statistic --mode random --probability 0.5 -j DROP\nCOMMIT\n",
    "rate": "tc qdisc add dev lo root tbf rate 1mbit burst 16kb latency 100ms",
    "delay": "tc qdisc add dev lo root netem delay 1ms",
}


@dataclass(frozen=True)
class Shape:
    """How a link is slower than it was."""

    delay_ms: float = 0.0
    rate_mbit: float = 0.0  # 0: as fast as before

    def command(self, device: str) -> list[str]:
        """What tc has to do; netem does both if there is a delay."""
        if self.delay_ms:
            rate = ["rate", f"{self.rate_mbit}mbit"] if self.rate_mbit else []
            return ["qdisc", "replace", "dev", device, "root", "netem", "delay", f"{self.delay_ms}ms", *rate]
        return ["qdisc", "replace", "dev", device, "root", "tbf", "rate", f"{self.rate_mbit}mbit",
                "burst", "16kb", "latency", "200ms"]


@cache
def available(what: str) -> str:
    """Empty if packets can be cut off (`cut`), lost (`loss`), slowed down (`rate`) or delayed here, else why not."""
    if sys.platform != "linux":
        return "needs Linux, and the engine on this machine"
    if os.geteuid():
        return "needs root: rules are set in the containers' network namespaces"
    program = "iptables-restore" if what in ("cut", "loss") else "tc"
    missing = [each for each in ("nsenter", "unshare", program) if not os.path.isabs(_program(each))]
    if missing:
        return f"{missing[0]} is not installed (Debian: apt install util-linux iptables iproute2)"
    probe, alone = _PROBES[what], [_program("unshare"), "-n", _program(program)]
    said = _run([*alone, "-n"], probe) if program != "tc" else _run([*alone, *probe.split()[1:]])
    return f"the kernel cannot do it: {said}" if said else ""


def drop_rules(chain: str, way: str = "", friends: Collection[str] = (), loss: float = 1.0) -> str:
    """Rules that lose packets, but not those from and to `friends`; `way`: only what the node sends, or receives."""
    chance = "" if loss >= 1 else f"-m statistic --mode random --probability {loss:.6f} "
    lines = ["*filter"]
    for name, hook, device, address in _directions(chain, way):
        lines += [f":{name} - [0:0]", f"-I {hook} ! {device} lo -j {name}"]
        lines += [f"-A {name} {address} {friend} -j RETURN" for friend in sorted(friends)]
        lines += [f"-A {name} {chance}-j DROP"]
    return "\n".join([*lines, "COMMIT", ""])


def lift_rules(chain: str, way: str = "") -> str:
    """Rules that take back what `drop_rules` has set."""
    lines = ["*filter"]
    for name, hook, device, _ in _directions(chain, way):
        lines += [f"-D {hook} ! {device} lo -j {name}", f"-F {name}", f"-X {name}"]
    return "\n".join([*lines, "COMMIT", ""])


def apply(pid: int, rules: str) -> None:
    """Set rules in the network namespace of a process; raises FaultError with the kernel's words."""
    said = _run([*_inside(pid, "iptables-restore"), "-n", "-w", "5"], rules)
    if said:
        raise FaultError(f"the packet rules of a container cannot be changed: {said}")


def dropped(pid: int, chain: str, way: str = "") -> dict[str, int]:
    """The packets that each direction has lost so far, as the kernel counts them; a direction without a rule is not
    there."""
    found = {}
    for name, hook, _, _ in _directions(chain, way):
        told = subprocess.run([*_inside(pid, "iptables"), "-w", "5", "-nvxL", name], capture_output=True, text=True,
                              timeout=_TIMEOUT_S)
        rows = [line.split() for line in told.stdout.splitlines() if " DROP " in line]
        if rows:
            found["receives" if hook == "INPUT" else "sends"] = sum(int(row[0]) for row in rows)
    return found


def shape(pid: int, wanted: Shape | None) -> str:
    """Make a container's link slower, or as it was (None); what tc shows then."""
    device = _device(pid)
    command = wanted.command(device) if wanted else ["qdisc", "del", "dev", device, "root"]
    said = _run([*_inside(pid, "tc"), *command])
    if said:
        raise FaultError(f"the link of a container cannot be changed: {said}")
    told = subprocess.run([*_inside(pid, "tc"), "-s", "qdisc", "show", "dev", device], capture_output=True, text=True,
                          timeout=_TIMEOUT_S)
    return " ".join(told.stdout.split())


def _directions(chain: str, way: str) -> list[tuple[str, str, str, str]]:
    """Chain, hook, and the words for device and address, of each direction that is meant."""
    both = [("receives", (f"{chain}-IN", "INPUT", "-i", "-s")), ("sends", (f"{chain}-OUT", "OUTPUT", "-o", "-d"))]
    return [words for name, words in both if way in ("", name)]


def _device(pid: int) -> str:
    """The container's network device; its name changes when it leaves a network and comes back."""
    lines = Path(f"/proc/{pid}/net/dev").read_text().splitlines()[2:]
    names = [line.split(":")[0].strip() for line in lines]
    return next((name for name in names if name.startswith("eth")), "eth0")


def _inside(pid: int, program: str) -> list[str]:
    return [_program("nsenter"), "-t", str(pid), "-n", _program(program)]


def _program(name: str) -> str:
    """A system program, also for whoever has no /sbin in the path."""
    return shutil.which(name, path=f"{os.defpath}:/usr/sbin:/sbin:/usr/bin") or name


def _run(command: list[str], text: str = "") -> str:
    """Empty if the command worked, else what it said."""
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if done.returncode == 0 else " ".join((done.stderr or done.stdout).split())[:300] or "it failed"
