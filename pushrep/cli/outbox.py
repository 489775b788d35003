"""`pushrep outbox create | transfer | hold | set | skip | parked | repartition | rebase`, and `pushrep ship`.

The process that has the outbox open holds takeovers, changes settings and skips records, asked on its control socket;
without one, this process works on the directory.

`pushrep outbox run` runs a service in any language and appends the lines that it prints, while this instance leads:

stand by ─▶ lead ─▶ COMMAND starts ─ its output, one record a line ─▶ Outbox
                    its input ◀─ "<line> <partition> <offset>" for each acknowledged line, in order
another instance leads, or may lead ─▶ COMMAND is ended ─▶ stand by again
COMMAND ends by itself ─▶ this process ends with the same exit code
"""

import logging
import math
import os
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO, cast

import click

from filtering import StreamMetadata, producer_id
from pushrep.cli.append import numbered_lines
from pushrep.cli.common import log_at_least, parse_duration_s, stopped_by_signal
from pushrep.cli.options import (
    client_properties_option,
    copy_check_option,
    health_of,
    health_option,
    is_offset,
    kafka_of,
    log_options,
    on_refused_option,
    setting_option,
    time_ms_of,
    tls_options,
)
from pushrep.cli.progress import progress
from pushrep.election.errors import NotLeader
from pushrep.election.grants import hold_of
from pushrep.env import REAL_FILESYSTEM
from pushrep.errors import PushrepError
from pushrep.kafka import KafkaDestination, ShippingTimeout
from pushrep.kafka.destination import destination_of as destination_by_options
from pushrep.kafka.progress import ShippingProgress, Skip, read_progress
from pushrep.kafka.sink_state import DestinationLag
from pushrep.log import LogConfig, LogLocked
from pushrep.log.directory_files import outboxes_at, slot_directories
from pushrep.outbox import (
    Acks,
    DeliveryFailed,
    NotEnoughReplicas,
    Outbox,
    OutboxConfig,
    Receipt,
    StandbyCancelled,
    StandbyState,
)
from pushrep.outbox.control import NobodyAnswers, ask
from pushrep.outbox.destinations import SkippedRecords, parked_records, repartition, skip_all, skip_records
from pushrep.outbox.errors import CommandRefused
from pushrep.outbox.identity import identity_in
from pushrep.outbox.kept_settings import DYNAMIC_SETTINGS, change_closed, change_later_slots, dynamic_setting, read_kept
from pushrep.outbox.member_changes import calls_of
from pushrep.outbox.standby import GrantedMember, members_at
from pushrep.records import HEADER_BYTES
from pushrep.replicate.certificates import MutualTls
from pushrep.replicate.settings import PushSettings
from pushrep.status.table import table, time_text
from pushrep.status.terminal import say, show_json, show_result, width

_END_S = 10.0
_AGAIN_S = 0.05
_LOOK_S = 0.25


@click.group()
def outbox() -> None:
    """Create and run an outbox with standbys, transfer its lead, hold takeovers; change settings, skip records,
    repartition, rebase.
    """


@outbox.command(
    "run", context_settings={"ignore_unknown_options": True}, short_help="Run a command while this instance leads."
)
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
@click.argument("topic")
@click.option(
    "--producer",
    default="pushrep-run",
    show_default=True,
    help="The application's name, a part of the PID; fixed at the first start, the same on every member.",
)
@setting_option(OutboxConfig, "takeover_after_ms")
@setting_option(OutboxConfig, "takeover_pause_ms")
@click.option(
    "--bootstrap-servers",
    metavar="HOST:PORT,...",
    help="Kafka brokers: the leader ships its records to their topic TOPIC.  [default: ship nothing]",
)
@client_properties_option
@on_refused_option
@health_option
@tls_options
@log_options
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(  # noqa: PLR0913, PLR0917 - one parameter an option
    directory: Path, topic: str, producer: str,
    takeover_after_ms: int, takeover_pause_ms: int, bootstrap_servers: str | None, config: Path | None, on_refused: str,
    health: str | None, tls: MutualTls | None, log_config: LogConfig,
    command: tuple[str, ...],
) -> None:  # fmt: skip
    """Stand by for an outbox, and run COMMAND while this instance leads: each line that COMMAND prints is appended.

    \b
      pushrep outbox run data orders -- ./orders-service --port 8080

    DIRECTORY is the directory of this machine's node, TOPIC that of `pushrep outbox create`. Lines are numbered from 1
    through all instances; line n goes to partition n mod N. COMMAND's standard input gets "LINE PARTITION OFFSET" for
    each line that was appended and acknowledged. Variables of COMMAND's environment: PUSHREP_LINE is the last line up
    to which the outbox holds every line, so the first line that COMMAND prints is the next one. PUSHREP_EPOCH is the
    leader epoch. A line that COMMAND printed, and got no answer for before it was ended, may be in the outbox. When
    COMMAND prints a line that the outbox holds already, it is not appended again, and OFFSET is -1.
    """  # noqa: D301 - \b is click's word for: keep these lines as they are
    kafka = kafka_of(bootstrap_servers, config, on_refused)
    settings = OutboxConfig(
        takeover_after_ms=takeover_after_ms, takeover_pause_ms=takeover_pause_ms, log_config=log_config,
        push=PushSettings(tls=tls),
    )  # fmt: skip
    log_at_least(logging.INFO)
    stop = stopped_by_signal()
    lost = threading.Event()

    def on_state(state: StandbyState, _why: str) -> None:  # stand_by logs the reason
        if state is StandbyState.DEPOSED:
            lost.set()

    with suppress(StandbyCancelled):
        while not stop.is_set():
            lost.clear()
            outbox = Outbox.stand_by(
                directory, topic, None, producer,
                on_state=on_state, cancel=stop, kafka=kafka, health=health_of(health, tls), config=settings,
            )  # fmt: skip
            with outbox:
                code = _Running(outbox, command, log_config.batch_limit_bytes - HEADER_BYTES).until(stop, lost)
            if code is not None:
                raise SystemExit(code)


class _Running:
    """COMMAND while this instance leads the outbox. Two threads: one appends its lines, one writes acknowledgements."""

    def __init__(self, outbox: Outbox, command: Sequence[str], line_bytes_max: int) -> None:
        self._outbox, self._line_bytes_max = outbox, line_bytes_max
        identity = outbox.identity
        self._pid = producer_id(
            application=identity.producer, stream=identity.topic, source="lines", destination=identity.outbox_id
        )
        # Line n is in partition n mod N. A takeover may have lost a line of one partition and kept later lines of
        # others: COMMAND prints all lines from the first lost one on, and `_append` skips those that the outbox holds.
        count = identity.partitions
        known = {n: outbox.last_metadata(self._pid, n) for n in range(count)}
        self._known = {n: (n - count if n else 0) if last is None else last for n, last in known.items()}
        self._line = min(self._known.values()) + count - 1
        self._held = {n: outbox.log(n).log_end_offset for n in known}
        self._appended: SimpleQueue[tuple[int, int, Receipt | None] | None] = SimpleQueue()
        self._why: Exception | None = None
        replication = outbox.facts.replication
        epoch = -1 if replication is None or replication.grant is None else replication.grant.epoch
        environment = {**os.environ, "PUSHREP_LINE": str(self._line), "PUSHREP_EPOCH": str(epoch)}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)  # noqa: S603
        self._over = threading.Event()

    def until(self, stop: threading.Event, lost: threading.Event) -> int | None:
        """Wait for COMMAND. Returns its exit code; None if this process ended it. Raises the error of a failed
        append.
        """
        threads = [threading.Thread(target=one, daemon=True) for one in (self._append_lines, self._answer)]
        for thread in threads:
            thread.start()
        while not (self._over.is_set() or stop.is_set() or lost.is_set()):
            self._over.wait(_AGAIN_S)
        is_ended = not self._over.is_set() or self._why is not None
        if is_ended:
            self._process.terminate()
        try:
            code = self._process.wait(_END_S if is_ended else None)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self._over.set()
        for thread in threads:
            thread.join(_END_S)
        if self._why is not None and not isinstance(self._why, NotLeader):
            raise self._why
        return None if is_ended else code

    def _append_lines(self) -> None:
        assert self._process.stdout is not None, "it is a pipe"
        try:
            with self._process.stdout as output:
                for _, line in numbered_lines(cast("BinaryIO", output), self._line_bytes_max):
                    self._line += 1
                    self._append(self._line, line)
        except (PushrepError, OSError) as error:
            self._why = error
        finally:
            self._appended.put(None)

    def _append(self, number: int, line: bytes) -> None:
        partition = number % self._outbox.identity.partitions
        if number <= self._known[partition]:
            self._appended.put((number, partition, None))
            return
        while True:
            try:
                receipt = self._outbox.append(partition, line, metadata=StreamMetadata(self._pid, partition, number))
            except NotEnoughReplicas:
                if self._over.wait(_AGAIN_S):
                    raise
            else:
                self._appended.put((number, partition, receipt))
                return

    def _answer(self) -> None:
        assert self._process.stdin is not None, "it is a pipe"
        while (one := self._appended.get()) is not None:
            number, partition, receipt = one
            if receipt is None and not self._is_held_by_all(partition):
                break
            try:
                # Kafka's producers, too, return -1 for a record that the broker had already.
                offset = -1 if receipt is None else receipt.result()
            except (DeliveryFailed, PushrepError) as error:
                self._why = self._why or (error.__cause__ if isinstance(error.__cause__, Exception) else error)
                break
            with suppress(OSError):  # the command does not read its input
                self._process.stdin.write(f"{number} {partition} {offset}\n".encode())
                self._process.stdin.flush()
        with suppress(OSError):
            self._process.stdin.close()
        self._over.set()

    def _is_held_by_all(self, partition: int) -> bool:
        """Wait until ALL acknowledged what this instance found in the partition; False if COMMAND ends first."""
        log = self._outbox.log(partition)
        while log.high_watermark < self._held[partition]:
            if self._over.wait(_AGAIN_S):
                return False
        return True


_DIRECTORY = click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
_TOPIC = click.option("--topic", help="The Kafka topic.  [default: the only one that the outbox ships to]")
_JSON = click.option("--json", "as_json", is_flag=True, help="One JSON object.")


_OUTBOX_AT = click.option(
    "--directory",
    type=click.Path(path_type=Path, file_okay=False),
    default=".",
    show_default=True,
    help="The outbox's directory.",
)


@outbox.command(short_help="Never ship some records, or to a topic.")
@click.argument("offsets", metavar="[OFFSET|FIRST-LAST|all]", default="")
@_OUTBOX_AT
@click.option(
    "--partition",
    type=click.IntRange(0),
    help="The partition of the outbox's log.  [default: 0 with OFFSET, else all of them]",
)
@click.option("--before", metavar="TIME", help="Only records whose own time is before: an ISO 8601 time.")
@click.option("--after", metavar="TIME", help="Only records whose own time is after: an ISO 8601 time.")
@click.option(
    "--larger-than", metavar="BYTES", type=click.IntRange(0), help="Only records that alone make a larger batch."
)
@click.option("--reason", help="Why the records are not shipped; stored with their offsets. Needed, except with all.")
@_TOPIC
@_JSON
def skip(  # noqa: PLR0913, PLR0917 - one parameter an option
    offsets: str, directory: Path, partition: int | None, before: str | None, after: str | None,
    larger_than: int | None, reason: str | None, topic: str | None, as_json: bool,  # noqa: FBT001
) -> None:  # fmt: skip
    """Never ship the record at OFFSET, which the topic's broker refuses; shipping continues with the next record. Or
    those from FIRST to LAST, or all that are in the log now and of a time or size. Or all: ship nothing to the topic
    any more.

    \b
      pushrep outbox skip 1042 --directory outbox --partition 3 --reason "12 MB, the topic takes 1 MB"
      pushrep outbox skip --before 2026-01-31 --directory outbox --reason "older than the topic keeps"
      pushrep outbox skip all --directory outbox --topic orders

    Offsets are those of the outbox's log. Readers of the topic see a gap in the source offsets. The records stay in
    the log. Repeated, the command changes nothing. After `skip all` retention keeps no records for the topic, and its
    shipping progress is deleted: a later start that ships to it again ships everything from the start of the logs. A
    service may have the outbox open, but it refuses `skip all` for the topic that it ships to.
    """  # noqa: D301 - \b is click's word for: keep these lines as they are
    if offsets == "all":
        if topic is None:
            raise click.UsageError("name the topic: skip all --topic TOPIC")
        _ask_or(directory, "skip-all", {"topic": topic}, lambda: skip_all(directory, topic))
        said: dict[str, Any] = {"topic": topic}
        lines = [f"nothing is shipped to topic {topic} any more, and no records are kept for it"]
    else:
        start, end = _range_of(offsets)
        filters = {
            "before_ms": None if before is None else time_ms_of("--before", before),
            "after_ms": None if after is None else time_ms_of("--after", after),
            "larger_than_bytes": larger_than,
        }
        if end is None and set(filters.values()) == {None}:
            raise click.UsageError("name records: OFFSET, FIRST-LAST, --before, --after or --larger-than")
        if end is not None and partition is None:
            partition = 0
        records: dict[str, Any] = {
            "reason": reason or "",
            "partition": partition,
            "start": start,
            "end": end,
            **filters,
        }
        wanted = SkippedRecords(**records)
        asked = {"records": records} | ({} if topic is None else {"topic": topic})
        skips = [
            Skip(*one)
            for one in _ask_or(directory, "skip", asked, lambda: skip_records(directory, wanted, topic=topic))
        ]
        said = {"reason": wanted.reason, "skipped": [one._asdict() for one in skips]}
        lines = [*map(_said_of, skips)] or ["nothing is given up: no such records are left, or they are already"]
    show_result(said, lines, as_json=as_json)


@outbox.command(
    "set",
    short_help="Change settings of an open outbox.",
    epilog=f"NAME is one of {', '.join(DYNAMIC_SETTINGS)}; docs/settings.md has their units and ranges.",
)
@_DIRECTORY
@click.argument("changes", metavar="[NAME=VALUE]...", nargs=-1)
@click.option(
    "--delete",
    "deleted",
    metavar="NAME",
    multiple=True,
    help="Take NAME back: what the service gives at opening holds.",
)
@_JSON
def set_(directory: Path, changes: tuple[str, ...], deleted: tuple[str, ...], as_json: bool) -> None:  # noqa: FBT001
    """Change settings of the logs of the outbox in DIRECTORY, while a service has it open or not; without NAME=VALUE,
    print those that were changed so.

    \b
      pushrep outbox set outbox retention_ms=86400000 retention_bytes=10737418240
      pushrep outbox set outbox disk_refuse_percent=97 disk_refuse_free_bytes=1073741824
      pushrep outbox set outbox --delete retention_ms

    A service that has the outbox open goes on with the new settings at once: what is too old by them is removed within
    seconds. They are kept in the directory, and stand above what the service gives at each later opening, until
    --delete. With replicas another member that takes over has what its own service gives, and what was changed there.
    With worker slots they are those of each slot, also of one that is opened later.
    """  # noqa: D301 - \b is click's word for: keep these lines as they are
    asked: dict[str, Any] = {"changes": dict(map(_change_of, changes)), "deleted": list(deleted)}
    if (changes or deleted) and slot_directories(directory):
        change_later_slots(directory, **asked)
    for place in outboxes_at(directory):
        if changes or deleted:
            kept = _ask_or(place, "set", asked, partial(change_closed, place, **asked))
        else:
            kept = read_kept(REAL_FILESYSTEM, place)
        lines = [f"{name} = {'none' if value is None else value}" for name, value in kept.items()]
        lines = lines or ["nothing is changed: what the service gives at opening holds"]
        named = [] if place == directory else [f"{place.name}:"]
        show_result({"directory": str(place), "settings": kept}, named + lines, as_json=as_json)


def _change_of(text: str) -> tuple[str, object]:
    name, equals, value = text.partition("=")
    if not equals:
        raise click.UsageError(f"{text!r} is not NAME=VALUE")
    return name, dynamic_setting(name).value_of(value)


def _said_of(skip: Skip) -> str:
    last = f" to {skip.end - 1:,}" if skip.end else ""
    return f"offset {skip.offset:,}{last} of partition {skip.partition} will not be shipped: {skip.reason}"


def _range_of(offsets: str) -> tuple[int, int | None]:
    """[start, end) of an offset or FIRST-LAST; to no end without either. Raises click.BadParameter."""
    first, dash, last = offsets.partition("-")
    if not offsets:
        return 0, None
    if not is_offset(first) or (dash and not (is_offset(last) and int(first) <= int(last))):
        raise click.BadParameter(f"{offsets!r} is neither an offset, nor FIRST-LAST, nor all", param_hint="OFFSET")
    return int(first), int(last or first) + 1


def _ask_or(directory: Path, call: str, arguments: dict[str, Any], otherwise: Callable[[], Any]) -> Any:
    """Ask the process that has the outbox open; if there is none, do it here."""
    try:
        return ask(directory, call, arguments)
    except NobodyAnswers:
        return otherwise()


@outbox.group(short_help="Look at records that a topic refused.")
def parked() -> None:
    """What to do with the records that a topic refused and that were parked: KafkaDestination(on_refused="park").

    \b
      pushrep outbox parked list --directory outbox
      pushrep outbox parked resend 3 --directory outbox
      pushrep outbox parked done 4 --directory outbox

    A parked record is a problem, and `wait_shipped` raises RecordsParked, until it was sent again or is done.
    """  # noqa: D301 - \b is click's word for: keep these lines as they are


_NUMBERS = click.argument("offsets", metavar="OFFSET...", type=click.IntRange(0), nargs=-1, required=True)


@parked.command("list", short_help="List the records that are parked.")
@_OUTBOX_AT
@_JSON
def parked_list(directory: Path, as_json: bool) -> None:  # noqa: FBT001 - click's
    """List the records that are parked and not done. OFFSET is that in the parking log, which `resend` and `done` take.

    A service may have the outbox open.
    """
    found = parked_records(directory)
    columns = ["offset", "topic", "partition", "its offset", "parked", "error"]
    rows = [
        [str(one.number), one.topic, str(one.partition), str(one.offset), time_text(one.at_ms), one.message]
        for one in found
    ]
    lines = table(columns, rows, width()) if rows else ["no record is parked"]
    show_result({"parked": [one._asdict() for one in found]}, lines, as_json=as_json)


@parked.command("resend", short_help="Append parked records anew.")
@_NUMBERS
@_OUTBOX_AT
@_JSON
def parked_resend(offsets: tuple[int, ...], directory: Path, as_json: bool) -> None:  # noqa: FBT001 - click's
    """Append the parked records at these OFFSETs of the parking log anew, and end them.

    They get new offsets in their partition, behind all that is there: under its old key, every filtering reader would
    drop such a record. One that carries the metadata of another source is refused: its source has to append it again.
    """
    asked = {"numbers": list(offsets)}
    found = _ask_or(directory, "parked-resend", asked, lambda: _in_closed(directory, "parked-resend", asked))
    resent = [{"partition": partition, "offset": offset} for partition, offset in found]
    lines = [f"appended to partition {partition} at offset {offset:,}" for partition, offset in found]
    show_result({"resent": resent}, lines, as_json=as_json)


@parked.command("done", short_help="End parked records.")
@_NUMBERS
@_OUTBOX_AT
@_JSON
def parked_done(offsets: tuple[int, ...], directory: Path, as_json: bool) -> None:  # noqa: FBT001 - click's
    """Say that the parked records at these OFFSETs of the parking log are dealt with. They stay in it."""
    asked = {"numbers": list(offsets)}
    _ask_or(directory, "parked-done", asked, lambda: _in_closed(directory, "parked-done", asked))
    show_result({"done": list(offsets)}, [f"{len(offsets)} parked records are done"], as_json=as_json)


def _in_closed(directory: Path, call: str, arguments: dict[str, Any]) -> Any:
    """The control call, on an outbox that nobody has open."""
    identity = identity_in(REAL_FILESYSTEM, directory)
    with Outbox.open(
        directory, identity.topic, identity.partitions, identity.producer,
        carrier=identity.carrier, config=OutboxConfig(create=False),
    ) as outbox:  # fmt: skip
        return calls_of(outbox.facts, outbox.append)[call](arguments)


@outbox.command("repartition", short_help="Use more partitions of the topic.")
@_DIRECTORY
@_TOPIC
@_JSON
def repartition_command(directory: Path, topic: str | None, as_json: bool) -> None:  # noqa: FBT001 - click's
    """Use more partitions of the topic: from the next start on, new records go to all partitions that it has then.

    No process may have the outbox in DIRECTORY open. The outbox gets a new PID. Records that are in the log already and
    not shipped yet go to the partitions used so far. A service that appends with the metadata of its own sources has to
    use new PIDs for these, too.
    """
    identity = repartition(directory, topic=topic)
    text = f"the next start uses PID {identity.pid}, epoch {identity.pid_epoch}, and all partitions of the topic"
    show_result({"pid": identity.pid, "pid_epoch": identity.pid_epoch}, [text], as_json=as_json)


@outbox.command("rebase", short_help="Ship again after the topic diverged.")
@_DIRECTORY
@click.option("--bootstrap-servers", required=True, metavar="HOST:PORT,...", help="Kafka brokers to connect to first.")
@click.option("--topic", help="The Kafka topic.  [default: the outbox's topic]")
@client_properties_option
@click.option("--dry-run", is_flag=True, help="Print what would be done; change nothing.")
@_JSON
def rebase_command(  # noqa: PLR0913, PLR0917 - one parameter an option
    directory: Path, bootstrap_servers: str, topic: str | None, config: Path | None,
    dry_run: bool, as_json: bool,  # noqa: FBT001 - click's
) -> None:  # fmt: skip
    """Let the outbox in DIRECTORY ship again after OutboxDiverged or DestinationAhead (its topic holds other records at
    the positions of some of its own), or after TopicLostRecords.

    \b
      pushrep outbox rebase outbox --bootstrap-servers broker:9092 --dry-run
      pushrep outbox rebase outbox --bootstrap-servers broker:9092

    Records that the topic lacks are appended again under a new PID, and the originals are not shipped. Readers of the
    topic see each record once; readers of the log see these records twice. Records that the topic has lost are not
    appended again: the next start, or `pushrep ship`, looks them up in the topic and sends what is missing. No process
    may have the outbox open. If the command is interrupted, run it again. Exit code 1 if one of the records has the
    metadata of another source than the outbox: it can't be appended again.
    """  # noqa: D301 - \b is click's word for: keep these lines as they are
    from pushrep.outbox.rebase import rebase  # noqa: PLC0415 - needs the Kafka client, which is an extra

    done = rebase(directory, destination_by_options(bootstrap_servers, topic, config), dry_run=dry_run)
    if as_json:
        partitions = {str(number): one._asdict() for number, one in done.partitions.items() if one.again}
        lost = {str(number): ends for number, ends in done.lost.items()}
        show_json(
            {"topic": done.topic, "records": done.records, "dry_run": dry_run, "partitions": partitions, "lost": lost}
        )
        return
    for number, (start, end) in done.lost.items():
        sends = "would send" if dry_run else "sends"
        say(f"partition {number}: the topic has lost [{start}, {end}): the next start {sends} again what it lacks")
    if done.lost:
        return
    for number, one in done.partitions.items():
        count = sum(end - start for start, end in one.again)
        if count:
            ranges = ", ".join(f"[{start}, {end})" for start, end in one.again)
            say(
                f"partition {number}: {count:,} records {ranges} {'would be' if dry_run else 'are'} appended again as "
                f"[{one.log_end}, {one.log_end + count}), and the originals not shipped"
            )
    if dry_run:
        say(f"{done.records:,} records in all, under a new PID; readers of the log would see them twice")
    else:
        say(f"{done.records:,} records were appended again; a new PID begins with the next start")


@outbox.command(short_help="Create an outbox with standbys.")
@click.argument("data", type=click.Path(path_type=Path, file_okay=False, exists=True))
@click.option(
    "--members",
    required=True,
    metavar="HOST:PORT,...",
    help="The addresses of the members' nodes, three or more; first that of the node of DATA.",
)
@click.option("--topic", required=True, help="The name of the logs and of the Kafka topic; fixed.")
@click.option(
    "--partitions", type=click.IntRange(1), default=1, show_default=True, help="The number of partitions; fixed."
)
@click.option(
    "--carrier",
    type=click.Choice(["key", "header"]),
    default="key",
    show_default=True,
    help="Where records carry their stream metadata; fixed.",
)
@click.option(
    "--min-insync-replicas",
    "min_insync",
    type=click.IntRange(1),
    help="How many members must hold a record before it is acknowledged; a majority at least.  [default: a majority]",
)
@click.option(
    "--another",
    is_flag=True,
    help="Make it although DATA has an outbox of TOPIC: the instances of both then have to name DATA/<outbox id>.",
)
@tls_options
@_JSON
def create(  # noqa: PLR0913, PLR0917 - one parameter an option
    data: Path, members: str, topic: str, partitions: int, carrier: str, min_insync: int | None,
    another: bool, tls: MutualTls | None, as_json: bool,  # noqa: FBT001 - click's
) -> None:  # fmt: skip
    """Create an outbox whose service runs on every member: one instance leads, the others stand by (Outbox.stand_by).

    \b
      pushrep outbox create data --members 10.0.0.1:7400,10.0.0.2:7400,10.0.0.3:7400 --topic orders --partitions 3

    DATA is the directory of the first member's node. All nodes have to answer. Instances that stand by already, each on
    its own node's directory, find the new outbox by themselves. If DATA has an outbox of TOPIC, the command names it
    and creates nothing.
    """  # noqa: D301 - \b is click's word for: keep these lines as they are
    from pushrep.outbox.creating import create_outbox  # noqa: PLC0415 - imports the wire protocol; no other command does

    listed = [one.strip() for one in members.split(",")]
    made = create_outbox(
        data,
        listed,
        topic,
        partitions,
        carrier=carrier,
        min_insync_replicas=min_insync,
        another=another,
        push=PushSettings(tls=tls),
    )
    made_of, least = [one.address for one in made.members], made.min_insync_replicas
    lines = (
        f"outbox {made.outbox_id} of topic {topic} is made: {least} of {len(listed)} members acknowledge each record",
        f'each instance: Outbox.stand_by(<its node\'s directory>, "{topic}", {partitions}, <producer>)',
    )
    result = {"outbox_id": str(made.outbox_id), "members": made_of, "min_insync_replicas": least}
    show_result(result, lines, as_json=as_json)


@outbox.command(short_help="Hand the lead over to another member.")
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False, exists=True))
@click.option(
    "--to",
    type=click.IntRange(0, 255),
    metavar="MEMBER",
    help="The number of the member; a service has to stand by there.  [default: the one that holds most]",
)
@_JSON
def transfer(directory: Path, to: int | None, as_json: bool) -> None:  # noqa: FBT001 - click's
    """Hand the lead of an outbox over to a member whose service stands by, for example before work on this machine.

    \b
      pushrep outbox transfer data --to 2
      pushrep outbox transfer data

    DIRECTORY is that of the leader's outbox or node. The leader takes no more appends and waits until that member holds
    everything, up to its close_timeout_s; then the member takes over at once. If it can't, the leader leads on. A
    leader that is closed hands over by itself.
    """  # noqa: D301 - \b is click's word for: keep these lines as they are
    member = _one_member(directory)
    try:
        done = ask(member.directory, "transfer", {"to": to})
    except NobodyAnswers as error:
        raise CommandRefused(_who_can(member)) from error
    show_result({"member": done}, [f"member {done} takes over"], as_json=as_json)


@outbox.command(short_help="Keep standbys from taking over for a while.")
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False, exists=True))
@click.option("--for", "length", metavar="DURATION", help="Hold takeovers from now on for so long: 90s, 30m, 1h or 2d.")
@click.option("--reason", default="", help="Why; stored with the hold. Needed with --for.")
@click.option("--end", is_flag=True, help="End the hold: standbys take over again.")
@click.option(
    "--show", is_flag=True, help="Print whether takeovers are held, until when and why, as stored in DIRECTORY."
)
@_JSON
def hold(  # noqa: PLR0913, PLR0917 - one parameter an option
    directory: Path, length: str | None, reason: str, end: bool, show: bool, as_json: bool,  # noqa: FBT001 - click's
) -> None:  # fmt: skip
    """Keep all standbys of an outbox from taking over for a while, for example during work on the network.

    \b
      pushrep outbox hold data --for 1h --reason "new switches"
      pushrep outbox hold data --show
      pushrep outbox hold data --end

    DIRECTORY is that of the leader's outbox or node. The leader's service has to run, and a majority of the members has
    to store the hold. `pushrep promote` still works; a leader that it makes keeps the hold. The leader leads again when
    it is restarted.
    """  # noqa: D301 - \b is click's word for: keep these lines as they are
    if sum((length is not None, end, show)) != 1:
        raise click.UsageError("give one of --for DURATION, --end and --show")
    if length is not None and not reason.strip():
        raise click.UsageError("give --reason TEXT: it is stored with the hold, for other operators")
    member = _one_member(directory)
    grant = member.kept.grant
    if not show:
        for_ms = 0 if length is None else 1000 * _duration_s(length)
        try:
            until_ms = ask(member.directory, "hold", {"for_ms": for_ms, "reason": reason})
        except NobodyAnswers as error:
            raise CommandRefused(_who_can(member)) from error
        said = {"until_ms": until_ms, "reason": reason} if for_ms else None
    else:
        kept = hold_of(grant, time.time_ns() // 1_000_000)
        said = None if kept is None else {"until_ms": kept.until_ms, "reason": kept.reason}
    text = "takeovers are not held: standbys take over by themselves"
    if said is not None:
        text = f"no standby takes over by itself until {time_text(said['until_ms'])}: {said['reason']}"
    show_result({"hold": said}, [text], as_json=as_json)


def _duration_s(text: str) -> int:
    try:
        return parse_duration_s(text)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--for") from error


def _one_member(directory: Path) -> GrantedMember:
    found = members_at(directory)
    if len(found) != 1:
        named = ", ".join(str(one.directory) for one in found)
        raise CommandRefused(f"give one of {named}" if found else f"{directory} holds no outbox that has a leader")
    return found[0]


def _who_can(member: GrantedMember) -> str:
    """Why no process answers in the member's directory, and where to run the command."""
    grant = member.kept.grant
    assert grant is not None, "the caller has checked it"
    if member.kept.is_led_here:
        return f"member {grant.leader} leads, but its service does not run: start it in {member.directory} first"
    address = next((one.address for one in grant.members if one.index == grant.leader), "")
    return f"member {grant.leader} ({address or 'address unknown'}) leads: run this command there, on its directory"


@click.command(short_help="Ship an outbox whose service does not run.")
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
@click.option("--bootstrap-servers", required=True, metavar="HOST:PORT,...", help="Kafka brokers to connect to first.")
@click.option("--topic", help="The Kafka topic.  [default: the outbox's topic]")
@client_properties_option
@on_refused_option
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(0),
    help="Seconds; afterwards exit with 1 if records are left.  [default: no limit]",
)
@copy_check_option
@click.option("--json", "as_json", is_flag=True, help="The result as one JSON object.")
def ship(  # noqa: PLR0913, PLR0917 - one parameter an option
    directory: Path, bootstrap_servers: str, topic: str | None, config: Path | None, on_refused: str,
    timeout_s: float | None, copy_check: bool, as_json: bool,  # noqa: FBT001 - click's
) -> None:  # fmt: skip
    """Ship the records of the outbox in DIRECTORY to its Kafka topic, until brokers have acknowledged all.

    \b
      pushrep ship outbox --bootstrap-servers broker-1:9092,broker-2:9092
      pushrep ship outbox --bootstrap-servers broker:9093 --config client.properties --json

    For an outbox that no service has open. It continues where the last shipping ended. If it is interrupted, run it
    again. Exit code 1 if a broker refuses a record (the error has its offset, also if it was parked), or after
    --timeout.
    """  # noqa: D301 - \b is click's word for: keep these lines as they are
    destination = destination_by_options(bootstrap_servers, topic, config, on_refused)
    places = outboxes_at(directory)
    deadline = time.monotonic() + (math.inf if timeout_s is None else timeout_s)
    for place in places:
        try:
            found = _ship_one(place, destination, topic, deadline, copy_check=copy_check)
        except LogLocked as error:
            if place == directory:
                raise
            say(f"{place.name}: skipped, process {error.pid} has it open", err=True)
            continue
        except ShippingTimeout as error:
            # `error` has the time of the last look.
            raise ShippingTimeout(timeout_s or 0.0, error.records, error.reason) from None
        slot, name = ({}, "") if place == directory else ({"slot": place.name}, f"{place.name}: ")
        text = f"{name}{found['shipped']:,} records shipped to {found['topic']} in {found['seconds']:.1f} s"
        show_result(slot | found, [text], as_json=as_json)


def _ship_one(
    directory: Path,
    destination: KafkaDestination,
    topic: str | None,
    deadline: float,
    *,
    copy_check: bool,
) -> dict[str, Any]:
    identity = identity_in(REAL_FILESYSTEM, directory)
    known = read_progress(REAL_FILESYSTEM, directory).get(topic or identity.topic, ShippingProgress()).partitions
    started = time.monotonic()
    wait_s = min(destination.request_timeout_ms / 1000, max(0.0, deadline - started))
    with Outbox.open(
        directory, identity.topic, identity.partitions, identity.producer,
        carrier=identity.carrier, kafka=destination,
        replicas=[address for _, address in identity.replicas], acks=Acks.LOCAL if identity.replicas else None,
        config=OutboxConfig(
            create=False, log_config=LogConfig(batch_bytes=1), copy_check=copy_check, open_timeout_s=wait_s,
        ),
    ) as outbox:  # fmt: skip
        name = next(name for name in outbox.lag() if name.startswith("kafka:"))
        logs = [outbox.log(n) for n in range(identity.partitions)]
        shipped = sum(
            log.log_end_offset - (known[n].acknowledged if n in known else log.log_start_offset)
            for n, log in enumerate(logs)
        )
        _wait(outbox, name, shipped, deadline)
        ends = [log.log_end_offset for log in logs]
    seconds = round(time.monotonic() - started, 3)
    return {"topic": name.removeprefix("kafka:"), "shipped": shipped, "log_end_offsets": ends, "seconds": seconds}


def _wait(outbox: Outbox, name: str, records: int, deadline: float) -> None:
    """Wait until all is acknowledged, with a progress bar on a terminal. Raises ShippingTimeout after the deadline."""
    with progress("shipping", records, unit="records") as show:
        while True:
            try:
                outbox.wait_shipped(max(0.0, min(_LOOK_S, deadline - time.monotonic())))
            except ShippingTimeout:
                lag = outbox.lag()[name]
                assert isinstance(lag, DestinationLag), "it is the topic's"
                show(records - lag.records, note=lag.trouble or "")
                if time.monotonic() >= deadline:
                    raise
            else:
                return
