"""Lines into a log, going on after a crash where the log ends.

    line n of source S ─▶ metadata (PID of S, partition, n) ─▶ Outbox        Outbox.last_metadata ─▶ what is in already

The PID covers the input's name and how its lines are spread, so another file, or another spreading, is another source
and nothing of it is taken for known.
"""

import json

from filtering import METADATA_HEADER, StreamMetadata, producer_id
from pushrep.cli.input_lines import BadLine, Entry, LineRules
from pushrep.errors import PushrepError
from pushrep.outbox import Outbox, RecordRefused
from pushrep.outbox.errors import MetadataGap


class InputStopped(PushrepError):
    """A line can't be taken and `--on-bad-line stop` is in force; all lines before it are in the log."""


class DifferentInput(PushrepError):
    """The log holds other lines under this input's name: going on would lose the lines that seem to be there."""


class Counts:
    """Lines by what became of them."""

    def __init__(self) -> None:
        self.appended = self.present = self.blank = self.bad = self.last_line = 0


class Appender:
    """One run over one input."""

    def __init__(self, outbox: Outbox, rules: LineRules, source: str | None, placement: str) -> None:
        self._outbox, self.rules, self.source = outbox, rules, source
        self.counts = Counts()
        identity = outbox.identity
        self._known: dict[int, int] = {}
        if source is not None:
            self._pid = producer_id(
                application=identity.producer,
                stream=identity.topic,
                source=json.dumps([source, placement]),
                destination=identity.outbox_id,
            )
            for partition in range(identity.partitions):
                last = outbox.last_metadata(self._pid, partition)
                self._known[partition] = 0 if last is None else last

    @property
    def resumes_after(self) -> int:
        """Every line up to this number is in the log or was none."""
        return min(self._known.values(), default=0)

    def append_line(self, number: int, line: bytes) -> None:
        """Append a line unless the log has it. Raises `BadLine`, `DifferentInput`, and what the outbox raises."""
        self.counts.last_line = number
        if self.source is not None and number < self.resumes_after:
            self.counts.present += 1  # blank and bad ones among them: they were told of at their time
            return
        entry = self.rules.parse(number, line)
        if entry is None:
            self.counts.blank += 1
        elif self.source is None:
            self._append(number, entry, None)
        elif number <= (known := self._known[entry.partition]):
            self.counts.present += 1
            if number == known:
                self._check_known(number, entry)
        else:
            self._append(number, entry, StreamMetadata(self._pid, entry.partition, number))

    def stopped(self, bad: BadLine) -> InputStopped:
        """The error that ends the run at a bad line."""
        again = "and run the command again" if self.source is not None else "and append the rest"
        return InputStopped(f"{bad}; the lines before it are in the log: mend it {again}, or pass --on-bad-line skip")

    def _append(self, number: int, entry: Entry, metadata: StreamMetadata | None) -> None:
        try:
            self._outbox.append(entry.partition, entry.value, timestamp_ms=entry.timestamp_ms, metadata=metadata)
        except MetadataGap:
            self._outbox.flush()  # raises why the line before failed, which is what has to be mended
            raise
        except RecordRefused as refused:
            if refused.argument == "value":
                raise BadLine(number, refused.why) from refused
            raise
        self.counts.appended += 1

    def _check_known(self, number: int, entry: Entry) -> None:
        """The last known line is usually the log's last record: if it reads otherwise, this is another input."""
        log = self._outbox.log(entry.partition)
        last = next(iter(log.records(log.log_end_offset - 1)), None)
        if last is None:
            return
        carried = last.key
        if self._outbox.identity.carrier == "header":
            carried = next((value for name, value in reversed(last.headers) if name == METADATA_HEADER), None)
        if carried == StreamMetadata(self._pid, entry.partition, number).pack() and last.value != entry.value:
            raise DifferentInput(
                f"line {number} of {self.source} differs from what the log holds of it: this is another input, or it "
                "was read with other options; give it a name of its own with --source NAME"
            )
