"""A status for people: what `pushrep status` prints, from the JSON of `Status.as_dict`."""

import shlex
import time
from collections.abc import Iterator, Mapping
from typing import Any

from pushrep.status.table import count, duration, many, size, table, time_text
from pushrep.status.terminal import Styled, wrapped

Found = Mapping[str, Any]
Rows = list[tuple[str, ...]]


def status_lines(found: Found, limit: int | None) -> Iterator[str]:
    """Yield the lines about one place. found: with `place`. limit: columns, None for a pipe."""
    for text in _head(found):
        yield from wrapped(text, limit, "  ", "")
    for one in found["problems"]:
        yield from _problem(one, limit)
    for rows in (_members(found), _destinations(found), _parts(found), _logs(found), _sessions(found)):
        if len(rows) > 1:
            yield ""
            yield from table(rows[0], rows[1:], limit)


def _problem(one: Found, limit: int | None) -> Iterator[str]:
    since = "" if one["since_ms"] is None else f", since {time_text(one['since_ms'])}"
    text = f"{one['problem']}{since}: {one['subject']}: {one['why']}"
    blocks = f"It blocks {one['blocks']}. " if one["blocks"] != "nothing" else ""
    for line in wrapped(text, limit, "  ", "! "):
        yield Styled(line, fg="red" if one["blocks"] == "appends" else "yellow")
    yield from wrapped(f"{blocks}{one['advice']}", limit, "  ")
    yield f"  {one['command']}"


def _head(found: Found) -> Iterator[str]:
    if found["kind"] == "outbox":
        yield f"{found['place']}: outbox of topic {found['topic']}, {found['state']}" + _why(found.get("why"))
        yield from _outbox(found)
    else:
        where = f", {found['address']}" if found.get("address") not in {None, "", found["place"]} else ""
        state = f", {found['state']}" if found["state"] != found["kind"] else ""
        yield f"{found['place']}: {found['kind']}{where}{state}{_pid(found)}"
        yield from _node(found)
    if (disk := found.get("disk")) is not None:
        full = "" if disk["level"] == "room" else f", {disk['level']}"
        yield f"disk {disk['mount']}: {size(disk['used_bytes'])} of {size(disk['size_bytes'])} used{full}"
    scrubs = [found["scrub"]] if "scrub" in found else [one["scrub"] for one in found.get("outboxes", ())]
    if scrubs:
        passes, damaged, repaired = (sum(one[name] for one in scrubs) for name in ("passes", "damaged", "repaired"))
        left = sum(len(one["findings"]) for one in scrubs)
        ended = [one["passed_ms"] for one in scrubs]
        last = "none has ended" if None in ended else f"the last ended {duration(_age_ms(min(ended)))} ago"
        yield (
            f"scrub: passes {passes}, {last}; segments found damaged {damaged}, repaired {repaired}, damaged now {left}"
        )
    elif found["state"] in {"closed", "at rest"} and not any(one.get("writer_pid") for one in found.get("logs", ())):
        at = shlex.quote(found["directory"] or found["place"])
        yield f"nobody has it open, so nobody looks for damage: pushrep log verify {at}"
    for use, expires_s in found.get("certificates", {}).items():
        until = "its expiry can't be read" if expires_s is None else f"until {time_text(1000 * expires_s)}"
        yield f"certificate for {use}: {until}"


def _age_ms(ms: int) -> int:
    return max(0, time.time_ns() // 1_000_000 - ms)


def _why(why: str | None) -> str:
    return f": {why}" if why else ""


def _pid(found: Found) -> str:
    return f", pid {found['pid']}" if found.get("pid") is not None else ""


def _outbox(found: Found) -> Iterator[str]:
    promise = f", acks {found['acks']}, {found['durability']}" if "acks" in found else ""
    yield f"{found['outbox_id']}, producer {found['producer']}{_pid(found)}{promise}"
    if len(found["members"]) > 1:
        least = f", {found['in_sync_min']} in sync at least" if "in_sync_min" in found else ""
        changing = ", a change of members is not finished" if found.get("is_changing") else ""
        yield (
            f"{many(len(found['members']), 'member')}{least}, min_insync_replicas {found['min_insync_replicas']}; "
            f"this is member {found['member']}, epoch {found['epoch']}{changing}"
        )
    if (hold := found.get("hold")) is not None:
        yield f"takeovers are held until {time_text(hold['until_ms'])}: {hold['reason']}"
    yield (
        f"{many(found['partitions'], 'partition')}, {many(found['log_end_offsets'], 'record')} appended, "
        f"{count(found['flushed_offsets'])} on disk, {count(found['high_watermarks'])} replicated"
    )
    if found["settings"]:
        kept = ", ".join(f"{name}={'none' if value is None else value}" for name, value in found["settings"].items())
        yield f"changed by pushrep outbox set: {kept}"
    if (relay := found.get("relay")) is not None:
        yield f"table: {relayed_text(relay['relayed'], relay['rows'])}"


def relayed_text(relayed: int, rows: Found | None) -> str:
    """How many rows of a database were relayed, and wait. rows: TableRows; None if the database did not say."""
    if rows is None:
        return f"{many(relayed, 'row')} relayed; the database does not say how many wait"
    parts = [f"{many(relayed, 'row')} relayed, {count(rows['waiting'])} wait"]
    if rows["oldest_ms"] is not None:
        parts[0] += f", the oldest since {time_text(rows['oldest_ms'])}"
    if rows["parked"]:
        parts.append(f"{count(rows['parked'])} are parked")
    if (held := rows["snapshot"]) is not None:
        since = "" if held["since_ms"] is None else f" since {time_text(held['since_ms'])}"
        parts.append(
            f"{held['who']} keeps deleted rows from vacuum{since}, {many(held['transactions'], 'transaction')}"
        )
    if not rows["sees_all"]:
        parts.append("other users' sessions are not seen without pg_read_all_stats")
    return "; ".join(parts)


def _node(found: Found) -> Iterator[str]:
    for one in found.get("leaders", ()):
        where = f" ({one['address']})" if one["address"] else ""
        contact = "it has resigned" if one["silent_ms"] is None else f"last contact {duration(one['silent_ms'])} ago"
        leader = f"member {one['leader']}{where} leads under epoch {one['epoch']}, {contact}"
        here = f"this member leads; for the others' lag: pushrep status {found['directory']}/{one['outbox_id']}"
        of = f" of {one['owner']}" if one["owner"] else ""
        yield f"outbox {one['outbox_id']} ({one['topic']}{of}): {here if one['is_here'] else leader}"
        if (hold := one["hold"]) is not None:
            yield f"  takeovers are held until {time_text(hold['until_ms'])}: {hold['reason']}"
    for one in found.get("standbys", ()):
        of = f" of {one['outbox_id']}" if one["outbox_id"] else ""  # "": its outbox is not made yet
        yield f"standby{of}: {one['state']}{_why(one['why'])}"
    if (budget := found.get("budget")) is not None:
        held = f"{size(budget['held_bytes'])} of {size(budget['held_bytes_max'])} held"
        closed = ", ".join(f"{reason} {n}" for reason, n in budget["closed"].items())
        yield f"connections: {found['connections']} of at most {budget['connections_max']}; {held}; closed: {closed}"
    if (replays := found.get("replays")) is not None:
        ended = ", ".join(f"{reason.lower()} {n}" for reason, n in replays["ended"].items()) or "none"
        yield f"replays: {len(replays['sessions'])} of at most {replays['sessions_max']} run; ended: {ended}"


def _members(found: Found) -> Rows:
    rows: Rows = [("member", "address", "role", "lag", "in sync", "sessions", "trouble, or last end")]
    for one in found.get("members", ()):
        lag = one["lag"]
        role = "joining" if one["is_joining"] else "leader" if one["is_leader"] else "replica"
        shown = ("", "", "", one["trouble"] or "")
        if lag is not None:
            shown = (
                lag_text(lag["records"], lag["size_bytes"], lag["age_ms"]),
                f"{lag['in_sync']} of {lag['partitions']}",
                str(one["sessions"]),
                one["trouble"] or one["last_end_reason"] or "",
            )
        rows.append((str(one["index"]), one["address"] or "here", role, *shown))
    return rows


def lag_text(records: int, size_bytes: int | None, age_ms: int | None) -> str:
    """A lag in records, bytes and time."""
    parts = [many(records, "record")]
    if records:
        parts += [size(size_bytes)] if size_bytes is not None else []
        parts += [duration(age_ms)] if age_ms is not None else []
    return ", ".join(parts)


def _destinations(found: Found) -> Rows:
    rows: Rows = [("destination", "lag", "trouble")]
    for one in found.get("destinations", ()):
        stopped = [f"partition {s['partition']} is stopped at {s['offset']}: {s['why']}" for s in one["stopped"]]
        trouble = "; ".join([*([one["trouble"]] if one["trouble"] else []), *stopped])
        rows.append((one["name"], lag_text(one["records"], one["size_bytes"], one["age_ms"]), trouble))
    return rows


def _parts(found: Found) -> Rows:
    rows: Rows = [("partition", "start", "end", "flushed", "HWM", "epoch", "in sync", "acknowledged by member")]
    for one in found.get("parts", ()):
        sessions = [
            f"{s['replica']}: {s['state'].lower()} {s['acknowledged'] if s['acknowledged'] >= 0 else '?'}"
            + (f" ({s['end_reason']})" if s["end_reason"] else "")
            for s in one["sessions"]
        ]
        offsets = ("log_start_offset", "log_end_offset", "flushed_offset", "high_watermark")
        numbers = [str(one["partition"]), *(count(one[name]) for name in offsets), str(one["leader_epoch"])]
        rows.append((*numbers, " ".join(map(str, one["in_sync"])), "; ".join(sessions)))
    return rows


def _logs(found: Found) -> Rows:
    rows: Rows = [("log", "start", "end", "HWM", "epoch", "what is wrong", "outbox")]
    for one in found.get("logs", ()):
        numbers = (count(one[name]) for name in ("log_start_offset", "log_end_offset", "high_watermark"))
        wrong = one.get("failure") or one.get("finding") or one.get("refused") or ""
        name = f"{one['topic']}-{one['partition']}"
        rows.append((name, *numbers, str(one["leader_epoch"]), wrong, one.get("outbox_id", "")))
    return rows


def _sessions(found: Found) -> Rows:
    rows: Rows = [("session", "recording", "state", "position", "lag", "credit", "idle")]
    for one in found.get("replays", {}).get("sessions", ()):
        lag, credit, idle = many(one["lag"], "record"), size(one["credit"]), duration(one["idle_ms"])
        row = (f"{one['session_id']:016x}", str(one["recording"]), one["state"], count(one["position"]), lag)
        rows.append((*row, credit, idle))
    return rows
