"""What runs between `jail.py` and the server: it builds the jail around itself, gives up its rights, and becomes it.

Started as a file, with the standard library only: `python -I jailed.py SETTINGS ARGV...`. With namespaces: a new root
(a tmpfs with read-only binds), its own process ids, network with only a loopback, IPC and host name; root becomes
nobody, and a plain user stays who he is, in a user namespace. Without: only the rlimits. A cluster's private network
(`private_network.py`) is made with the same `unshare` and `bring_loopback_up`.
"""

import ctypes
import fcntl
import json
import os
import platform
import resource
import signal
import socket
import struct
import sys
from typing import Any

_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, NEWNET = (0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000,
                                                       0x40000000)
_RDONLY, _NOSUID, _NODEV, _NOEXEC, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
_KEPT_FLAGS = {1024: 1024, 2048: 2048, 4096: 1 << 21, 2: 2, 4: 4, 8: 8}  # statvfs flag -> mount flag that is locked
_DETACH = 2
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_DEVICES = ("null", "zero", "full", "random", "urandom")

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> int:
    """Build, fork the first process of the new world, and end as it ends."""
    settings, argv = json.loads(sys.argv[1]), sys.argv[2:]
    os.umask(0o022)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if settings["namespaces"]:
        _enter()
    child = os.fork()
    if child:
        for number in (0, 1):
            os.close(number)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF
    if settings["namespaces"]:
        _build(settings)
        bring_loopback_up()
    _limit(settings)
    _drop_rights(settings)
    os.chdir("/")
    os.execve(argv[0], argv, settings["environment"])


def unshare(flags: int) -> None:
    """Leave for new namespaces; one that is not root needs a user namespace around them, with himself in it."""
    user, group = os.geteuid(), os.getegid()
    check(_libc.unshare(flags | (_NEWUSER if user else 0)), "unshare")
    if user:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)


def _enter() -> None:
    unshare(_NEWNS | _NEWUTS | _NEWIPC | _NEWPID | NEWNET)
    check(_libc.sethostname(b"sandbox", 7), "sethostname")


def _build(settings: dict[str, Any]) -> None:
    """A root of our own, with what may be seen in it, and then nothing of the old one."""
    root = settings["root"]
    _mount("none", "/", None, _REC | _PRIVATE)
    _mount("tmpfs", root, "tmpfs", _NOSUID | _NODEV, "size=16m,mode=755")
    for name in ("proc", "tmp", "dev", "etc"):
        os.mkdir(f"{root}/{name}")
    _mount("proc", f"{root}/proc", "proc", _NOSUID | _NODEV | _NOEXEC)
    for name in ("keys", "key-users"):  # keyrings belong to no namespace: what others keep in theirs is not shown
        if os.path.exists(f"{root}/proc/{name}"):
            _mount("/dev/null", f"{root}/proc/{name}", None, _BIND)
    if os.getuid():  # no namespaces inside of this one; for root the limit would be the machine's
        try:
            with open(f"{root}/proc/sys/user/max_user_namespaces", "w") as file:
                file.write("0")
        except OSError:
            pass
    _mount("tmpfs", f"{root}/tmp", "tmpfs", _NOSUID | _NODEV, f"size={settings['tmp_mb']}m,mode=1777")
    _make_devices(f"{root}/dev", settings["shm_mb"])
    with open(f"{root}/etc/hosts", "w") as file:
        file.write("127.0.0.1 localhost sandbox\n")
    for path in settings["seen"]:
        if path not in settings["replaced"]:
            _bind(path, path, root, read_only=True)
    for path, folder in settings["replaced"].items():
        _bind(folder, path, root, read_only=True)
    _bind(settings["room"], settings["room"], root, read_only=False)
    os.chdir(root)
    check(_libc.syscall(_PIVOT_ROOT[platform.machine()], b".", b"."), "pivot_root")
    check(_libc.umount2(b".", _DETACH), "umount2")
    os.chdir("/")
    _mount("none", "/", None, _REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV)


def _make_devices(folder: str, shm_mb: int) -> None:
    for name in _DEVICES:
        open(f"{folder}/{name}", "w").close()
        _mount(f"/dev/{name}", f"{folder}/{name}", None, _BIND)
    for name, target in (("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        os.symlink(target, f"{folder}/{name}")
    os.mkdir(f"{folder}/shm")
    _mount("tmpfs", f"{folder}/shm", "tmpfs", _NOSUID | _NODEV, f"size={shm_mb}m,mode=1777")


def _bind(source: str, path: str, root: str, *, read_only: bool) -> None:
    """A path in the new root; flags that the old mount has cannot be taken away by a user namespace."""
    target = root + path
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        open(target, "a").close()
    _mount(source, target, None, _BIND | _REC)
    kept = sum(flag for seen, flag in _KEPT_FLAGS.items() if os.statvfs(target).f_flag & seen)
    _mount("none", target, None, _REMOUNT | _BIND | _NOSUID | _NODEV | (_RDONLY if read_only else 0) | kept)


def bring_loopback_up() -> None:
    """Give a new network its loopback: it is there, but down."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = fcntl.ioctl(any_socket, _SIOCGIFFLAGS, struct.pack("16sh14x", b"lo", 0))
        flags = struct.unpack("16sh14x", answer)[1]
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | _IFF_UP))


def _limit(settings: dict[str, Any]) -> None:
    for name, value in settings["rlimits"].items():
        which = getattr(resource, name)
        hard = resource.getrlimit(which)[1]
        low = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (low, low))


def _drop_rights(settings: dict[str, Any]) -> None:
    """Root becomes nobody; a user's rights in his namespace end with exec. The death of our parent is ours too."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(settings["group"], settings["group"], settings["group"])
        os.setresuid(settings["user"], settings["user"], settings["user"])
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if not settings["namespaces"] and os.getppid() == 1:
        os._exit(1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        check(_libc.prctl(option, value, 0, 0, 0), "prctl")


def _mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    check(_libc.mount(source.encode(), target.encode(), kind.encode() if kind else None, ctypes.c_ulong(flags),
                       data.encode()), f"mount {target}")


def check(result: int, what: str) -> None:
    """Raise what a system call answered, in the name of what it was for."""
    if result:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


if __name__ == "__main__":
    sys.exit(main())
