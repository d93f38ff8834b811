"""Saves and loads for the crash harness, good and bad, around one small file `state`.

Apart from the tests, because each child imports the module its function comes from, and pytest takes long.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.wrong_managers import sync

LIBC = ctypes.CDLL(None, use_errno=True)


def put(folder: Path, text: str, name: str = "state") -> None:
    (folder / "new").write_text(text)
    sync(folder / "new")
    os.replace(folder / "new", folder / name)
    sync(folder)


def old(folder: Path) -> None:
    put(folder, "old")


def new(folder: Path) -> None:
    put(folder, "new")


def get(folder: Path) -> str:
    return (folder / "state").read_text()


def in_place(folder: Path) -> None:
    (folder / "state").write_text("new")


def in_a_thread(folder: Path) -> None:
    writer = threading.Thread(target=new, args=(folder,))
    writer.start()
    writer.join()


def in_a_pool_of_before(folder: Path) -> None:
    POOL.submit(new, folder).result()


def start_pool(folder: Path) -> None:
    global POOL
    old(folder)
    POOL = ThreadPoolExecutor(1)
    POOL.submit(int).result()


def in_a_fork(folder: Path) -> None:
    child = os.fork()
    if child == 0:
        new(folder)
        os._exit(0)
    os.waitpid(child, 0)


def in_a_program(folder: Path) -> None:
    code = ("import os; f = open('new', 'w'); f.write('new'); f.flush(); os.fsync(f.fileno()); "
            "os.replace('new', 'state'); os.fsync(os.open('.', 0))")
    subprocess.run([sys.executable, "-S", "-c", code], check=True, cwd=folder)


def later(folder: Path) -> None:
    threading.Timer(0.2, new, [folder]).start()


def never(folder: Path) -> None:
    threading.Thread(target=lambda: (time.sleep(60), new(folder)), daemon=True).start()


def everything(folder: Path) -> None:
    (folder / "a").mkdir()
    (folder / "a" / "one").write_bytes(b"x" * 5000)
    with open(folder / "a" / "one", "ab") as file:
        file.write(b"more")
    descriptor = os.open(folder / "two", os.O_RDWR | os.O_CREAT)
    os.writev(descriptor, [b"abc", b"def"])
    os.pwrite(descriptor, b"Z", 3)
    os.ftruncate(descriptor, 5)
    os.posix_fallocate(descriptor, 0, 20)
    os.close(descriptor)
    os.truncate(folder / "two", 7)
    shutil.copyfile(folder / "a" / "one", folder / "copy")  # sendfile
    with open(folder / "a" / "one", "rb") as source, open(folder / "range", "wb") as target:
        os.copy_file_range(source.fileno(), target.fileno(), 4000)
    os.link(folder / "copy", folder / "hard")
    os.symlink("copy", folder / "soft")
    (folder / "soft").write_text("through a link")
    os.rename(folder / "a", folder / "b")
    (folder / "hard").unlink()
    (folder / "empty").mkdir()
    (folder / "empty").rmdir()
    anonymous = os.open(folder, os.O_TMPFILE | os.O_WRONLY)
    os.write(anonymous, b"nameless")
    kernel(LIBC.linkat(-100, f"/proc/self/fd/{anonymous}".encode(), -100, bytes(folder / "named"), 0x400))
    with tempfile.NamedTemporaryFile(dir=folder.parent, delete=False) as outside:
        outside.write(b"from outside")
    os.rename(outside.name, folder / "moved")
    os.rename(folder / "range", folder.parent / "gone")
    (folder.parent / "gone").unlink()
    kernel(LIBC.renameat2(-100, bytes(folder / "copy"), -100, bytes(folder / "two"), 2))  # RENAME_EXCHANGE
    os.chdir(folder)
    Path("relative").write_text("here")
    with open(os.open("durable", os.O_CREAT | os.O_WRONLY | os.O_DSYNC), "wb", closefd=True) as file:
        file.write(b"at once")
    os.sync()


def kernel(result: int) -> None:
    assert result == 0, os.strerror(ctypes.get_errno())


def through_memory(folder: Path) -> None:
    with open(folder / "state", "r+b") as file, mmap.mmap(file.fileno(), 0) as view:
        view[:3] = b"new"


def through_memory_of_before(folder: Path) -> None:
    FILE_VIEW[:3] = b"new"


def map_before(folder: Path) -> None:
    global FILE_VIEW
    old(folder)
    with open(folder / "state", "r+b") as file:
        FILE_VIEW = mmap.mmap(file.fileno(), 0)


def hang(folder: Path) -> None:
    (folder / "half").write_text("")
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    signal.pause()


def fail(folder: Path) -> None:
    raise ZeroDivisionError("in save")


def end(folder: Path) -> None:
    os._exit(3)


def load_or_end(folder: Path) -> str:
    return get(folder) or os._exit(7)


def load_or_hang(folder: Path) -> str:
    return get(folder) or time.sleep(1000)


def load_or_kill(folder: Path) -> str:
    return get(folder) or os.kill(os.getpid(), signal.SIGKILL)
