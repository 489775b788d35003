"""Promotion: a replica becomes the leader of all partitions of its outbox, by a command or a call.

    its node hands over ─▶ lock ─▶ Election: look and compare ─▶ number and grant on N - m + 1 members ─▶ compare again
                     ─▶ fetch (catch_up) ─▶ begin
                        with accept_loss, if fewer answer: a forced grant, which says what was accepted; another
                        generation and another PID epoch begin with what lies here

Afterwards the grant names this directory's member: the node leaves it closed, and the service opens its Outbox here,
with the other members as replicas. A promotion that stops half-way is safe: at worst nobody leads until the next one.
"""

import logging
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, TypeAlias
from uuid import UUID

from filtering.retry import Backoff, RetryPolicy
from pushrep.election.candidate import (
    LEADER_ALIVE_MS,
    Fetch,
    MemberAnswer,
    MemberLog,
    Purpose,
    leader_alive,
    why_outranked,
    why_twice,
)
from pushrep.election.epochs import common_end, without_unfenced
from pushrep.election.errors import (
    LogNotFit,
    NotAhead,
    RivalGenerations,
    TooFewMembers,
)
from pushrep.election.grants import (
    GENERATION_TAG_BITS,
    Grant,
    Member,
    base_of,
    default_min_insync,
    newest_of,
    next_ballot,
    next_generation,
)
from pushrep.env import REAL_FILESYSTEM, SYSTEM_CLOCK, Clock, Filesystem
from pushrep.log import LogConfig, SegmentLog
from pushrep.log.directory import LogDirectory
from pushrep.log.directory_files import log_name
from pushrep.log.directory_id import read_directory_id
from pushrep.log.errors import LogLocked, LogPoisoned
from pushrep.outbox.directory_handover import NEVER, handed_over
from pushrep.outbox.errors import CommandRefused
from pushrep.outbox.kept_settings import read_kept
from pushrep.replay.node_connection import NodeUnreachable
from pushrep.replicate.connecting import ReplicaClient
from pushrep.replicate.election import Election
from pushrep.replicate.election_state import ElectionStateStore, find_election_state
from pushrep.replicate.member_clients import tp_of
from pushrep.replicate.node_settings import NodeSettings
from pushrep.replicate.node_store import LastContact
from pushrep.replicate.repairing import Repairs
from pushrep.replicate.settings import PushSettings, Replica
from pushrep.replicate.sockets import Address
from pushrep.status.table import time_text
from pushrep.topic_id_partition import TopicIdPartition

_LOG = logging.getLogger("pushrep.outbox")
_PID_LEAP = 1 << 24
_SHOWN_PARTITIONS = 16
_Repair: TypeAlias = Callable[[Grant], tuple[tuple[str, ...], bool]]
VERIFY_S = 5.0
"""How long a promotion reads sealed segments at most: the service waits for a leader."""
_TAKE_S = 2.0  # how long to wait for the locks of a process that is just ending


class Granted(NamedTuple):
    """The grant to lead by. unreached: members that a forced grant did not reach and that are not given as lost. They
    are not fenced, and may take records until the grant reaches them; then all that they hold is kept aside. damaged:
    the damaged sealed segments that no other member could repair, each with the reason. is_read: whether all sealed
    segments could be read in `verify_s`.
    """

    grant: Grant
    unreached: tuple[int, ...] = ()
    damaged: tuple[str, ...] = ()
    is_read: bool = True


class Promotion(NamedTuple):
    """The result of a promotion; the partitions' logs, as they were when it began to lead."""

    granted: Granted
    logs: Mapping[int, MemberLog]

    @property
    def grant(self) -> Grant:
        return self.granted.grant

    @property
    def replicas(self) -> tuple[str, ...]:
        """The other members' addresses, as the service gives them as `replicas`; members without an address are left
        out.
        """
        others = (one for one in self.grant.members if one.index != self.grant.leader)
        return tuple(one.address for one in others if one.address)


def promote(  # noqa: PLR0913 - an operator's choices
    directory: Path | str,
    *,
    catch_up: bool = False,
    accept_loss: bool = False,
    lost: Collection[int] = (),
    new: Sequence[str] = (),
    depose: bool = False,
    leader_alive_ms: int = LEADER_ALIVE_MS,
    last_contact: LastContact | None = None,
    push: PushSettings | None = None,
    timeout_s: float = 5.0,
    verify_s: float = VERIFY_S,
    log_config: LogConfig | None = None,
    filesystem: Filesystem = REAL_FILESYSTEM,
    clock: Clock = SYSTEM_CLOCK,
) -> Promotion:
    """Make the member that lies in `directory` (a node's `<data>/<outbox id>`) the leader of its outbox.

    catch_up: fetch first what another member has more, instead of refusing. accept_loss: if fewer than N - m + 1
    members answer, lead all the same, in another generation: what the others hold is set aside when they meet it, and
    they are given everything that lies here. It also goes on here after RivalGenerations; where all members are copies
    (a site that was restored), of which this one holds the most; and where this one is damaged and all that is left:
    what lies behind the damage is kept as `.corrupt`. lost, with accept_loss: members that are destroyed, so that none
    of them will ever vote: they leave the list at once. new: "host:port" of nodes that come into it under new indexes,
    and are given everything by the Outbox that is opened here. depose: also from a leader that may be alive; else one
    that enough members were in contact with within `leader_alive_ms` is left alone. last_contact: with a leader, as
    `ReplicaNode.hand_over` returns it; a node in another process is asked. verify_s: once this member may lead, sealed
    segments are read for so long, to find damage; it is repaired from the others, and what they can't give is in
    `damaged`.
    Raises LeaderMayBeAlive, NotAhead (both pairs in it), TooFewMembers, LogNotFit, CantLead, DirectoryIsCopy before
    anything is changed; NotLeader or RivalGenerations if another leads, CommandRefused with what to do,
    CorruptFile, LogPoisoned, OSError.
    """
    directory = Path(directory)
    found = find_election_state(directory, filesystem)
    if found is None or found[1].grant is None:
        raise cant_promote(directory, "no outbox was ever led from or pushed to it: give <data>/<outbox id> of a node")
    outbox_id = found[0]
    with ExitStack() as stack:
        by_node = stack.enter_context(handed_over(directory, outbox_id))
        last_contact = last_contact or by_node
        election = stack.enter_context(
            election_in(
                directory,
                outbox_id,
                may_be_copy=accept_loss,
                contact_age_ms=last_contact.age_ms,
                leader_alive_ms=0 if depose else leader_alive_ms,
                push=push or PushSettings(),
                log_config=log_config,
                filesystem=filesystem,
                clock=clock,
            )
        )
        state_store, number = election.state_store, election.state_store.kept.number
        logs = {tp_of(log): log for log in election.logs.values()}
        repair = partial(_repair, logs, push or PushSettings(), verify_s, clock)
        losing = partial(
            with_loss,
            election,
            last_contact.wall_ms,
            catch_up=catch_up,
            timeout_s=timeout_s,
            repair=repair,
            may_be_damaged=True,
        )
        try:
            if lost or new:
                if not accept_loss:
                    raise cant_promote(directory, "members are only given up with --accept-loss")
                change = list_change(election, frozenset(lost), [str(Address.parse(one)) for one in new])
                done = losing(change=change)
            elif _original_of(election) is not None:
                done = losing()
            else:
                done = _granted(
                    election, losing if accept_loss else None, repair, catch_up=catch_up, timeout_s=timeout_s
                )
            held_logs = election.own().logs
            election.begin(done.grant)
            return Promotion(done, held_logs)
        except (LogNotFit, LogPoisoned, NodeUnreachable, TooFewMembers, OSError) as error:
            if state_store.kept.number == number:
                raise
            why = (
                f"{error}. Epoch {state_store.kept.number} was taken before that, and members that stored its grant "
                f"fence the leader until now: nobody leads. Run again: pushrep promote {directory} --catch-up"
                f"{' --accept-loss' if accept_loss else ''}"
            )
            raise cant_promote(directory, why) from error


def _granted(
    election: Election, losing: Callable[[], Granted] | None, repair: _Repair, *, catch_up: bool, timeout_s: float
) -> Granted:
    """Lead by the members' grant. losing: what to do if it fails before a number was taken; None: raise."""
    number = election.state_store.kept.number
    try:
        grant = election.run(Purpose.PROMOTE_AND_CATCH_UP if catch_up else Purpose.PROMOTE, timeout_s)
    except (LogNotFit, RivalGenerations, TooFewMembers):
        if losing is None or election.state_store.kept.number != number:
            raise
        return losing()
    damaged, is_read = repair(grant)
    return Granted(grant, damaged=damaged, is_read=is_read)


@contextmanager
def election_in(  # noqa: PLR0913 - whose, and what it asks with
    directory: Path,
    outbox_id: UUID,
    *,
    first: Grant | None = None,
    may_be_copy: bool = False,
    contact_age_ms: int | None,
    leader_alive_ms: int = LEADER_ALIVE_MS,
    push: PushSettings,
    log_config: LogConfig | None,
    filesystem: Filesystem,
    clock: Clock,
) -> Iterator[Election]:
    """The election of the member in `directory`, which its node has handed over; its logs are open until the end.

    first: the first grant, for an outbox that has none. may_be_copy: also in a copy whose original is lost; it is no
    copy any more once it leads.
    Raises CommandRefused, DirectoryIsCopy, CorruptFile, OSError.
    """
    with ExitStack() as stack:
        waiting = RetryPolicy(
            is_retriable=lambda error: isinstance(error, CommandRefused),
            backoff=Backoff(0.05, 0.05, least=1.0),
            within_s=_TAKE_S,
        )
        held = stack.enter_context(waiting.call(lambda: _open_directory(directory, filesystem, clock)))
        if not may_be_copy:
            held.refuse_copy()
        state_store = ElectionStateStore(directory, outbox_id, filesystem)
        state_store.set_logs_aside(held)
        grant = first or state_store.kept.grant
        assert grant is not None, "it was looked at before"
        logs = _open_logs(stack, held, grant, log_config, state_store)
        if may_be_copy:
            held.settle_id()
        yield Election(
            state_store, logs, push, clock=clock, contact_age_ms=contact_age_ms, leader_alive_ms=leader_alive_ms
        )
        if may_be_copy:
            held.forget_original()


def _repair(
    logs: Mapping[TopicIdPartition, SegmentLog], push: PushSettings, verify_s: float, clock: Clock, grant: Grant
) -> tuple[tuple[str, ...], bool]:
    """Read the sealed segments, repair them from the others: (what is still damaged and why, whether all were read).

    Opening a log checks its end alone, so damage in a follower would be found only when somebody reads it.
    """
    scrub, until_ms = next(iter(logs.values())).scrub, clock.monotonic_ms() + 1000 * verify_s
    passes = scrub.status.passes
    is_read = scrub.run_pass(lambda: clock.monotonic_ms() >= until_ms).passes > passes
    repairs = Repairs(grant.outbox_id, grant, logs)
    for one in grant.members:
        if one.index == grant.leader or not one.address or not scrub.status.findings:
            continue
        replica = Replica(one.index, Address.parse(one.address))
        try:
            with ReplicaClient(replica.address, push) as client:
                repairs.repair(replica, client, lambda: False)
        except NodeUnreachable as error:
            _LOG.warning("%s can repair nothing here: %s", replica, error)
    left = scrub.status.findings
    return tuple(f"{one.log}/{one.segment} from offset {one.offset} on: {one.reason}" for one in left), is_read


def _open_directory(directory: Path, filesystem: Filesystem, clock: Clock) -> LogDirectory:
    try:
        held = LogDirectory.acquire(directory, filesystem, clock)
    except LogLocked as error:
        raise cant_promote(directory, f"process {error.pid} has it open: end its service, or the node") from error
    if held.references > 1:
        held.release()
        raise cant_promote(directory, "this process has it open: close its Outbox, or use ReplicaNode.hand_over")
    return held


def _open_logs(
    stack: ExitStack, held: LogDirectory, grant: Grant, config: LogConfig | None, state_store: ElectionStateStore
) -> dict[int, SegmentLog]:
    # As Outbox.open will have it: retention by other settings would remove what is to be kept.
    logs, config = {}, replace(config or NodeSettings().log_config, **read_kept(held.filesystem, held.path))
    for number in range(grant.partitions):
        name = log_name(grant.topic, number)
        logs[number] = stack.enter_context(
            SegmentLog.open(
                held.path / name,
                config,
                log_id=grant.topic_id,
                has_replicas=True,
                on_lost=partial(state_store.note_lost, name),  # perhaps no node opened it since it lost records
                filesystem=held.filesystem,
                clock=held.clock,
            )
        )
    return logs


class Heard(NamedTuple):
    """What is known of a member that does not answer. contact_ms: wall clock; held: by partition, the offset below
    which it acknowledged everything to the leader here.
    """

    contact_ms: int = NEVER
    held: Mapping[int, int] = MappingProxyType({})


class ListChange(NamedTuple):
    """Members that are destroyed leave the list, nodes at `new` come into it, without the others' agreement.

    A destroyed member votes no more, so it counts like one that stored the new list. With those, m of the old list know
    the new one, and any N - m + 1 members that could still lead by the old list include one of these m.
    """

    lost: frozenset[int] = frozenset()
    new: Sequence[str] = ()

    @property
    def is_any(self) -> bool:
        """Whether the list changes."""
        return bool(self.lost or self.new)

    def of(self, base: Grant) -> tuple[tuple[Member, ...], int]:
        """The members and m of the new list."""
        if not self.is_any:
            return base.members, base.min_insync_replicas
        left = [one for one in base.members if one.index not in self.lost]
        coming = [Member(base.next_index + number, address) for number, address in enumerate(self.new)]
        members = (*left, *coming)
        return members, default_min_insync(len(members))

    def check_looked(self, directory: Path, base: Grant, own: int, found: Mapping[int, MemberAnswer]) -> None:
        """Check the answers before anything is stored. Raises CommandRefused, TooFewMembers."""
        answered = {index for index, one in found.items() if one.grant is not None and not one.is_unfilled}
        if alive := self.lost & answered:
            raise cant_promote(directory, f"member {min(alive)} answers: it is not lost")
        if self.is_any and (too_few := self._too_few(base, own, answered)) is not None:
            raise too_few

    def check_stored(
        self, directory: Path, base: Grant, own: int, answers: Mapping[int, MemberAnswer], grant: Grant
    ) -> None:
        """Check the answers before anybody leads by `grant`. Raises CommandRefused."""
        stored = {index for index, one in answers.items() if one.grant == grant}
        if self.is_any and (too_few := self._too_few(base, own, stored)) is not None:
            raise cant_promote(
                directory, f"the new list is stored here, but {too_few}. Then run the same command again"
            )

    def _too_few(self, base: Grant, own: int, answered: Collection[int]) -> TooFewMembers | None:
        """Why members that neither answered nor are said to be lost could still elect a leader by the old list."""
        return base.too_few_to_change({own, *answered, *self.lost})


_SAME_LIST = ListChange()


def list_change(election: Election, lost: frozenset[int], new: Sequence[str]) -> ListChange:
    """The change of the newest list that this member has stored. new: "host:port". Raises CommandRefused."""
    kept, directory = election.state_store.kept.grant, election.state_store.directory
    assert kept is not None, "it was looked at before"
    if kept.is_led_alone and kept.leader == election.index:  # an earlier try, perhaps not finished
        lost -= {index for index in lost if 0 <= index < kept.next_index} - kept.indexes
        new = [address for address in new if kept.index_at(address) < 0]
    if unknown := lost - kept.indexes:
        raise cant_promote(directory, f"there is no member {min(unknown)}, but {sorted(kept.indexes)}")
    if election.index in lost:
        raise cant_promote(directory, f"member {election.index} is this directory itself")
    for address in new:
        if (index := kept.index_at(address)) not in {-1, *lost}:
            raise cant_promote(directory, f"{address} is member {index} already")
    return ListChange(lost, new)


def with_loss(  # noqa: PLR0913 - what is accepted, and what it needs
    election: Election,
    last_contact_ms: int,
    *,
    catch_up: bool,
    timeout_s: float,
    repair: _Repair,
    change: ListChange = _SAME_LIST,
    heard: Mapping[int, Heard] = MappingProxyType({}),
    may_be_damaged: bool = False,
) -> Granted:
    """Force a grant although too few members answer. heard: what a leader here knows of members that are silent.

    may_be_damaged: nobody appends here, so records that this member lost, and that no answering one holds, may be given
    up. Raises LeaderMayBeAlive if one of them was in contact with it, NotAhead, NotLeader, LogNotFit, TooFewMembers if
    a list is changed that the others could still lead by.
    """
    kept = election.state_store.kept.grant
    assert kept is not None, "it was looked at before"
    found, own = election.describe_members(kept, timeout_s), election.own()
    found, newest_generation = _of_one_generation(kept, found)
    shown = [kept, *(answer.grant for answer in found.values())]
    base, newest = base_of(shown) or kept, newest_of(shown) or kept
    silent = base.indexes - {own.index, *found}
    alive = leader_alive(own.index, newest, {own.index: own, **found}, silent, election.leader_alive_ms)
    if alive is not None and alive.contacts:
        raise alive
    directory = election.state_store.directory
    original = _original_of(election)
    counting = {i for i, one in found.items() if one.counts and base.is_member(i, one.directory_id)}
    if original is not None and base.too_few_to_lead(counting) is None:
        raise cant_promote(
            directory, f"it is a copy, and members {sorted(counting)} lead without it: promote one of them"
        )
    _check_fit(own, counting if base.too_few_to_lead(counting) is None else (), may_be_damaged=may_be_damaged)
    change.check_looked(directory, base, own.index, found)
    members, least = change.of(base)
    coming = [one for one in members if one.index >= base.next_index]
    left = {index: one for index, one in {own.index: own, **found}.items() if index not in change.lost}
    looked = election.describe_new(coming, timeout_s) if coming else {}  # a leader asks those that are silent again
    if (is_twice := why_twice(left | looked)) is not None:
        raise is_twice
    epoch = next_ballot(election.index, max(answer.highest_epoch for answer in (own, *found.values())))
    compared = [index for index, one in found.items() if one.counts or original is not None]
    theirs = {index: found[index].logs for index in compared}
    fetches = _fetches(own, theirs, catch_up=catch_up, is_anothers=newest.leader != own.index)
    before = base.renewed(epoch, own.index)
    for fetch in fetches:  # before the others get the grant, which makes them set their logs aside
        election.fetch(fetch, before)
    damaged, is_read = repair(before)
    heard = {newest.leader: Heard(last_contact_ms), **heard}
    absent = {index: heard.get(index, Heard()) for index in base.indexes - {own.index, *found}}
    accepted = _loss(election, last_contact_ms, absent, found)
    members = tuple(replace(one, directory_id=own.directory_id) if one.index == own.index else one for one in members)
    reached = {index for index, one in found.items() if base.is_member(index, one.directory_id)}
    grant = replace(
        base.forced(
            epoch,
            own.index,
            next_generation(newest_generation, secrets.randbits(GENERATION_TAG_BITS)),
            members=members,
            min_insync_replicas=least,
            reached=reached,
        ),
        accepted_loss=accepted,
        # Readers may have seen offsets that the others assigned. They will name other records, so the PID is another.
        pid_epoch=base.pid_epoch + 1 + secrets.randbelow(_PID_LEAP),
    )
    election.store(grant)
    election.give_up_lost()  # not earlier: until the grant is stored this member must not count as whole
    answers = election.offer(grant, timeout_s)
    _check_none_newer(grant, answers)
    change.check_stored(directory, base, own.index, answers, grant)
    _LOG.error("%s leads without %s", directory, accepted)
    stored = {index for index, answer in answers.items() if answer.grant == grant}
    unreached = tuple(sorted(base.indexes - {own.index, *stored, *change.lost}))
    return Granted(grant, unreached, damaged, is_read)


def _check_none_newer(grant: Grant, answers: Mapping[int, MemberAnswer]) -> None:
    for answer in answers.values():
        if answer.grant is not None and (why_not := why_outranked(grant, answer.grant)) is not None:
            raise why_not


def _of_one_generation(kept: Grant, found: Mapping[int, MemberAnswer]) -> tuple[dict[int, MemberAnswer], int]:
    """The answers of this directory's own generation, and the newest generation that any answer showed.

    Raises NotLeader if a newer one leads: then this directory has nothing to bring back. Answers of a rival are left
    out: the operator has chosen this generation over it.
    """
    shown = [one.grant for one in found.values() if one.grant is not None]
    newest = newest_of([kept, *shown]) or kept
    outranked = why_outranked(kept, newest) if newest.generation != kept.generation else None
    if outranked is not None and not isinstance(outranked, RivalGenerations):
        raise outranked
    same = {index: one for index, one in found.items() if one.grant is None or one.grant.generation == kept.generation}
    return same, newest.generation


def _original_of(election: Election) -> UUID | None:
    found, _ = read_directory_id(election.state_store.directory, election.state_store.filesystem)
    return found.copy_of[-1] if found is not None and found.is_copy else None


def _fetches(
    own: MemberAnswer, others: Mapping[int, Mapping[int, MemberLog]], *, catch_up: bool, is_anothers: bool
) -> list[Fetch]:
    """What has to be cut and fetched. is_anothers: another member led since, so records that are unfenced here are kept
    aside.
    """
    fetches = []
    for partition, log in own.logs.items():
        held = [(logs[partition], index) for index, logs in others.items() if partition in logs]
        theirs, index = max(held, key=lambda pair: pair[0].granted, default=(log, own.index))
        kept = without_unfenced(log.log, log.unfenced)
        if theirs.granted <= log.granted:
            if is_anothers and log.unfenced is not None:
                fetches.append(Fetch(partition, own.index, kept.log_end_offset, log.granted))
            continue
        if not catch_up:
            raise NotAhead(partition=partition, own=log.granted, member=index, theirs=theirs.granted)
        at = common_end(kept, without_unfenced(theirs.log, theirs.unfenced))
        if at < max(log.high_watermark, theirs.log.log_start_offset):
            raise LogNotFit(partition, f"it agrees with member {index} only up to {at}: promote that one")
        fetches.append(Fetch(partition, index, at, theirs.granted))
    return fetches


def _loss(
    election: Election, last_contact_ms: int, absent: Mapping[int, Heard], found: Mapping[int, MemberAnswer]
) -> str:
    """What may be lost: which members are absent, and how far this log and those of all members are known to go, each
    with its last contact to a leader; what this member itself lost; for a copy, what its original may hold.
    """
    parts = [f"members {sorted(absent)}", f"last contact with a leader {_time_shown(last_contact_ms)}"]
    own = sorted(election.own().logs.items())
    parts += _ends_shown((number, log.high_watermark, log.log.log_end_offset) for number, log in own)
    for index, heard in sorted(absent.items()):
        parts.append(f"member {index} does not answer: last contact {_time_shown(heard.contact_ms)}")
        parts += _ends_shown((number, "unknown", end) for number, end in sorted(heard.held.items()))
        parts += [] if heard.held else ["high watermark and log end unknown"]
    for index, answer in sorted(found.items()):
        age_ms = answer.contact_age_ms
        parts.append(f"member {index}: last contact {'none' if age_ms is None else f'{age_ms / 1000:.1f} s ago'}")
        logs = sorted(answer.logs.items())
        parts += _ends_shown((number, log.high_watermark, log.log.log_end_offset) for number, log in logs)
    for partition, log in own:
        if log.why_unfit is not None:
            end = "" if log.held_to is None else f", of {log.held_to.end_offset}"
            parts.append(f"partition {partition}: lost here from offset {log.log.log_end_offset} on{end}")
    if (original := _original_of(election)) is not None:
        parts.append(f"what directory {original.hex} took after it was copied to here")
    return "; ".join(parts)


def _check_fit(own: MemberAnswer, leading: Collection[int], *, may_be_damaged: bool) -> None:
    """leading: the others, if they are enough to lead without this member. Raises LogNotFit."""
    for partition, log in own.logs.items():
        if log.why_unfit is not None and leading:
            raise LogNotFit(partition, log.why_unfit, f"members {sorted(leading)} lead without it: promote one of them")
        if log.why_unfit is not None and not may_be_damaged:
            raise LogNotFit(partition, log.why_unfit)


def cant_promote(directory: Path, why: str) -> CommandRefused:
    """The error for a directory that can't be made the leader as it is; `why` says what to do."""
    return CommandRefused(f"{directory} can't be promoted: {why}")


def _time_shown(wall_ms: int) -> str:
    return "unknown" if wall_ms == NEVER else time_text(wall_ms)


def _ends_shown(ends: Iterable[tuple[int, int | str, int]]) -> list[str]:
    listed = [f"partition {number}: high watermark {hwm}, log end {end}" for number, hwm, end in ends]
    more = [f"and {len(listed) - _SHOWN_PARTITIONS} more partitions"] if len(listed) > _SHOWN_PARTITIONS else []
    return listed[:_SHOWN_PARTITIONS] + more
