"""Small logs are damaged thousands of times: in memory where the system has room there, for nothing is to last."""

import os
import tempfile
from pathlib import Path

import pytest

_MEMORY = Path("/dev/shm")


@pytest.fixture
def directory(tmp_path):
    if not os.access(_MEMORY, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=_MEMORY, prefix="pushrep-test-") as path:
        yield Path(path)
