"""Opening an outbox: its identity, its logs, records that only other members hold, its PID epoch, its leader.

    outbox.json ─▶ logs ─▶ fetch what a replica has more ─▶ PID epoch ─▶ lead

Everything that was opened is in `resources`, which closes it in reverse: replication ends before a log is closed.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import UUID, uuid4

from pushrep.election.errors import NotLeader
from pushrep.env import Clock, Filesystem
from pushrep.errors import BadArgument
from pushrep.kafka.parking import ParkingLog, parking_config, parking_name
from pushrep.kafka.progress import read_progress
from pushrep.log import LogConfig, SegmentLog
from pushrep.log.directory import LogDirectory, create_logs
from pushrep.outbox.identity import OutboxIdentity, missing_logs, settle_epoch, settle_identity
from pushrep.outbox.kept_settings import KeptSettings
from pushrep.outbox.positions import POSITIONS_NAME, PositionsStore
from pushrep.outbox.relay_note import HOLDER, RelayNotes
from pushrep.outbox.settings import OutboxSettings
from pushrep.outbox.shipping import Shipping, open_shipping
from pushrep.replicate.election_state import ElectionState, ElectionStateStore, find_election_state

if TYPE_CHECKING:
    from pushrep.outbox.replication import Replication

OPENING = "the opening of the outbox"


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """The parts of an open outbox."""

    identity: OutboxIdentity
    logs: Sequence[tuple[SegmentLog, PositionsStore]]
    parking: tuple[SegmentLog, PositionsStore] | None
    """The log of refused records, if any were parked or are to be."""
    replication: "Replication | None"
    shipping: Shipping
    kept_settings: KeptSettings
    relay_notes: RelayNotes
    certificates: Callable[[], dict[str, int | None]]
    """When each certificate expires, by its use: the loaded ones, and the one that the health server would load now."""


def open_all(  # noqa: PLR0913 - what is opened, and by what
    resources: ExitStack,
    directory: Path,
    wanted: OutboxIdentity,
    settings: OutboxSettings,
    *,
    filesystem: Filesystem,
    clock: Clock,
) -> Opened:
    """Raises as `Outbox.open` does."""
    held = resources.enter_context(
        LogDirectory.acquire(directory, filesystem, clock, copy_check=settings.config.copy_check)
    )
    lead = _lead_of(held)
    if wanted.replicas or lead is not None:
        held.refuse_copy()
    identity, is_new = settle_identity(held, wanted, settings.config.min_insync_replicas, lead)
    progress = read_progress(held.filesystem, held.path)
    kept_settings = KeptSettings(held, settings, ships=settings.kafka is not None or bool(progress))
    config, relay_notes = kept_settings.log_config, RelayNotes(held.filesystem, held.path)
    made_anew = [] if is_new else missing_logs(held, identity, accept_loss=settings.config.accept_loss)
    topic_id = lead.grant.topic_id if lead is not None and lead.grant is not None else None
    if is_new:
        topic_id = topic_id or uuid4()
        names = identity.log_names
        for some in (names[:1], names[1:]):  # the first one alone: the opening after a crash takes the id from it
            create_logs(held, dict.fromkeys(some, topic_id), has_replicas=bool(identity.replicas))
    state_store = None
    if identity.replicas:
        state_store = ElectionStateStore(held.path, UUID(identity.outbox_id), held.filesystem)
    logs: list[tuple[SegmentLog, PositionsStore]] = []
    for name in identity.log_names:  # all of one topic, which has one id
        log_id = logs[0][0].log_id if logs else topic_id
        logs.append(_open_log(resources, held, name, identity, config, log_id, state_store))
    parking, name = None, parking_name(identity.topic, identity.partitions)
    if held.filesystem.exists(held.path / name) or (settings.kafka is not None and settings.kafka.on_refused == "park"):
        parking = _open_log(resources, held, name, identity, parking_config(config), logs[0][0].log_id, state_store)
    every = logs if parking is None else [*logs, parking]
    replication = None
    if state_store is None:
        identity = settle_epoch(held, identity, logs, made_anew)
        held.settle_id()
    else:
        held.settle_id()
        # Imports half of `wire`, which an outbox without replicas does not need.
        from pushrep.outbox.replication import Replication  # noqa: PLC0415

        replication = Replication(identity, every, state_store, settings, clock)
        resources.callback(replication.close)
        replication.open()  # before the PID epoch: records that are fetched were not lost
        identity = settle_epoch(held, identity, logs, made_anew)
        replication.start(identity.pid_epoch)
    is_new = is_new and replication is None  # of an outbox with replicas another member may have shipped records
    own = [log for log, _ in logs]
    kept = None if parking is None else ParkingLog(parking[0])
    shipping = open_shipping(held, identity, own, replication, settings, kept, progress, is_new=is_new)
    for log in own:
        log.hold(HOLDER, partial(relay_notes.needed_from, log.partition))
    for log, _ in every:
        log.drop_holder(OPENING)
    return Opened(
        identity=identity,
        logs=logs,
        parking=parking,
        replication=replication,
        shipping=shipping,
        kept_settings=kept_settings,
        relay_notes=relay_notes,
        certificates=_certificates_of(settings),
    )


def _certificates_of(settings: OutboxSettings) -> Callable[[], dict[str, int | None]]:
    loaded: dict[str, int | None] = {}
    push, kafka, health = settings.config.push, settings.kafka, settings.health
    if push.tls is not None:
        loaded["replicas"] = getattr(push.tls, "expires_s", None)  # set by `mutual_tls`
    if kafka is not None and (kafka.ssl_certfile is not None or kafka.ssl_cafile is not None):
        from pushrep.replicate.certificates import expires_s  # noqa: PLC0415 - only with certificates

        try:
            loaded["kafka"] = expires_s(kafka.ssl_certfile, kafka.ssl_cafile)
        except BadArgument:
            loaded["kafka"] = None

    def certificates() -> dict[str, int | None]:
        return loaded if health is None or health.cert is None else {**loaded, "health": health.expires_s()}

    return certificates


def _lead_of(held: LogDirectory) -> ElectionState | None:
    """The state by whose grant this directory may lead; None if it has none yet. Raises NotLeader, CorruptFile."""
    _, state = find_election_state(held.path, held.filesystem) or (None, None)
    if state is None or state.grant is None:
        return None
    if not state.is_led_here:
        raise NotLeader(state.grant.leader, state.grant.epoch)
    return state


def _open_log(  # noqa: PLR0913, PLR0917 - one log, and what it belongs to
    resources: ExitStack,
    held: LogDirectory,
    name: str,
    identity: OutboxIdentity,
    config: LogConfig,
    log_id: UUID | None,
    state_store: ElectionStateStore | None,
) -> tuple[SegmentLog, PositionsStore]:
    path = held.path / name
    store = PositionsStore(path / POSITIONS_NAME, identity.carrier, held.filesystem)
    if held.given_up(name) and state_store is None:  # with replicas each opening has an epoch of its own
        store.destroy()
    log = SegmentLog.open(
        path,
        config=config,
        derived=(store,),
        holders={OPENING: lambda: 0},  # nothing is removed until shipping and replicas have set what they need
        log_id=log_id,
        has_replicas=state_store is not None,
        on_lost=None if state_store is None else partial(state_store.note_lost, path.name),
        filesystem=held.filesystem,
        clock=held.clock,
    )
    resources.enter_context(log)
    store.follow(partial(getattr, log, "flushed_offset"))
    return log, store
