"""`pushrep outbox run`: a service in any language, whose lines are appended while it leads.

stand by ─▶ leads ─▶ COMMAND starts ─ its output, a line a record ─▶ Outbox
▲ its input: "<line> <partition> <offset>" of each line that is acknowledged, in order
another leads, or may ─▶ COMMAND is ended ─▶ stand by again        COMMAND ends ─▶ so does this, with its exit code
"""

import logging
import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import BinaryIO, cast

import click

from filtering import StreamMetadata, producer_id
from pushrep.cli.common import log_at_least
from pushrep.cli.input_lines import BadLine, numbered_lines
from pushrep.cli.log_settings import log_options
from pushrep.cli.replica.reaching import client_tls, tls_options
from pushrep.election.errors import NotLeader
from pushrep.election.standby import TAKEOVER_AFTER_MS, TAKEOVER_PAUSE_MS
from pushrep.errors import PushrepError
from pushrep.log import LogConfig
from pushrep.outbox import DeliveryFailed, NotEnoughReplicas, Outbox, Receipt, StandbyCancelled, StandbyState
from pushrep.records import HEADER_BYTES
from pushrep.replicate.settings import PushSettings

_END_S = 10.0
_AGAIN_S = 0.05


@click.command("run", context_settings={"ignore_unknown_options": True})
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
@click.argument("topic")
@click.option(
    "--stand-by", is_flag=True, required=True, help="Start COMMAND while this instance leads, end it when not."
)
@click.option("--partitions", type=click.IntRange(1), default=1, show_default=True, help="As the outbox was made.")
@click.option("--producer", default="pushrep-run", show_default=True, help="The application's name. Fixed.")
@click.option(
    "--takeover-after-ms",
    type=click.IntRange(2_000),
    default=TAKEOVER_AFTER_MS,
    show_default=True,
    help="For so long the leader is not heard before a standby looks.",
)
@click.option(
    "--takeover-pause-ms",
    type=click.IntRange(0),
    default=TAKEOVER_PAUSE_MS,
    show_default=True,
    help="After another instance took over, this one does no sooner.",
)
@tls_options
@log_options
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(  # noqa: PLR0913, PLR0917 - one parameter an option
    directory: Path, topic: str, stand_by: bool, partitions: int, producer: str,  # noqa: ARG001, FBT001
    takeover_after_ms: int, takeover_pause_ms: int,
    cert: Path | None, key: Path | None, ca: Path | None, log_config: LogConfig, command: tuple[str, ...],
) -> None:  # fmt: skip
    """Stand by for an outbox, and run COMMAND while this instance leads: what it prints is appended, line by line.

    \b
      pushrep outbox run data orders --stand-by -- ./orders-service --port 8080

    DIRECTORY is this machine's node's, TOPIC that of `pushrep outbox create`. Line n goes into partition n mod N. Each
    line that is acknowledged is answered on COMMAND's standard input: "LINE PARTITION OFFSET". PUSHREP_LINE says how
    many lines of all instances are in the outbox, so COMMAND prints the next one first; PUSHREP_EPOCH which lead it is.
    What was not answered when COMMAND was ended may be in the outbox: the next instance finds it counted.
    """  # noqa: D301 - \b is click's word for: keep these lines as they are
    log_at_least(logging.INFO)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    lost = threading.Event()

    def on_state(state: StandbyState, why: str) -> None:
        click.echo(f"{state.value}{': ' + why if why else ''}", err=True)
        if state is StandbyState.DEPOSED:
            lost.set()

    with suppress(StandbyCancelled):
        while not stop.is_set():
            lost.clear()
            outbox = Outbox.stand_by(
                directory, topic, partitions, producer,
                takeover_after_ms=takeover_after_ms, takeover_pause_ms=takeover_pause_ms,
                on_state=on_state, cancel=stop,
                push=PushSettings(tls=client_tls(cert, key, ca)), log_config=log_config,
            )  # fmt: skip
            with outbox:
                code = _Running(outbox, command, log_config.batch_limit_bytes - HEADER_BYTES).until(stop, lost)
            if code is not None:
                raise SystemExit(code)


class _Running:
    """COMMAND while its outbox leads."""

    def __init__(self, outbox: Outbox, command: Sequence[str], line_bytes_max: int) -> None:
        self._outbox, self._line_bytes_max = outbox, line_bytes_max
        identity = outbox.identity
        self._pid = producer_id(
            application=identity.producer, stream=identity.topic, source="lines", destination=identity.outbox_id
        )
        # Line n is in partition n mod N: a takeover may have lost one of a partition and kept later ones of others.
        count = identity.partitions
        known = {n: outbox.last_metadata(self._pid, n) for n in range(count)}
        self._known = {n: (n - count if n else 0) if last is None else last for n, last in known.items()}
        self._line = min(self._known.values()) + count - 1
        self._acknowledged: SimpleQueue[tuple[int, int, Receipt] | None] = SimpleQueue()
        self._why: Exception | None = None
        replication = outbox.facts.replication
        epoch = -1 if replication is None or replication.grant is None else replication.grant.epoch
        environment = {**os.environ, "PUSHREP_LINE": str(self._line), "PUSHREP_EPOCH": str(epoch)}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)  # noqa: S603
        self._over = threading.Event()

    def until(self, stop: threading.Event, lost: threading.Event) -> int | None:
        """Its exit code; None if it was ended. Raises what a line that can't be taken raises."""
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
            for _, line in numbered_lines(cast("BinaryIO", self._process.stdout), self._line_bytes_max):
                if isinstance(line, BadLine):
                    raise line
                self._line += 1
                self._append(self._line, line)
        except (PushrepError, OSError) as error:
            self._why = error
        finally:
            self._acknowledged.put(None)

    def _append(self, number: int, line: bytes) -> None:
        partition = number % self._outbox.identity.partitions
        if number <= self._known[partition]:
            return
        while True:
            try:
                receipt = self._outbox.append(partition, line, metadata=StreamMetadata(self._pid, partition, number))
            except NotEnoughReplicas:
                if self._over.wait(_AGAIN_S):
                    raise
            else:
                self._acknowledged.put((number, partition, receipt))
                return

    def _answer(self) -> None:
        assert self._process.stdin is not None, "it is a pipe"
        while (one := self._acknowledged.get()) is not None:
            number, partition, receipt = one
            try:
                offset = receipt.result()
            except (DeliveryFailed, PushrepError) as error:
                self._why = self._why or (error.__cause__ if isinstance(error.__cause__, Exception) else error)
                break
            with suppress(OSError):  # it does not want to know
                self._process.stdin.write(f"{number} {partition} {offset}\n".encode())
                self._process.stdin.flush()
        with suppress(OSError):
            self._process.stdin.close()
        self._over.set()
