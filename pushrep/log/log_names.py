"""The name of a log is the name of its directory, as Kafka lays it out: `<topic>-<partition>`.

The topic's rule stands in pushrep/topic_id_partition.py; a partition is a decimal number below 2**31 without leading
zeros, so that a name and its parts say the same.
"""

import os
import re
from functools import lru_cache
from pathlib import Path

from pushrep.errors import checked_path
from pushrep.log.errors import InvalidLogName, NotALogDirectory
from pushrep.seams import REAL_FILESYSTEM, Filesystem
from pushrep.topic_id_partition import PARTITION_MAX, topic_fault

_NAME = re.compile(r"([a-zA-Z0-9._-]+)-(0|[1-9][0-9]{0,9})")


def log_name(topic: str, partition: int) -> str:
    """The directory name of one partition's log. Raises InvalidLogName."""
    name = f"{topic}-{partition}"
    if (why := topic_fault(topic)) is not None:
        raise InvalidLogName(name, why)
    if not 0 <= partition <= PARTITION_MAX:
        raise InvalidLogName(name, f"a partition is a number from 0 to {PARTITION_MAX}")
    return name


@lru_cache(1 << 14)  # asked for every log at every write of a checkpoint: ten thousand take 10 ms, remembered 1
def parse_log_name(name: str) -> tuple[str, int]:
    """(topic, partition) of a directory name. Raises InvalidLogName."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise InvalidLogName(name, "a topic of a-z A-Z 0-9 . _ - and a partition number are wanted")
    topic, partition = match[1], int(match[2])
    log_name(topic, partition)
    return topic, partition


def real_log_path(directory: Path | str) -> Path:
    """Where the log of this name really lies: writers and readers meet at the same lock and the same files.

    A log may lie behind a link of its own name. Raises InvalidLogName for other names, of the link or of the log.
    """
    given = checked_path("directory", directory)
    real = Path(os.path.realpath(given))
    parse_log_name(real.name if given.name in {"", ".."} else given.name)
    if given.name not in {"", "..", real.name}:
        raise InvalidLogName(given.name, f"it is a link to {real}, which has another name, and a log has only one")
    return real


def is_topic(topic: str) -> bool:
    """Whether Kafka would accept this name of a topic."""
    return topic_fault(topic) is None


def list_logs(directory: Path | str, filesystem: Filesystem = REAL_FILESYSTEM) -> list[tuple[str, int]]:
    """(topic, partition) of every log in a directory of logs, sorted. Raises NotALogDirectory.

    Takes no lock and opens nothing: a log counts when its name is there.
    """
    directory = Path(directory)
    try:
        names = filesystem.list(directory)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotALogDirectory(directory, error.strerror or "no such directory") from error
    return sorted(parse_log_name(name) for name in names if is_log_name(name))


def is_log_name(name: str) -> bool:
    """Whether a directory of this name is a log's."""
    try:
        parse_log_name(name)
    except InvalidLogName:
        return False  # our own files, Kafka's "-delete" and "-future" directories, whatever else lies there
    return True
