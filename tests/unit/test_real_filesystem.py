"""The real file system where the kernel does less than it was asked, or refuses; the examiner has what all share."""

import os
from contextlib import closing

import pytest

from pushrep.env import REAL_FILESYSTEM


def test_a_read_that_the_kernel_cuts_short_is_gone_on_with(tmp_path, monkeypatch):
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, size, position: pread(fd, min(size, 3), position))
    (tmp_path / "file").write_bytes(b"0123456789")
    with closing(REAL_FILESYSTEM.open(tmp_path / "file", writable=False)) as file:
        for size, position, data in ((8, 1, b"12345678"), (8, 5, b"56789"), (3, 10, b""), (2, 0, b"01")):
            assert file.read_at(size, position) == data


def test_room_that_the_system_does_not_give_is_refused_with_the_path(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"data")
    with closing(REAL_FILESYSTEM.open(path, writable=False)) as file, pytest.raises(OSError, match=str(path)):
        file.allocate(4096)
    with pytest.raises(OSError, match=str(path)):
        REAL_FILESYSTEM.map_shared(path, 1 << 62, writable=True)


def test_a_lock_that_could_not_be_shown_is_not_kept(tmp_path):
    path, shown = tmp_path / ".lock", tmp_path / ".lock.held"
    shown.mkdir()
    with pytest.raises(IsADirectoryError):
        REAL_FILESYSTEM.lock(path)
    shown.rmdir()
    REAL_FILESYSTEM.lock(path).close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files for others")
def test_what_root_makes_is_the_directory_s_owner_s(tmp_path):
    os.chown(tmp_path, 12345, 12346)
    REAL_FILESYSTEM.open(tmp_path / "file", create=True).close()
    found = (tmp_path / "file").stat()
    assert (found.st_uid, found.st_gid) == (12345, 12346)
