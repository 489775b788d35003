"""Standing by: a service waits beside its machine's node until it may lead, and then has an open outbox.

    promises.json: the newest grant ──┐
    the node: when the leader contacted it ├─▶ Standby (rules) ─▶ looks ─▶ the node hands the directory over
    the disk: is there room ──────────┘                             ─▶ Election, as a standby ─▶ Outbox.open ─▶ leads
                    ▲                                                        │ not enough, or another was faster
                    └────────────────────────────────────────────────────────┘

While it leads, Replication gives the lead up in time (`resign_in_time`). The directory is the node's `<data>/<outbox
id>`; `<data>` is enough if only one outbox of the topic lies there. The election decides who leads, not this module.
"""

import logging
import random
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple
from uuid import UUID

import pushrep.outbox.replication  # noqa: F401 - what takes over imports nothing: the files may be another release's
from pushrep.election.candidate import LEADER_ALIVE_MS, Purpose, StandbyElection
from pushrep.election.errors import CantStandBy, NotLeader, ReplicationError
from pushrep.election.grants import Grant
from pushrep.election.standby import Seen, Standby, StandbyState
from pushrep.env import REAL_FILESYSTEM, Clock, Filesystem
from pushrep.errors import BadArgument
from pushrep.log.directory_files import is_slot, log_name, slot_directories
from pushrep.log.disk import DiskLevel, disk_level
from pushrep.log.errors import AppendFailed, DirectoryIsCopy, LogLocked, LogPoisoned, NoRoomToCut
from pushrep.outbox.control import CallRefused, NobodyAnswers, ask
from pushrep.outbox.directory_handover import NOT_MADE, handed_over
from pushrep.outbox.errors import CommandRefused, OutboxDiffers, StandbyCancelled
from pushrep.outbox.kept_settings import read_kept
from pushrep.outbox.positions import PositionsFollower
from pushrep.outbox.promotion import cant_promote, election_in
from pushrep.outbox.settings import OutboxConfig, OutboxSettings
from pushrep.outbox.status import Facts, LeadingState, leading_state
from pushrep.replay.node_connection import NodeUnreachable
from pushrep.replicate.election_state import (
    NO_MEMBER,
    PROMISES_NAME,
    REPLICA_EPOCH_NAME,
    ElectionState,
    find_election_state,
)
from pushrep.status import Leads, Problem, Status

_LOG = logging.getLogger("pushrep.outbox")
_DIGITS = re.compile(r"[0-9.]+")
_POLL_S = 0.2
_WHY_CHARACTERS = 500  # of the reason sent to the node, whose line is limited
_ASK_NODE_S = 1.0
_LOGGED_AGAIN_MS = 60_000
_ROUND_S = (1.0, 2.0)
"""How long a standby asks for the lead at a time, from the least to the most: each member its own (`round_s`). While
it asks it holds the directory, so its node answers nobody. Of two standbys that ask at once, and need each other's
answer, the one with the shorter time gives the directory back to its node, which answers the other within its time."""
_PASSES = (
    ReplicationError, NodeUnreachable, CommandRefused, DirectoryIsCopy, LogLocked, LogPoisoned, AppendFailed,
    NoRoomToCut, OSError,
)  # fmt: skip
"""Errors that may pass: members that are away, an election that another won, a directory that is still in use, a disk
that refuses what this member lacks. While it stands by its node answers the others, of whom one may lead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingStatus(Status):
    """A service that stands by. It is not ready, and that is no problem: no alert fires."""

    kind: str = "standby"
    state: str = "standing by"
    why: str
    since_ms: int
    leader: Leads

    @property
    def leads(self) -> Leads:
        """See `Status`."""
        return self.leader

    def find_problems(self) -> Iterator[Problem]:
        yield Problem("not_leading", "service", self.why, self.since_ms)

    @property
    def problem_flags(self) -> Mapping[str, bool]:
        """See `Status`."""
        return {}


OpenGranted = Callable[[Path, Sequence[str], Grant], tuple[Facts, Callable[[], None]]]
OnState = Callable[[StandbyState, str], object]
"""Called with the state and the reason for it whenever either changes; it must not wait."""


def refuse_standby(directory: Path, config: OutboxConfig) -> None:
    """Refuse worker slots, and a number of members that the grant has. Raises BadArgument, CantStandBy."""
    if slot_directories(directory) or is_slot(directory):
        raise CantStandBy(
            "a worker slot is an outbox of this machine alone, which no other machine could lead. Let one process of "
            "each machine stand by, or make an outbox for each worker (pushrep outbox create), and let that stand by"
        )
    if config.min_insync_replicas is not None:
        raise BadArgument("min_insync_replicas", "the newest grant says how many members: leave it out")


class GrantedMember(NamedTuple):
    """The directory of a member, and its stored election state."""

    directory: Path
    outbox_id: UUID
    kept: ElectionState


def members_at(directory: Path, filesystem: Filesystem = REAL_FILESYSTEM) -> list[GrantedMember]:
    """The members' directories: `directory` itself, or those in a node's. Raises CorruptFile, OSError."""
    places = [directory]
    if filesystem.exists(directory / REPLICA_EPOCH_NAME):
        places += [directory / name for name in sorted(filesystem.list(directory)) if _is_id(name)]
    known = [(place, find_election_state(place, filesystem)) for place in places]
    found = [GrantedMember(place, *one) for place, one in known if one is not None]
    return [one for one in found if one.kept.grant is not None]


@dataclass(kw_only=True)
class WaitingMember:
    """One member that stands by, by the arguments of `Outbox.stand_by`.

    partitions, carrier: None for the grant's. cancel: when it is set, it waits no longer. open_outbox(directory, the
    other members' addresses, grant): opens the granted outbox; its facts, and what closes it.
    """

    directory: Path
    topic: str
    partitions: int | None
    carrier: str | None
    settings: OutboxSettings
    filesystem: Filesystem
    clock: Clock
    cancel: threading.Event
    on_state: OnState
    open_outbox: OpenGranted

    def __post_init__(self) -> None:
        self._rules = Standby(self.settings.config.takeover_times, random.randrange)
        self._heard_ms = self.clock.monotonic_ms()
        """When the node last had contact with the leader, by its last answer; before any answer: now."""
        self._shown = self._why = ""
        self._shown_ms = self.clock.wall_ms()
        self._logged_ms: dict[str, int] = {}
        self._is_fit = self._is_successor = False
        self._health = ExitStack()  # the health server
        self._serves_health = False
        self._why_silent = ""
        self._found: GrantedMember | None = None
        self._follower: PositionsFollower | None = None

    def run(self) -> None:
        """Wait until it leads, with the outbox open. Raises StandbyCancelled, CantStandBy, an opening's errors
        that do not pass.
        """
        try:
            self._run()
        finally:
            self._stop_following()
            self._health.close()

    def _run(self) -> None:
        self._serve_health()
        self._notify("")
        while not self.cancel.is_set():
            self._serve_health_again()
            found = self._found = self._find()
            why_not = self._rules.why_not_look(self._seen(found))
            self._notify(why_not or "")
            if found is not None and why_not is None:
                try:
                    self._take_over(found)
                except _PASSES as error:
                    self._rules.on_refused(self.clock.monotonic_ms())
                    self._notify(str(error))
                else:
                    return
            self._follow(found)
            self.cancel.wait(_POLL_S)
        raise StandbyCancelled(self.directory)

    def _follow(self, found: GrantedMember | None) -> None:
        """Read the logs' positions while it waits, so that opening takes less time."""
        if self._follower is None and found is not None and found.kept.grant is not None:
            topic, count, carrier = found.kept.grant.topic, found.kept.grant.partitions, found.kept.grant.carrier
            logs = [found.directory / log_name(topic, n) for n in range(count)]
            self._follower = PositionsFollower(logs, carrier, self.filesystem, self.clock)

    def _stop_following(self) -> None:
        if self._follower is not None:
            self._follower.stop()
            self._follower = None

    def _find(self) -> GrantedMember | None:
        """The directory of the granted outbox of this topic. Raises CantStandBy if there are two, OutboxDiffers."""
        found = [
            (one, one.kept.grant)
            for one in members_at(self.directory, self.filesystem)
            if one.kept.grant is not None and (one.directory == self.directory or one.kept.grant.topic == self.topic)
        ]
        if len(found) > 1:
            named = ", ".join(str(one.directory) for one, _ in found)
            raise CantStandBy(f"there are several outboxes of topic {self.topic}: name one of {named}")
        if not found:
            return None
        one, grant = found[0]
        self._check_same(one.directory / PROMISES_NAME, grant)
        return one

    def _check_same(self, kept_in: Path, grant: Grant) -> None:
        """Refuse before taking the lead what `open` would refuse afterwards."""
        for setting, stored, got in (
            ("topic", grant.topic, self.topic),
            ("partitions", grant.partitions, self.partitions),
            ("carrier", grant.carrier, self.carrier),
        ):
            if got not in {None, stored}:
                raise OutboxDiffers(kept_in, setting, stored=stored, got=got)

    def _seen(self, found: GrantedMember | None) -> Seen:
        clock, contact_age_ms = self.clock, self._contact_age_ms()
        if found is None:
            return Seen(clock.monotonic_ms(), None, NO_MEMBER, None)
        unfit = self._why_unfit(found)
        self._is_fit = not unfit
        return Seen(
            now_ms=clock.monotonic_ms(),
            grant=found.kept.grant,
            member=found.kept.member,
            contact_age_ms=contact_age_ms,
            unfit=unfit,
            wall_ms=clock.wall_ms(),
            is_successor=self._is_successor,
            has_handed_over=found.kept.is_handed_over,
        )

    def _contact_age_ms(self) -> int | None:
        """Ask the node and tell it this standby's state. If it does not answer: its last answer plus the time since."""
        now_ms, home = self.clock.monotonic_ms(), self.directory
        if self._found is not None or not self.filesystem.exists(home / REPLICA_EPOCH_NAME):
            home = (home if self._found is None else self._found.directory).parent
        outbox_id = NOT_MADE if self._found is None else self._found.outbox_id
        why = self._why[:_WHY_CHARACTERS]
        state = self._rules.state
        is_fit = self._is_fit and state is StandbyState.STANDING_BY
        arguments = {"outbox_id": str(outbox_id), "state": state.value, "why": why, "is_fit": is_fit}
        self._is_successor = False
        try:
            age_ms, self._is_successor = ask(home, "contact", arguments, timeout_s=_ASK_NODE_S)
        except (NobodyAnswers, CallRefused) as error:
            _LOG.debug("%s: its node does not say when the leader contacted it: %s", home, error)
        else:
            if age_ms is None:
                return None
            self._heard_ms = now_ms - age_ms
        return now_ms - self._heard_ms

    def _why_unfit(self, found: GrantedMember) -> str:
        kept = read_kept(self.filesystem, found.directory)
        limits = replace(self.settings.config.log_config, **kept).disk_limits
        usage = self.filesystem.usage(found.directory)
        is_full = disk_level(DiskLevel.ROOM, usage, limits) is DiskLevel.FULL
        return f"its own disk is too full: {usage.used_percent:.1f} % are used" if is_full else ""

    def _take_over(self, found: GrantedMember) -> None:
        grant = found.kept.grant
        config = self.settings.config
        assert grant is not None, "it was looked at before"
        self._stop_following()
        with handed_over(found.directory, found.outbox_id) as contact:
            with election_in(
                found.directory,
                found.outbox_id,
                contact_age_ms=contact.age_ms,
                leader_alive_ms=min(LEADER_ALIVE_MS, config.takeover_after_ms),
                push=config.push,
                log_config=config.log_config,
                filesystem=self.filesystem,
                clock=self.clock,
            ) as election:
                kept = election.state_store.kept.grant
                if kept is not None and kept.rank > grant.rank:  # it was stored after this one looked
                    raise NotLeader(kept.leader, kept.epoch)
                # The leader by the grant only renews its lead; if another has a newer grant, it stores that and
                # follows.
                purpose = Purpose.OPEN if grant.leader == election.index else Purpose.PROMOTE_AND_CATCH_UP
                clock, why_not = self.clock, self._rules.why_not_take_over
                standby = StandbyElection(
                    lambda shown: why_not(shown, clock.monotonic_ms(), clock.wall_ms()),
                    clock.wall_ms(),
                    self._rules.named_by,
                )
                patience_s = min(round_s(grant, election.index), config.open_timeout_s)
                granted = election.run(purpose, patience_s, standby=standby)
                self._become(StandbyState.TAKING_OVER)
                election.begin(granted)
            self._open(found.directory, granted)

    def _open(self, directory: Path, granted: Grant) -> None:
        others = [one.address for one in granted.members if one.index != granted.leader and one.address]
        self._health.close()  # from here on the outbox answers probes at the same address
        self._serves_health = False
        facts, close = self.open_outbox(directory, others, granted)
        replication = facts.replication
        if replication is None or not self._leads_soon(facts):
            close()
            if self.cancel.is_set():
                raise StandbyCancelled(self.directory)
            raise cant_promote(directory, "too few members answered while it was opened")
        self._become(StandbyState.LEADING)
        sink = facts.shipping.sink

        def lost(why: Exception) -> None:
            self._become(StandbyState.DEPOSED, str(why))
            if sink is not None:
                sink.close()

        replication.resign_in_time(self.settings.config.takeover_times, lost)

    def _leads_soon(self, facts: Facts) -> bool:
        """Wait up to open_timeout_s: a member is asked again, as another standby may have its directory."""
        until_ms = self.clock.monotonic_ms() + 1000 * self.settings.config.open_timeout_s
        while leading_state(facts)[0] is LeadingState.LOOKING and self.clock.monotonic_ms() < until_ms:
            if self.cancel.wait(_POLL_S):
                break
        return leading_state(facts)[0] is LeadingState.LEADING and not self.cancel.is_set()

    def _serve_health(self) -> None:
        """Answer probes while it stands by: alive, and not ready. Raises BadArgument, OSError."""
        if self._serves_health or (settings := self.settings.health) is None:
            return
        from pushrep.health import HealthServer  # noqa: PLC0415 - brings an HTTP server

        def status() -> WaitingStatus:
            state = self._rules.state.value
            certificates = {} if settings.cert is None else {"health": settings.expires_s()}
            return WaitingStatus(
                directory=str(self.directory),
                certificates=certificates,
                why=f"{state}: {self._why}" if self._why else state,
                since_ms=self._shown_ms,
                leader=self._leader(),
            )

        self._health.callback(HealthServer(settings, status).close)
        self._serves_health = True

    def _leader(self) -> Leads:
        """By the newest grant."""
        if self._found is None or (grant := self._found.kept.grant) is None:
            return Leads(is_here=False)
        address = next((one.address for one in grant.members if one.index == grant.leader), "")
        return Leads(is_here=False, member=grant.leader, address=address)

    def _serve_health_again(self) -> None:
        """After opening an outbox failed. If another process has the address, it stands by without, and tries again at
        each look.
        """
        try:
            self._serve_health()
        except (BadArgument, OSError) as error:
            if str(error) != self._why_silent:
                _LOG.warning("%s: it answers no probes: %s", self.directory, error)
            self._why_silent = str(error)

    def _become(self, state: StandbyState, why: str = "") -> None:
        self._rules.become(state)
        self._notify(why)

    def _notify(self, why: str) -> None:
        state = self._rules.state
        self._why = why
        shown = _DIGITS.sub("", f"{state.value}: {why}" if why else state.value)  # digits alone are no news
        if shown == self._shown:
            return
        self._shown, self._shown_ms = shown, self.clock.wall_ms()
        now_ms = self.clock.monotonic_ms()
        # One that looks in vain changes its state every second.
        is_news = now_ms - self._logged_ms.get(shown, now_ms - _LOGGED_AGAIN_MS) >= _LOGGED_AGAIN_MS
        self._logged_ms = {text: ms for text, ms in self._logged_ms.items() if now_ms - ms < _LOGGED_AGAIN_MS}
        if is_news:
            self._logged_ms[shown] = now_ms
        level = logging.INFO if is_news else logging.DEBUG
        _LOG.log(level, "%s: %s%s", self.directory, state.value, f": {why}" if why else "")
        try:
            self.on_state(state, why)
        except Exception:  # noqa: BLE001 - the caller's code
            _LOG.exception("on_state failed for the state %s", state.value)
        self._contact_age_ms()  # tells the node, which shows it


def round_s(grant: Grant, index: int) -> float:
    """How long a standby asks for the lead: each another time. The leader by the grant takes as long as the last of
    them.
    """
    standbys = sorted(grant.indexes - {grant.leader})
    least, most = _ROUND_S
    return least + (most - least) * standbys.index(index) / max(1, len(standbys) - 1) if index in standbys else most


def _is_id(name: str) -> bool:
    try:
        return str(UUID(name)) == name
    except ValueError:
        return False
