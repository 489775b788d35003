"""Kafka's DumpLogSegments over the files of a log: its batches as dictionaries, its objections as lines.

The tool exits 0 on damage, so every line is read. One Java machine for all files of a log.
"""

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.kafka.cluster import QUICK_START, java

SUFFIXES = (".log", ".index", ".timeindex")
OBJECTION = re.compile(
    r"isvalid: false|invalid bytes|mismatch|out of order|not found|Exception|Could not|Found timestamp", re.IGNORECASE
)
_LOGS_PER_RUN = 60
"""All files are one argument, and Linux takes 128 KiB for one (MAX_ARG_STRLEN)."""
_HOLES_IN, _HOLE = re.compile(r"Non-consecutive offsets in (\S+)"), re.compile(r" *(-?\d+) is followed by \d+")
_FIELD = re.compile(r"(\w+): (\S+)")
_TIMES = ("CreateTime", "LogAppendTime")


@dataclass
class Dump:
    """`batches`: one dictionary per batch line, names as the tool spells them, `time` whatever kind it is.

    has_holes: offsets are missing inside of a segment, as they may in a compacted log.
    """

    batches: list[dict[str, object]] = field(default_factory=list)
    objections: list[str] = field(default_factory=list)
    has_holes: bool = False


def dump_segments(*logs: Path) -> list[Dump]:
    """Dump the segments, indexes and time indexes of these logs, records included; one Dump for each log."""
    dumps: list[Dump] = []
    while len(dumps) < len(logs):
        dumps += _dump(logs[len(dumps) : len(dumps) + _LOGS_PER_RUN])
    return dumps


def _dump(logs: Sequence[Path]) -> list[Dump]:
    files = [path for log in logs for path in sorted(log.iterdir()) if path.suffix in SUFFIXES]
    command = [*java("-Xmx256m", *QUICK_START), "org.apache.kafka.tools.DumpLogSegments", "--deep-iteration"]
    done = subprocess.run([*command, "--files", ",".join(map(str, files))], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"the tool ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}"
    dumps = {log: Dump() for log in logs}
    looked_at, current = [], None
    for line in done.stdout.splitlines():
        if line.startswith("Dumping "):
            looked_at.append(Path(line.removeprefix("Dumping ")))
            current = dumps[looked_at[-1].parent]
        elif line.startswith("baseOffset: "):
            current.batches.append(_batch(line))
        if current is not None and OBJECTION.search(line):
            current.objections.append(f"{looked_at[-1].name}: {line}")
    assert looked_at == files, f"these were not looked at: {sorted(set(files) - set(looked_at))}"
    for line in done.stderr.splitlines():
        if named := _HOLES_IN.match(line):
            current = dumps[Path(named[1]).parent]
        elif (hole := _HOLE.fullmatch(line)) and hole[1] != "-1":  # every file but the first one "begins" behind -1
            current.has_holes = True
    loose = [line for line in done.stderr.splitlines() if OBJECTION.search(line)]
    assert not loose, f"the tool complains: {loose[:5]}"
    return list(dumps.values())


def _batch(line: str) -> dict[str, object]:
    fields: dict[str, object] = {name: _value(text) for name, text in _FIELD.findall(line)}
    time = next(fields[name] for name in _TIMES if name in fields)
    return fields | {"time": time}


def _value(text: str) -> object:
    if text in {"true", "false"}:
        return text == "true"
    return int(text) if re.fullmatch(r"-?\d+", text) else text
