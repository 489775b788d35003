"""What tells one file from a copy of it: a number that the file system gives a file when it makes it, and never again.

    inode number + generation (ioctl FS_IOC_GETVERSION)     ext4, xfs, btrfs, f2fs
    inode number + birth time (statx)                       tmpfs, NFS 4.2 where its server says it, those above
    neither, or a file system whose inode numbers change    None: FUSE, 9p, overlay, SMB, FAT

The inode number alone says nothing: a file system gives the number of a removed file again, often to the next one.
Sources: ioctl_iflags(2), statx(2), statfs(2), linux/magic.h.
"""

import ctypes
import fcntl
import os
import struct
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

_GET_VERSION = 0x80087601  # _IOR('v', 1, long); the kernel fills in 4 bytes
_AT_EMPTY_PATH, _STATX_BTIME = 0x1000, 0x800
_BTIME_AT = 80  # of struct statx: seconds i64, nanoseconds u32
_WITHOUT_LASTING_NUMBERS = frozenset(
    {
        0x65735546,  # FUSE, virtiofs too
        0x01021997,  # 9p
        0x794C7630,  # overlay: its numbers last only where all layers lie on one file system
        0x786F4256,  # vboxsf
        0xFF534D42,  # SMB
        0xFE534D42,
        0x517B,
        0x4D44,  # FAT
        0x2011BAB0,  # exFAT
    }
)


class FileWitness(NamedTuple):
    """One file, by what its file system says of it. At least one of `generation` and `birth_ns` is there.

    generation: that of the inode number. birth_ns: when it was made, since 1970 UTC. links: how many names it has.
    """

    inode: int
    generation: int | None
    birth_ns: int | None
    links: int = 1


def real_witness(path: Path) -> FileWitness | None:
    """What tells the file at `path` from a copy; None where its file system has nothing. Raises OSError.

    A symbolic link is not followed: OSError (ELOOP).
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        if sys.platform == "linux":
            if _type_of(fd) in _WITHOUT_LASTING_NUMBERS:
                return None
            generation, birth_ns = _generation(fd), _birth_ns(fd)
        else:
            birth_s = getattr(found, "st_birthtime", None)
            generation, birth_ns = None, None if birth_s is None else int(birth_s * 1e9)
        if generation is None and birth_ns is None:
            return None
        return FileWitness(found.st_ino, generation, birth_ns, found.st_nlink)
    finally:
        os.close(fd)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _type_of(fd: int) -> int:
    """`f_type`; 0 if the system does not say it."""
    answer = ctypes.create_string_buffer(256)
    if _libc().fstatfs(fd, answer):
        return 0
    return int(ctypes.c_long.from_buffer(answer).value) & 0xFFFFFFFF


def _generation(fd: int) -> int | None:
    try:
        answer = fcntl.ioctl(fd, _GET_VERSION, bytes(8))
    except OSError:  # ENOTTY: this file system keeps none
        return None
    generation: int = struct.unpack_from("=I", answer)[0]
    return generation or None  # 0 is what those say that do not count


def _birth_ns(fd: int) -> int | None:
    answer = ctypes.create_string_buffer(256)
    try:
        failed = _libc().statx(fd, b"", _AT_EMPTY_PATH, _STATX_BTIME, answer)
    except AttributeError:  # a C library from before 2018
        return None
    mask: int = struct.unpack_from("=I", answer.raw)[0]
    if failed or not mask & _STATX_BTIME:
        return None
    seconds, nanoseconds = struct.unpack_from("=qI", answer.raw, _BTIME_AT)
    return int(seconds) * 10**9 + int(nanoseconds)
