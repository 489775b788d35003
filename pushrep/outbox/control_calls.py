"""The calls that an open outbox answers on its control socket.

    status       {"first": 0, "count": 1000}         OutboxStatus.as_dict() with these partitions, at most 1,000
    add-member, remove-member                        one step of the change, member_changes.py
    skip         {"partition", "offset", "reason"}   true: the record is not shipped to Kafka
    skip-all     {"topic"}                           true: nothing is kept for it any more; refused for the topic that
                                                     is shipped to
    purge        {"partition", "before_offset", "before_ms", "dry_run"}   what was removed, by log
    hold         {"for_ms", "reason"}                until when no standby takes over by itself, wall clock, ms

An outbox on a file system without sockets (a network share, say, or a simulated disk) opens without a control socket:
its records matter more.
"""

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from pushrep.env import Filesystem, RealFilesystem
from pushrep.errors import BadArgument
from pushrep.outbox.control import Calls, ControlServer
from pushrep.outbox.errors import CommandRefused
from pushrep.outbox.member_changes import change_calls
from pushrep.outbox.purging import purge_open
from pushrep.outbox.status import Facts, status_of
from pushrep.settings import whole_number

_LOG = logging.getLogger("pushrep.outbox")
PARTITIONS_AT_ONCE = 1000
_REASON_CHARACTERS = 500


def serve_control(resources: ExitStack, facts: Facts, filesystem: Filesystem) -> None:
    """Answer control calls from now on. `resources` ends this before anything that was opened earlier."""
    if not isinstance(filesystem, RealFilesystem):
        return
    try:
        server = ControlServer(facts.directory, calls_of(facts))
    except OSError as error:
        _LOG.warning(
            "%s has no control socket, so commands can't reach it while it is open: %s", facts.directory, error
        )
        return
    resources.callback(server.close)


def calls_of(facts: Facts) -> Calls:
    """The calls, by name."""
    return {
        "status": lambda arguments: _status(facts, arguments),
        **change_calls(facts),
        "hold": lambda arguments: _hold(facts, arguments),
        "skip": lambda arguments: _skip(facts, arguments),
        "skip-all": lambda arguments: _skip_all(facts, arguments),
        "purge": lambda arguments: purge_open(facts.logs, arguments),
    }


def _skip(facts: Facts, arguments: Mapping[str, Any]) -> bool:
    wanted = (arguments.get(name) for name in ("partition", "offset", "reason", "topic"))
    facts.shipping.skip(*wanted)
    return True


def _hold(facts: Facts, arguments: Mapping[str, Any]) -> int | None:
    for_ms, reason = whole_number("for_ms", arguments.get("for_ms", 0)), arguments.get("reason", "")
    if not isinstance(reason, str) or len(reason) > _REASON_CHARACTERS:
        raise BadArgument("reason", f"give a text of at most {_REASON_CHARACTERS} characters")
    if facts.replication is None:
        raise CommandRefused("this outbox has no replicas: nobody stands by")
    hold = facts.replication.hold_takeovers(for_ms, reason).hold
    return None if hold is None else hold.until_ms


def _skip_all(facts: Facts, arguments: Mapping[str, Any]) -> bool:
    facts.shipping.drop(arguments.get("topic"))
    return True


def _status(facts: Facts, arguments: Mapping[str, Any]) -> dict[str, Any]:
    first, count = (whole_number(name, arguments.get(name, 0)) for name in ("first", "count"))
    return status_of(facts, range(first, first + min(count, PARTITIONS_AT_ONCE))).as_dict()
