"""`pushrep tables adopt`: a relay goes on although database and outbox do not continue each other.

It begins an epoch, so no event-id of before comes again, and says first what the restore of one of both costs.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from pushrep.outbox import Outbox
from pushrep.tables.database import RelayDatabase, RelayState
from pushrep.tables.decide import NotContinued, judge
from pushrep.tables.relay import event_ids, first_state, holder_of, log_state


@dataclass(frozen=True, slots=True)
class Adoption:
    """What adopting finds. epoch: the new one. waiting: rows that the relay will append. findings: a sentence each.

    twice: event-ids in the outbox whose rows wait again, at most 1,000. missing: by partition, the offsets that the
    database gave to an outbox and this one does not hold.
    """

    epoch: int
    waiting: int
    findings: tuple[str, ...]
    twice: tuple[str, ...]
    missing: dict[int, tuple[int, int]]


_TWICE_MAX = 1000


def adopt(outbox: Outbox, database: RelayDatabase, *, dry_run: bool = False) -> Adoption:
    """Let `outbox` be the one that the topic's rows go to, from now on, whatever the state says. No relay may run.

    dry_run: only say what would be. Raises UnfitDatabase, TablesDiffer, AnotherRelay if a relay runs meanwhile.
    """
    system_id, holder = database.check(), holder_of(outbox)
    outbox.flush()
    state = database.state()
    logs = outbox.facts.logs
    ends: Mapping[int, int] = {} if state is None else state.batch.ends
    found = {n: log_state(log, ends.get(n, 0)) for n, log in logs.items()}
    epochs = [one.newest[0] for one in found.values() if one.newest is not None]
    if (noted := outbox.facts.relay_notes.closed) is not None:
        epochs.append(noted[0])
    epoch = max([0 if state is None else state.batch.epoch, *epochs]) + 1
    findings = list(_findings(state, system_id, outbox))
    if state is not None and isinstance(verdict := judge(state.batch, found, noted), NotContinued):
        findings.append(verdict.why)
    missing = {n: (log.end, ends[n]) for n, log in found.items() if log.end < ends.get(n, 0)}
    new = first_state(holder, system_id, logs, epoch=epoch)
    waiting = database.rows().waiting
    twice = _twice(outbox, ends, database.waiting_ids(_TWICE_MAX))
    if not dry_run:
        waiting = database.adopt(state, new)
    return Adoption(epoch, waiting, tuple(findings), twice, missing)


def _findings(state: RelayState | None, system_id: str, outbox: Outbox) -> list[str]:
    if state is None:
        return ["the database knows no relay of this topic yet"]
    found = []
    if state.system_id != system_id:
        found.append(f"the state was made in database {state.system_id}, and this is {system_id}")
    if state.holder.outbox_id != outbox.identity.outbox_id:
        found.append(f"so far the rows went to outbox {state.holder.outbox_id}")
    if state.batch.is_open:
        found.append(f"batch {state.batch.epoch}-{state.batch.batch} is open: its rows wait, and some may be appended")
    return found


def _twice(outbox: Outbox, ends: Mapping[int, int], waiting: set[int]) -> tuple[str, ...]:
    """Event-ids in the logs, from the state's ends on, of rows that wait."""
    found = [
        str(one)
        for n, log in outbox.facts.logs.items()
        for one in event_ids(log, ends.get(n, 0))
        if one.row_id in waiting
    ]
    return tuple(found[:_TWICE_MAX])
