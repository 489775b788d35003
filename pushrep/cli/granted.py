"""Where the members of an outbox listen, for commands that open it: as its newest grant says, else as it was opened."""

from pathlib import Path

from pushrep.node.promises import find_promises
from pushrep.outbox import OutboxIdentity
from pushrep.seams import REAL_FILESYSTEM


def addresses_of(directory: Path, stored: OutboxIdentity | None) -> list[str]:
    """The other members' addresses; none of an outbox that is not there, or has no replicas. Raises CorruptNodeFile."""
    if stored is None:
        return []
    _, promises = find_promises(directory, REAL_FILESYSTEM) or (None, None)
    if promises is None or promises.grant is None:
        return [address for _, address in stored.replicas]
    return [one.address for one in promises.grant.members if one.index != promises.member and one.address]
