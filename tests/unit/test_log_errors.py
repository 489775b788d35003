"""What errors say and carry: the data is for code, the words for who reads them at night."""

import errno
import os
from pathlib import Path

import pytest

from pushrep.log.errors import (
    AppendFailed,
    FileRemoved,
    LogLocked,
    LogPoisoned,
    NoRoomToCut,
    append_remedy,
    is_shortage,
)

LOG = Path("logs/orders-0")


@pytest.mark.parametrize(
    ("number", "remedy", "shortage"),
    [
        (errno.ENOSPC, "free space on the disk", True),
        (errno.EDQUOT, "raise the user's quota", True),
        (errno.EMFILE, "raise the process's limit of open files", True),
        (errno.EROFS, "mount the file system writable", False),
        (errno.EOVERFLOW, "begin a new log", False),
        (errno.EIO, "look at the disk", False),
        (None, "look at the disk", False),
    ],
)
def test_a_refused_write_says_what_to_do(number, remedy, shortage):
    words = "no number" if number is None else os.strerror(number)
    cause = OSError(words) if number is None else OSError(number, words)
    assert append_remedy(cause).startswith(remedy)
    assert is_shortage(cause) is shortage
    failed = AppendFailed(LOG, cause, append_remedy(cause))
    assert (failed.errno, failed.remedy) == (number, append_remedy(cause))
    cut = NoRoomToCut(LOG, 77, cause)
    assert (cut.errno, cut.wanted_bytes) == (number, 77)
    for error in (failed, cut):
        assert remedy in str(error)
        assert words in str(error)
    assert "77 bytes" in str(cut)


@pytest.mark.parametrize(
    ("pid", "is_own", "says", "says_not"),
    [
        (77, False, "written by process 77: stop it", "this one"),
        (None, False, "written by another process: stop it", "None"),
        ("own", False, "(this one, or another container's of the same number)", "this very process"),
        ("own", True, "open in this very process", "stop it"),
    ],
)
def test_who_holds_a_log_is_told_as_far_as_it_is_known(pid, is_own, says, says_not):
    pid = (
        os.getpid() if pid == "own" else pid
    )  # not in the table: each process of the tests has to collect the same names
    locked = LogLocked(LOG, pid, is_own=is_own)
    assert says in str(locked)
    assert says_not not in str(locked)
    assert (locked.directory, locked.pid, locked.is_own) == (LOG, pid, is_own)


def test_a_file_that_another_program_changed_is_told_by_its_size_or_its_absence():
    assert "was removed or replaced" in str(FileRemoved(LOG, 100, None))
    assert "has 0 bytes, not 100" in str(FileRemoved(LOG, 100, 0))


def test_a_cause_without_words_is_told_by_its_name():
    assert "(OSError())" in str(LogPoisoned(LOG, OSError()))
    assert "(no space)" in str(LogPoisoned(LOG, OSError("no space")))
