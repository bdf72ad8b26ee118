"""`python -m jaxkern cache`: lists and removes the compiled kernels that the runtime keeps on disk.

The runtime (ffi/runtime/cache.cc) writes one file per kernel: a line with the format, then a checksum and a body, each after
its length. The body is the key, the symbol and the cubin. The key names the NVRTC version, the GPU architecture, the header
and the kernel. Drafts of processes that died have the name of the file and six more letters. Beside them are the times of
regions that `accelerate(tune=True)` has measured (jaxkern/_accelerate/tune.py).
"""

import argparse
import contextlib
import os
import re
import stat
import time
import typing

from jaxkern._core import runtime

MAGIC = b"jaxkern kernel 1\n"
NAME = re.compile(r"[0-9a-f]{32}\.(jaxkern(\.[0-9A-Za-z]{6})?|times)")


class Entry(typing.NamedTuple):
    """A file of the cache. `used` is a time in seconds since 1970; `kernel` is empty for a damaged file or a draft."""

    path: str
    bytes: int
    used: float
    architecture: str
    kernel: str


def entries(folder: str) -> list[Entry]:
    """The cache's own files in a folder, the most recently used first.

    These are regular files of this user whose names the runtime makes. Everything else in the folder is ignored.
    """
    found = []
    with contextlib.suppress(OSError), os.scandir(folder) as files:  # no folder, or one that this user may not read
        for file in files:
            with contextlib.suppress(OSError):  # another process removed it, or this user may not read it
                status = file.stat(follow_symlinks=False)
                if NAME.fullmatch(file.name) and stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
                    found.append(Entry(file.path, status.st_size, status.st_mtime, *_describe(file.path)))
    return sorted(found, key=lambda entry: -entry.used)


def _describe(path) -> tuple[str, str]:
    """(architecture, kernel) of a file, or empty strings."""
    if str(path).endswith(".times"):
        return "", "times of a region"
    with open(path, "rb") as file:
        data = file.read(1 << 16)
    try:
        if not data.startswith(MAGIC):
            return "", ""
        _, rest = _field(data[len(MAGIC) :])
        key, _ = _field(rest[8:])
        lines = key.decode().splitlines()
    except (ValueError, IndexError):
        return "", ""
    options = [line for line in lines if line.startswith("--")]
    architecture = next((o.split("=")[1] for o in options if o.startswith("--gpu-architecture=")), "")
    kernel = lines[2 + len(options) + 1] if len(lines) > 3 + len(options) else ""
    return architecture, kernel


def _field(data: bytes) -> tuple[bytes, bytes]:
    size = int.from_bytes(data[:8], "little")
    return data[8 : 8 + size], data[8 + size :]


def clear(found: list[Entry]) -> int:
    """Removes files and returns how many were there."""
    removed = 0
    for entry in found:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(entry.path)
            removed += 1
    return removed


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m jaxkern cache", description="The compiled kernels on disk.")
    action = parser.add_mutually_exclusive_group()
    action.add_argument(
        "--list", action="store_true", help="print every kernel, the most recently used first (default)"
    )
    action.add_argument("--clear", action="store_true", help="remove the compiled kernels, and nothing else")
    arguments = parser.parse_args(argv)
    folder = runtime.cache_folder()
    if not folder:
        print("the cache is off: JAXKERN_CACHE_DIR is empty or cannot be used")
        return 0
    found = entries(folder)
    size = f"{sum(entry.bytes for entry in found) / 2**20:.1f} MiB"
    if arguments.clear:
        print(f"{folder}: removed {clear(found)} kernels, {size}")
        return 0
    print(f"{folder}: {len(found)} kernels, {size} of at most {runtime.cache_bytes() / 2**20:.0f} MiB")
    for entry in found:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used))
        kernel = f"{entry.architecture} {entry.kernel}".strip() or "not readable"
        print(f"{entry.bytes / 1024:8.1f} KiB  {used}  {kernel}")
    return 0
