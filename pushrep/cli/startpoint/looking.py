"""`pushrep startpoint list`, `show`, `history`: read only, no lock."""

from pathlib import Path
from typing import Any

import click

from pushrep.cli.common import count, say_time, show_json, show_table
from pushrep.cli.startpoint.options import with_json, with_store, written_store_of
from pushrep.cli.startpoint.preview import say_place
from pushrep.startpoints import EventLog, NoSuchStartpoint, ReaderState, State, Written
from pushrep.startpoints.model import OVER, Applied, Cancelled, Expired, Fact, Failed, to_json


@click.command("list")
@with_store
@click.option("--consumer", help="Only those that this consumer may meet.")
@click.option("--topic", help="Only those of this topic.")
@click.option("--all", "all_", is_flag=True, help="Those that are over, too.")
@with_json
def list_(  # noqa: PLR0913, PLR0917 - one parameter an option
    directory: Path, store: str | None, consumer: str | None, topic: str | None, all_: bool, as_json: bool  # noqa: FBT001
) -> None:  # fmt: skip
    """Show the startpoints that wait, run or stop somebody, the newest first. What is overdue is marked expired."""
    opened = written_store_of(directory, store)
    opened.sweep()
    event_log = opened.event_log()
    chosen = [
        written
        for written in reversed(list(event_log.all_written()))
        if (topic in (None, written.target.topic) and (consumer is None or written.target.consumer in (None, consumer)))
        and (all_ or is_open(event_log, written.sequence))
    ]
    if as_json:
        for written in chosen:
            show_json(_as_dict(event_log, written))
        return
    if not chosen:
        click.echo(
            "no startpoints" if all_ else "no startpoints that wait, run or stop somebody; --all shows the others"
        )
        return
    rows = [
        (
            str(written.sequence),
            str(written.target),
            say_place(written.startpoint),
            states_of(event_log, written.sequence),
            say_time(written.created_ms),
            _expires(written),
            written.author,
            written.reason,
        )
        for written in chosen
    ]
    show_table(None, ("number", "for", "start at", "state", "written", "expires", "by", "reason"), rows)


@click.command()
@with_store
@click.argument("sequence", metavar="NUMBER", type=click.IntRange(1))
@with_json
def show(directory: Path, store: str | None, sequence: int, as_json: bool) -> None:  # noqa: FBT001 - click's
    """Show one startpoint and how it stands for each consumer that met it."""
    event_log = written_store_of(directory, store).event_log()
    written = event_log.written(sequence)
    if written is None:
        raise NoSuchStartpoint(sequence)
    if as_json:
        show_json(_as_dict(event_log, written))
        return
    marks = ", the replay filter forgets" if written.startpoint.reset_marks else ""
    click.echo(f"startpoint {sequence}: {written.target}: {say_place(written.startpoint)}{marks}")
    click.echo(f"written {say_time(written.created_ms)} by {written.author}: {written.reason}")
    click.echo(f"expires {_expires(written)}; if it does not fit: {written.startpoint.out_of_range}")
    for reader, state in event_log.readers(sequence).items():
        click.echo(f"{reader}: {_state_text(state)}")
    click.echo(f"{'it stands' if not event_log.readers(sequence) else 'all in all'}: {states_of(event_log, sequence)}")


@click.command()
@with_store
@click.option("--consumer", help="Only what concerns this consumer.")
@click.option("--topic", help="Only what concerns this topic.")
@with_json
def history(directory: Path, store: str | None, consumer: str | None, topic: str | None, as_json: bool) -> None:  # noqa: FBT001
    """Show all that was ever written, applied, consumed, failed, expired or cancelled, in order."""
    written: dict[int, Written] = {}
    for fact in written_store_of(directory, store).history():
        if isinstance(fact, Written):
            written[fact.sequence] = fact
        if topic not in (None, written[fact.sequence].target.topic) or not _concerns(fact, written, consumer):
            continue
        if as_json:
            show_json(to_json(fact))
        else:
            click.echo(line_of(fact))


def _concerns(fact: Fact, written: dict[int, Written], consumer: str | None) -> bool:
    if consumer is None:
        return True
    if isinstance(fact, Written | Expired | Cancelled):
        return written[fact.sequence].target.consumer in (None, consumer)
    return fact.reader.consumer == consumer


def line_of(fact: Fact) -> str:
    """What happened, as people read it."""
    match fact:
        case Written():
            text = f"{fact.target}: {say_place(fact.startpoint)}, by {fact.author}: {fact.reason}"
            return f"{say_time(fact.created_ms)}  {fact.sequence} written    {text}"
        case Applied():
            text = f"{fact.reader}: offset {fact.offset} of [{fact.start}, {fact.end})"
            policy = f"; {fact.by_policy}" if fact.by_policy is not None else ""
            return f"{say_time(fact.at_ms)}  {fact.sequence} applied    {text}{policy}"
        case Failed():
            return f"{say_time(fact.at_ms)}  {fact.sequence} failed     {fact.reader}: {fact.why}"
        case Cancelled():
            return f"{say_time(fact.at_ms)}  {fact.sequence} cancelled  by {fact.author}: {fact.reason}"
        case Expired():
            return f"{say_time(fact.at_ms)}  {fact.sequence} expired"
        case _:
            return f"{say_time(fact.at_ms)}  {fact.sequence} consumed   {fact.reader}"


def is_open(event_log: EventLog, sequence: int) -> bool:
    """Whether it waits, runs or stops somebody."""
    states = {state.state for state in event_log.readers(sequence).values()}
    return bool((states | {event_log.state(sequence)}) - OVER) and event_log.superseded_by(sequence) is None


def states_of(event_log: EventLog, sequence: int) -> str:
    """One word, or how many readers stand where, and how it stands for the others."""
    states = [str(state.state) for state in event_log.readers(sequence).values()]
    rest = str(event_log.state(sequence))
    newer = event_log.superseded_by(sequence)
    if rest == State.PENDING and newer is not None:
        rest = f"superseded by {newer}"
    if set(states) <= {rest}:
        return rest
    counted = [f"{count(states.count(state))} {state}" for state in map(str, State) if state in states]
    return f"{', '.join(counted)}; others {rest}"


def _state_text(state: ReaderState) -> str:
    text = str(state.state)
    if state.applied is not None:
        at = state.applied
        text += f", at offset {at.offset} of [{at.start}, {at.end}), {say_time(at.at_ms)}"
        text += f"; {at.by_policy}" if at.by_policy is not None else ""
    return f"{text}: {state.failure}" if state.failure is not None else text


def _expires(written: Written) -> str:
    return "never" if written.ttl_s is None else say_time(written.created_ms + written.ttl_s * 1000)


def _as_dict(event_log: EventLog, written: Written) -> dict[str, Any]:
    readers = [
        {
            "consumer": reader.consumer,
            "partition": reader.partition,
            "task": reader.task or None,
            "state": str(state.state),
            "offset": state.applied.offset if state.applied is not None else None,
            "failure": state.failure,
        }
        for reader, state in event_log.readers(written.sequence).items()
    ]
    fields = to_json(written)
    del fields["event"]
    state = {
        "state": str(event_log.state(written.sequence)),
        "superseded_by": event_log.superseded_by(written.sequence),
    }
    return {**fields, **state, "readers": readers}
