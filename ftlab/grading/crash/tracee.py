"""Looking into a stopped thread of another process: its strings, its descriptors, the paths it names."""

from __future__ import annotations

import ctypes
import os
import struct
from pathlib import Path

_AT_FDCWD = -100
_PAGE = 4096
_MAX_PATH = 4096


class Tracee:
    """One stopped thread; every method raises OSError when it is gone or names something that is not there."""

    def __init__(self, thread: int) -> None:
        self.thread = thread

    def text(self, address: int) -> str:
        """The string at an address of its memory."""
        raw = b""
        with open(f"/proc/{self.thread}/mem", "rb", buffering=0) as memory:
            while b"\0" not in raw and len(raw) < _MAX_PATH:
                memory.seek(address + len(raw))
                raw += memory.read(_PAGE - (address + len(raw)) % _PAGE)
        return os.fsdecode(raw.partition(b"\0")[0])

    def number(self, address: int) -> int:
        """The 64-bit number at an address of its memory."""
        with open(f"/proc/{self.thread}/mem", "rb", buffering=0) as memory:
            memory.seek(address)
            return int(struct.unpack("=q", memory.read(8))[0])

    def descriptor(self, register: int) -> Path:
        """The file behind a descriptor, as a path that opens it even after it was renamed or deleted."""
        return Path(f"/proc/{self.thread}/fd/{as_int(register)}")

    def position(self, register: int) -> int:
        """Where its next read or write through a descriptor would happen."""
        return int(self._descriptor_info(register)["pos"])

    def flags(self, register: int) -> int:
        """The flags a descriptor was opened with."""
        return int(self._descriptor_info(register)["flags"], 8)

    def entry(self, folder_register: int, name_address: int) -> Path:
        """The path that (directory descriptor, name) means to it; a symbolic link in the last place is not followed."""
        path = self._join(folder_register, name_address)
        if path.name in ("", ".."):
            return Path(os.path.realpath(path))
        return Path(os.path.realpath(path.parent), path.name)

    def file(self, folder_register: int, name_address: int) -> Path:
        """The same, with a symbolic link in the last place followed."""
        return Path(os.path.realpath(self._join(folder_register, name_address)))

    def _join(self, folder_register: int, name_address: int) -> Path:
        name, number = self._own(self.text(name_address)), as_int(folder_register)
        if os.path.isabs(name):
            return Path(name)
        return Path(os.readlink(f"/proc/{self.thread}/" + ("cwd" if number == _AT_FDCWD else f"fd/{number}")), name)

    def _own(self, name: str) -> str:
        """`/proc/self` means the tracee, not us."""
        for ours, theirs in (("/proc/self/", f"/proc/{self.thread}/"), ("/dev/fd/", f"/proc/{self.thread}/fd/"),
                             ("/proc/thread-self/", f"/proc/{self.thread}/")):
            if name.startswith(ours):
                return theirs + name.removeprefix(ours)
        return name

    def _descriptor_info(self, register: int) -> dict[str, str]:
        lines = Path(f"/proc/{self.thread}/fdinfo/{as_int(register)}").read_text().splitlines()
        return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def as_int(register: int) -> int:
    """A register as the C int it holds."""
    return ctypes.c_int(register & 0xFFFFFFFF).value
