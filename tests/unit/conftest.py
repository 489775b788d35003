"""Fixtures of several test files of this directory."""

import gc
from contextlib import suppress
from pathlib import Path

import pytest


@pytest.fixture
def closes_its_files(tmp_path, caplog):
    """Fail if the test leaves a file below its directory open, also after an error: a process has 1,024 descriptors."""
    yield
    if still_open := open_below(tmp_path):
        caplog.get_records("call").clear()  # the errors in it hold what they met
        gc.collect()
        still_open = open_below(tmp_path)
    assert not still_open


def open_below(directory):
    found = []
    for descriptor in list(Path("/proc/self/fd").iterdir()):
        with suppress(OSError):
            found.append(descriptor.readlink())
    return [path for path in found if path.is_relative_to(directory)]
