"""Making an outbox that several members may lead: its id, its first list of members, its logs, before any service runs.

    <data>/<new id> ─ empty logs, promises.json: member 0 ─▶ every member shows who it is ─▶ first grant, to all of them

Member 0 is the node on whose machine the command runs. The first grant names it the leader, so its instance leads first
if it runs. If the command stops before the grant is stored here, no outbox exists. From then on it exists: other
members may have stored the grant, and the first member's instance offers it again.
"""

import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from uuid import UUID, uuid4

from pushrep.election.candidate import Purpose
from pushrep.election.grants import Grant, Member, default_min_insync, next_ballot
from pushrep.election.standby import check_standby
from pushrep.env import REAL_FILESYSTEM, SYSTEM_CLOCK
from pushrep.errors import PushrepError
from pushrep.log.directory import LogDirectory, create_logs
from pushrep.log.directory_files import log_name
from pushrep.outbox.directory_handover import handed_over
from pushrep.outbox.errors import CommandRefused
from pushrep.outbox.identity import new_identity
from pushrep.outbox.promotion import election_in
from pushrep.outbox.standby import members_at
from pushrep.replicate.connecting import ReplicaClient
from pushrep.replicate.election_state import (
    REPLICA_EPOCH_NAME,
    ElectionState,
    ElectionStateStore,
    find_election_state,
)
from pushrep.replicate.settings import PushSettings
from pushrep.replicate.sockets import Address
from pushrep.wire.error_codes import ErrorCode
from pushrep.wire.push_messages import DescribeLogRequest, DescribeLogResponse


def create_outbox(  # noqa: PLR0913 - what is fixed
    data: Path | str,
    members: Sequence[str],
    topic: str,
    partitions: int = 1,
    *,
    carrier: str = "key",
    min_insync_replicas: int | None = None,
    another: bool = False,
    push: PushSettings | None = None,
    timeout_s: float = 5.0,
) -> Grant:
    """Make an outbox whose members are these nodes ("host:port"), and return its first grant, which all of them stored.

    data: the directory of the first member's running node. min_insync_replicas: None for more than half. another: make
    it although there is an outbox of this topic; then every instance has to name its directory.
    Raises CommandRefused, CantStandBy, BadArgument, and what leading raises. Nothing is left here then, except where
    the first grant was offered to others already: the message says so.
    """
    data = Path(data)
    if not (data / REPLICA_EPOCH_NAME).exists():
        raise _refused(data, "it is no node's directory: start `pushrep replica serve` there first")
    existing = [
        one.directory for one in members_at(data) if one.kept.grant is not None and one.kept.grant.topic == topic
    ]
    if existing and not another:
        made = f"an outbox of topic {topic} is made already: {existing[0]}. Its instances lead it once they run"
        raise _refused(data, f"{made}; for one more of that topic give --another, and each instance its directory")
    addresses = [str(Address.parse(one)) for one in members]
    if len(set(addresses)) != len(addresses):
        raise _refused(data, f"give each member once: {', '.join(addresses)}")
    new_identity(producer="any", topic=topic, partitions=partitions, carrier=carrier)  # refuses nonsense
    epoch = next_ballot(0, -1)
    first = Grant(
        outbox_id=uuid4(),
        epoch=epoch,
        leader=0,
        members=tuple(Member(index, address) for index, address in enumerate(addresses)),
        min_insync_replicas=min_insync_replicas or default_min_insync(len(addresses)),
        members_epoch=epoch,
        pid_epoch=0,
        topic_id=uuid4(),
        topic=topic,
        partitions=partitions,
        carrier=carrier,
    )
    check_standby(first)
    directory = data / str(first.outbox_id)
    try:
        return _created(directory, first, push or PushSettings(), timeout_s)
    except BaseException as error:
        found = find_election_state(directory, REAL_FILESYSTEM)
        if found is None or found[1].grant is None:
            shutil.rmtree(directory, ignore_errors=True)
        elif isinstance(error, PushrepError | OSError):
            why = f"{error}. The first grant was given out, so {directory} stays: its instance offers it again"
            raise _refused(data, why) from error
        raise


def _created(directory: Path, first: Grant, push: PushSettings, timeout_s: float) -> Grant:
    own_id = _prepared(directory, first)
    _check_address(directory, first, own_id, push)
    with ExitStack() as stack:
        stack.enter_context(handed_over(directory, first.outbox_id))
        election = stack.enter_context(
            election_in(
                directory,
                first.outbox_id,
                first=first,
                contact_age_ms=None,
                push=push,
                log_config=None,
                filesystem=REAL_FILESYSTEM,
                clock=SYSTEM_CLOCK,
            )
        )
        shown = election.describe_members(first, timeout_s)
        if silent := first.indexes - {0} - shown.keys():
            names = ", ".join(f"{one.index} ({one.address})" for one in first.members if one.index in silent)
            raise _refused(directory.parent, f"every member has to answer at first, and {names} did not")
        if nameless := sorted(index for index, one in shown.items() if one.directory_id is None):
            raise _refused(directory.parent, f"members {nameless} show no directory")
        granted = election.run(Purpose.OPEN, timeout_s, first=first)
        election.begin(granted)
        election.offer(granted, timeout_s)  # also to members whose answer the election did not wait for
        return granted


def _prepared(directory: Path, first: Grant) -> UUID | None:
    with LogDirectory.acquire(directory) as held:
        held.settle_id()
        names = [log_name(first.topic, n) for n in range(first.partitions)]
        create_logs(held, dict.fromkeys(names, first.topic_id), has_replicas=True)
        state_store = ElectionStateStore(directory, first.outbox_id, REAL_FILESYSTEM)
        state_store.keep(ElectionState(member=0))
        return state_store.directory_id


def _check_address(directory: Path, first: Grant, own_id: UUID | None, push: PushSettings) -> None:
    """Check that the node at the first address is this directory's. Raises CommandRefused."""
    address = Address.parse(first.members[0].address)
    try:
        with ReplicaClient(address, push) as client:
            request = DescribeLogRequest(outbox_id=first.outbox_id, member=0, partitions=())
            answer = client.ask(request, DescribeLogResponse)
    except PushrepError as error:
        raise _refused(directory.parent, f"its own node does not answer at {address}: {error}") from error
    if answer.error_code is ErrorCode.UNAUTHORISED:
        why = f"{answer.error_message or answer.error_code.meaning}: start every node with --allow for its creator"
        raise _refused(directory.parent, f"its own node refuses it at {address}: {why}")
    if answer.directory_id != own_id:
        raise _refused(directory.parent, f"at {address} is another node: name this one's address first")


def _refused(data: Path, why: str) -> CommandRefused:
    return CommandRefused(f"no outbox can be made under {data}: {why}")
