"""Changing the members of an open outbox, one at a time, step by step: the caller repeats the call until it is done.

    add     CATCHING_UP ──it holds all below HWM: joint grant──▶ SETTLING ──may_settle: the new list──▶ DONE
            └─remove, or another change a minute after the last step: it gets nothing more──▶ DONE
    remove                                         joint grant──▶ SETTLING ──may_settle: the new list──▶ DONE
    replace_lost                                  forced grant──▶ SETTLING ──may_settle: the new list──▶ DONE

A step takes as long as a round of grants at most. The caller may stop at any step: before the joint grant nothing has
changed, and a joint grant that was not settled is settled by the next step of any change. A new member counts in N once
it holds everything below the high watermark. Its index is one that no member of the outbox ever had
(`Grant.next_index`).

These are calls of the control socket, as is what else an open outbox answers there (`calls_of`):

    status       {"first": 0, "count": 1000}         OutboxStatus.as_dict() with these partitions, at most 1,000
    add-member, remove-member                        one step of the change
    skip         {"partition", "offset", "reason"}   true: the record is not shipped to Kafka
    skip-all     {"topic"}                           true: nothing is kept for it any more; refused for the topic that
                                                     is shipped to
    set          {"changes", "deleted"}              the settings of the logs that were changed so, by name
    purge        {"partition", "before_offset", "before_ms", "dry_run"}   what was removed, by log
    hold         {"for_ms", "reason"}                until when no standby takes over by itself, wall clock, ms
    transfer     {"to"}                              the member that the lead is handed over to; null: chosen here
    give-up      {}                                  true: the slot is shipped for others only, and is closed now

An outbox on a file system without sockets (a network share, say, or a simulated disk) opens without a control socket:
its records matter more.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pushrep.election.errors import TooFewMembers
from pushrep.election.grants import BALLOT_STRIDE, Grant, Member, default_min_insync, next_ballot
from pushrep.election.standby import MEMBERS_MIN
from pushrep.env import Filesystem, RealFilesystem
from pushrep.errors import checked_timeout
from pushrep.outbox.batch import Receipt
from pushrep.outbox.control import Calls, ControlServer
from pushrep.outbox.destinations import SkippedRecords, purge_open
from pushrep.outbox.errors import CommandRefused
from pushrep.outbox.kept_settings import Kept
from pushrep.outbox.slots import give_up
from pushrep.outbox.status import Facts, status_of
from pushrep.replicate.sockets import Address
from pushrep.settings import printable_text, whole_number
from pushrep.status.value import Sample
from pushrep.wire.error_codes import ErrorCode

if TYPE_CHECKING:
    from pushrep.outbox.replication import Replication

_LOG = logging.getLogger("pushrep.outbox")


class Phase(Enum):
    """How far a change is."""

    CATCHING_UP = "catching up"
    """The new member is pushed to, and has no vote yet."""
    SETTLING = "settling"
    """A joint grant holds: majorities of both lists are needed."""
    DONE = "done"
    """The new list alone."""


class MembershipStep(NamedTuple):
    """The result of a step. member: the index of the one that is added or removed. warning: for the operator."""

    phase: Phase
    member: int
    members: tuple[Member, ...]
    min_insync_replicas: int
    warning: str = ""

    def as_dict(self) -> dict[str, Any]:
        """As values of JSON."""
        members = [{"index": one.index, "address": one.address} for one in self.members]
        return {**self._asdict(), "phase": self.phase.value, "members": members}


def add_member(
    facts: Facts,
    address: str,
    min_insync_replicas: int | None = None,
    *,
    replaced: int | None = None,
    wait_s: float | None = None,
) -> MembershipStep:
    """One step towards adding a member that listens at `address`.

    min_insync_replicas: of the new list; None: as it was, the default where that was the default. replaced: the member
    that the new one replaces, which is removed afterwards. An address in the list is refused then, except this member's
    own with a new directory, which becomes a member with a new index. wait_s: how long the step waits for members that
    do not answer or are not in sync; None: open_timeout_s. Raises
    CommandRefused, BadGrant, TooFewMembers, NotLeader, NotEnoughReplicas, BadArgument.
    """
    checked_timeout(wait_s)
    replication = _replication(facts)
    for name, number in (("min_insync_replicas", min_insync_replicas), ("replaced", replaced)):
        if number is not None:
            whole_number(name, number)
    address = str(Address.parse(address))
    with replication.step_lock, _way_back(facts, "HOST:PORT"):
        return _add(replication, address, min_insync_replicas, replaced, wait_s=wait_s)


def remove_member(
    facts: Facts,
    index: int,
    min_insync_replicas: int | None = None,
    *,
    no_standbys: bool = False,
    wait_s: float | None = None,
) -> MembershipStep:
    """One step towards removing member `index`; a node that was still to become it is dropped at once.

    no_standbys: also where too few are left for standbys. wait_s: as `add_member`'s, which raises the same.
    """
    checked_timeout(wait_s)
    replication = _replication(facts)
    whole_number("index", index)
    with replication.step_lock, _way_back(facts, "HOST:PORT"):
        return _remove(replication, index, min_insync_replicas, no_standbys=no_standbys, wait_s=wait_s)


def replace_lost(facts: Facts, address: str, lost: Collection[int]) -> MembershipStep:
    """One step towards a list in which a member at `address` replaces those of `lost`, whose directories are destroyed.

    For when the others are too few to agree to a change: it is made without them, and another generation and another
    PID begin. Raises CommandRefused if they are enough, or if a member of `lost` answers, and as
    `add_member`; nothing was changed then.
    """
    replication = _replication(facts)
    address = str(Address.parse(address))
    with replication.step_lock, _way_back(facts, address, lost):
        return _replace_lost(replication, address, frozenset(lost))


@contextmanager
def _way_back(facts: Facts, address: str, lost: Collection[int] = ()) -> Iterator[None]:
    """Where too few members answer, add to the error the command for the case that the silent ones are destroyed."""
    try:
        yield
    except TooFewMembers as error:
        alive = _replication(facts).who_answers()
        silent = [one for one in error.silent if one not in alive]
        counts_not = [one for one in error.silent if one in alive]
        why = f"{error.answered} of {error.needed} needed members count"
        why += f"; {counts_not} answer, and do not count before they hold everything" if counts_not else ""
        why += f"; {silent} do not answer: bring them back, and run the same command again" if silent else ""
        gone = sorted({*lost, *silent[: error.needed - error.answered]})
        raise CommandRefused(
            f"{why}{_way_without(facts.directory, gone, address, first=min(lost, default=-1))}"
        ) from error


def _way_without(directory: Path, gone: Sequence[int], address: str, *, first: int = -1) -> str:
    """The command for members that do not answer, if they are destroyed."""
    if not gone:
        return ""
    named = " ".join(f"--lost {one}" for one in gone)
    at = first if first >= 0 else gone[0]
    return f". If they are destroyed: pushrep replica replace {directory} {at} {address} {named}"


def _replace_lost(replication: "Replication", address: str, lost: frozenset[int]) -> MembershipStep:
    kept = replication.kept_grant
    if kept is None or not lost:
        raise CommandRefused("name the members that are lost, of an outbox that was led before. Nothing was changed")
    gone = {index for index in lost if 0 <= index < kept.next_index} - kept.indexes
    index = kept.index_at(address)
    if gone == lost and index >= 0:  # an earlier call did that
        grant = _settled_or_settling(replication)
        return _settling(replication, index, grant)
    for one in sorted(lost):
        _check_replaced(kept, one)
    is_coming = index in _new_of(kept)  # by a change that can never be settled
    if index >= 0 and index not in lost and not is_coming:
        known = next(one for one in (*kept.members, *kept.previous_members) if one.index == index)
        raise CommandRefused(_why_not_in_the_place_of(min(lost), known))
    done = replication.replace_lost(lost, () if is_coming else (address,))
    grant = done.grant
    warning = f"accepted loss: without {grant.accepted_loss}"
    if done.unreached:
        warning += (
            f"; members {list(done.unreached)} were not reached, so they are not fenced: what they hold is set aside"
        )
    index = grant.index_at(address)
    _LOG.error("member %d (%s) comes in the place of %s: %s", index, address, sorted(lost), warning)
    return _step(Phase.SETTLING, index, grant)._replace(warning=warning)


def _add(
    replication: "Replication",
    address: str,
    min_insync_replicas: int | None,
    replaced: int | None = None,
    *,
    wait_s: float | None,
) -> MembershipStep:
    coming = _new_of(replication.grant)  # read before this step, which may settle it
    grant = _settled_or_settling(replication, wait_s, address)
    known = next((one for one in grant.members if one.address == address), None)
    if known is not None and known.index == replaced and known.index not in coming:
        grant, known = _without_address(replication, grant, known), None
    if known is not None:
        if replaced is not None and known.index not in coming:
            raise CommandRefused(_why_not_in_the_place_of(replaced, known))
        return _settling(replication, known.index, grant)
    if grant.previous_members:
        return _settling(replication, _changing(grant), grant)  # another change is not settled yet
    if replaced is not None:
        _check_replaced(grant, replaced)  # before anything is added, because the list would grow, and m with it
    learners = replication.learners
    index = next((index for index, at in learners.items() if at == address), None)
    if index is None:
        index = max(grant.next_index, *(1 + one for one in learners), 0)
        if index >= BALLOT_STRIDE:
            raise CommandRefused(f"all {BALLOT_STRIDE} indexes have been used; an outbox never uses one again")
        replication.push_to(index, address)
    replication.want_learner(index)
    trouble = "" if (leading := replication.leading) is None else leading.troubles().get(index, "")
    if ErrorCode.MEMBER_TWICE.name in trouble:
        replication.stop_pushing_to(index)
        raise CommandRefused(f"{address} can't be another member: {trouble}")
    if not replication.has_caught_up(index):
        return _step(Phase.CATCHING_UP, index, grant)
    joint = _change(replication, grant, _with(Member(index, address), None, min_insync_replicas), wait_s)
    replication.forget_learner(index)
    _LOG.info("member %d (%s) was added by the grant of epoch %d", index, address, joint.epoch)
    return _step(Phase.SETTLING, index, joint)


def _without_address(replication: "Replication", grant: Grant, known: Member) -> Grant:
    """A grant without the address of `known`, so that its node may become another member.

    Only if the node there has a new directory; raises CommandRefused before anything is changed.
    """
    _check_replaced(grant, known.index)
    if not replication.shows_another_directory(known.index) or grant.previous_members:
        raise CommandRefused(_why_not_in_the_place_of(known.index, known))
    others = frozenset(grant.indexes - {known.index})
    if grant.too_few_to_change(others) is not None:
        raise CommandRefused(
            f"the other {len(others)} of the members are too few to agree to a list without member {known.index}. It "
            "needs no command: it is given everything again, and comes in by itself. Nothing was changed"
        )
    silent = replication.stop_addressing(known.index)
    _LOG.info("member %d is addressed no more since the grant of epoch %d", known.index, silent.epoch)
    return silent


def _check_replaced(grant: Grant, replaced: int) -> None:
    if replaced == grant.leader:
        raise CommandRefused(
            f"member {replaced} leads: promote another one first, then replace it there. Nothing was changed"
        )
    if all(one.index != replaced for one in grant.members):
        raise CommandRefused(f"there is no member {replaced}, but {_names(grant.members)}. Nothing was changed")


def _remove(
    replication: "Replication",
    index: int,
    min_insync_replicas: int | None,
    *,
    no_standbys: bool,
    wait_s: float | None,
) -> MembershipStep:
    grant = _settled_or_settling(replication, wait_s)
    if index == grant.leader:
        raise CommandRefused(f"member {index} leads: promote another one first, then remove it there")
    if index in replication.learners:
        replication.stop_pushing_to(index)
        _LOG.info("node %d is to become no member: nothing more is pushed to it", index)
        return _step(Phase.DONE, index, grant)
    if all(one.index != index for one in (*grant.members, *grant.previous_members)):
        if not 0 <= index < grant.next_index:
            raise CommandRefused(f"there is no member {index}, but {_names(grant.members)}")
        return _step(Phase.DONE, index, grant)
    if grant.previous_members:
        return _settling(replication, index, grant)
    if len(grant.members) <= MEMBERS_MIN and replication.has_standbys and not no_standbys:
        raise CommandRefused(
            f"{len(grant.members) - 1} members would be left, and standbys need {MEMBERS_MIN}: nobody would take over. "
            f"Add one first: pushrep replica add {replication.directory} HOST:PORT. Without standbys: pushrep replica "
            f"remove {replication.directory} {index} --no-standbys. Nothing was changed"
        )
    joint = _change(replication, grant, _with(None, index, min_insync_replicas), wait_s)
    _LOG.info("member %d was removed by the grant of epoch %d", index, joint.epoch)
    return _step(Phase.SETTLING, index, joint)


def _replication(facts: Facts) -> "Replication":
    if facts.replication is None:
        raise CommandRefused(
            "this outbox has no replicas: open it with replicas=['HOST:PORT'], or pushrep append --replica HOST:PORT, "
            "to give it the first ones"
        )
    return facts.replication


def _settled_or_settling(replication: "Replication", wait_s: float | None = None, address: str = "") -> Grant:
    """The current grant; a change that is not settled is settled first, if it can be. A node that another change was to
    add, with which nobody goes on, is dropped; the one at `address` is taken up.
    """
    for index in replication.left_learners:
        if replication.learners.get(index) != address:
            replication.stop_pushing_to(index)
            _LOG.warning("node %d is to become no member: nobody goes on with its change", index)
    grant = replication.grant
    if grant is None:
        raise replication.too_few or CommandRefused("it does not lead now: their list can't change. Try again")
    if grant.previous_members and replication.may_settle:
        grant = replication.change_members(lambda newest, epoch: newest.settled(epoch), wait_s=wait_s)
        _LOG.info("the members are %s since the grant of epoch %d", _names(grant.members), grant.epoch)
    return grant


def _change(
    replication: "Replication", grant: Grant, change: Callable[[Grant, int], Grant], wait_s: float | None
) -> Grant:
    change(grant, next_ballot(grant.leader, grant.epoch))  # refuse a bad change before appends are paused
    return replication.change_members(change, wait_s=wait_s)


def _with(new: Member | None, gone: int | None, min_insync_replicas: int | None) -> Callable[[Grant, int], Grant]:
    def change(newest: Grant, epoch: int) -> Grant:
        members = tuple(one for one in newest.members if one.index != gone) + (() if new is None else (new,))
        least = min_insync_replicas
        if least is None and newest.min_insync_replicas != default_min_insync(len(newest.members)):
            least = min(newest.min_insync_replicas, len(members))
        return newest.with_members(epoch, members, least)

    return change


def _new_of(grant: Grant | None) -> frozenset[int]:
    """The new members of a change that is not settled."""
    if grant is None:
        return frozenset()
    before = {one.index for one in grant.previous_members}
    return frozenset(one.index for one in grant.members if before and one.index not in before)


def _why_not_in_the_place_of(replaced: int, known: Member) -> str:
    if known.index == replaced:
        return (
            f"{known.address} is member {replaced} itself, and shows no new directory. Behind a new disk it needs no "
            "command: its node begins with an empty directory, is given everything again, and counts for nothing "
            "before. Nothing was changed"
        )
    return (
        f"{known.address} is member {known.index} already, so the list would only become shorter. If that is meant, or "
        f"was added for it before: pushrep replica remove DIRECTORY {replaced}. Nothing was changed"
    )


def _changing(grant: Grant) -> int:
    lists = ({one.index for one in grant.members}, {one.index for one in grant.previous_members})
    return next(iter(lists[0] ^ lists[1]), grant.leader)


def _settling(replication: "Replication", index: int, grant: Grant) -> MembershipStep:
    """The step of a change that is settled, or waits for members; with a warning if it waits for silent ones."""
    if not grant.previous_members:
        return _step(Phase.DONE, index, grant)
    silent = sorted(one for one in grant.indexes - {grant.leader} if replication.is_silent(one))
    warning = ""
    if grant.too_few_to_change(grant.indexes - {*silent}) is not None:
        way_out = _way_without(replication.directory, silent, "HOST:PORT")
        warning = f"members {silent} do not answer, and too few others are left to finish the change{way_out}"
    return _step(Phase.SETTLING, index, grant)._replace(warning=warning)


def _step(phase: Phase, index: int, grant: Grant) -> MembershipStep:
    return MembershipStep(phase, index, grant.members, grant.min_insync_replicas)


def _names(members: tuple[Member, ...]) -> str:
    return ", ".join(f"{one.index} ({one.address or 'the leader'})" for one in sorted(members))


PARTITIONS_AT_ONCE = 1000
_REASON_CHARACTERS = 500
Append = Callable[..., Receipt]


def serve_control(resources: ExitStack, facts: Facts, filesystem: Filesystem, append: Append) -> None:
    """Answer control calls from now on. `resources` ends this before anything that was opened earlier. append: the
    outbox's.
    """
    if not isinstance(filesystem, RealFilesystem):
        return
    try:
        server = ControlServer(facts.directory, lambda _: calls_of(facts, append))
    except OSError as error:
        _LOG.warning(
            "%s has no control socket, so commands can't reach it while it is open: %s", facts.directory, error
        )
        return
    resources.callback(server.close)


def calls_of(facts: Facts, append: Append) -> Calls:
    """The calls, by name."""
    return {name: partial(call, facts) for name, call in _CALLS.items()} | {
        "parked-resend": lambda given: facts.shipping.resend_parked(given["numbers"], append)
    }


def _hold(facts: Facts, arguments: Mapping[str, Any]) -> int | None:
    for_ms, reason = whole_number("for_ms", arguments.get("for_ms", 0)), arguments.get("reason", "")
    if reason or for_ms:
        printable_text("reason", reason, _REASON_CHARACTERS)
    if facts.replication is None:
        raise CommandRefused("this outbox has no replicas: nobody stands by")
    hold = facts.replication.hold_takeovers(for_ms, reason).hold
    return None if hold is None else hold.until_ms


def _metrics(facts: Facts) -> list[Sample]:
    from pushrep.status.metrics import samples_of  # noqa: PLC0415 - all workers have a health server, which loaded it

    return list(samples_of(status_of(facts)))


def _transfer(facts: Facts, to: int | None = None) -> int:
    if to is not None:
        whole_number("to", to)
    return _replication(facts).transfer(to, facts.settings.config.close_timeout_s)


def _set(facts: Facts, changes: Mapping[str, Any], deleted: Sequence[str]) -> Kept:
    logs, count = [one.log for one in facts.appenders], facts.identity.partitions
    return facts.kept_settings.change(logs[:count], logs[count:], changes, deleted)


def _status(facts: Facts, arguments: Mapping[str, Any]) -> dict[str, Any]:
    first, count = (whole_number(name, arguments.get(name, 0)) for name in ("first", "count"))
    return status_of(facts, range(first, first + min(count, PARTITIONS_AT_ONCE))).as_dict()


_CALLS: Mapping[str, Callable[[Facts, Mapping[str, Any]], Any]] = {
    "status": _status,
    "metrics": lambda facts, _: _metrics(facts),
    "add-member": lambda facts, given: add_member(facts, **given).as_dict(),
    "remove-member": lambda facts, given: remove_member(facts, **given).as_dict(),
    "replace-lost": lambda facts, given: replace_lost(facts, **given).as_dict(),
    "hold": _hold,
    "transfer": lambda facts, given: _transfer(facts, **given),
    "skip": lambda facts, given: facts.shipping.skip(SkippedRecords(**given["records"]), given.get("topic")),
    "parked-done": lambda facts, given: facts.shipping.finish_parked(given["numbers"]),
    "skip-all": lambda facts, given: facts.shipping.drop(**given),
    "set": lambda facts, given: _set(facts, **given),
    "purge": lambda facts, given: purge_open(facts.logs, given),
    "give-up": lambda facts, _: give_up(facts.directory),
}
