"""PIDs: the 64-bit name of one producer of one stream, the first 8 bytes of every key.

    producer_id       hash of six parts, each | length u32, big-endian | UTF-8 |, so ("ab", "c") is not ("a", "bc")
    sqe_producer_id   hash of the bare concatenation of three parts: what JW Player's SQE computes

The hash is MurmurHash2-64A, seed 0xe17a1465 unsigned, the result read as a signed number. Two different names that
give one PID in one process are refused, since the filter would take the records of one for replays of the other.
"""

from filtering.errors import BadFilterSetting, FilteringError
from filtering.murmur import murmur_hash2_64a


class ProducerNames:
    """Which name each PID belongs to; refuses the second name of one PID. One for each process, or for each job."""

    def __init__(self) -> None:
        self._names: dict[int, tuple[str, ...]] = {}

    def claim(self, pid: int, name: tuple[str, ...]) -> int:
        """Give `pid` back if it is this name's alone so far; raises FilteringError naming both. Thread-safe."""
        first = self._names.setdefault(pid, name)
        if first != name:
            raise FilteringError(f"PID {pid} belongs to {first} and would also be that of {name}: rename one of them")
        return pid


_PROCESS_NAMES = ProducerNames()


def producer_id(  # noqa: PLR0913 - the six parts of the name, by keyword only
    *, application: str, stream: str, source: str, destination: str, epoch: int = 0, fanout: int = 1
) -> int:
    """The PID of one stream from one source into one destination: a signed 64-bit number.

    `source` and `destination` are incarnations: cluster id + topic id for Kafka, the log's own id for a segment log,
    so that a topic made anew under its old name is another producer. `epoch` (>= 0) rises before the next append
    whenever an offset could name a second record; `fanout` (>= 1) is how many outputs each source record has.
    Raises BadFilterSetting, and FilteringError when another name in this process has this PID.
    """
    for field, number, least in (("epoch", epoch, 0), ("fanout", fanout, 1)):
        if not isinstance(number, int) or number < least:
            raise BadFilterSetting(field, number, f"a whole number from {least} on")
    texts = {"application": application, "stream": stream, "source": source, "destination": destination}
    parts = (*(_utf8(field, text) for field, text in texts.items()), b"%d" % epoch, b"%d" % fanout)
    pid = murmur_hash2_64a(b"".join(len(part).to_bytes(4, "big") + part for part in parts))
    return _PROCESS_NAMES.claim(pid, ("pushrep", *texts.values(), str(int(epoch)), str(int(fanout))))


def sqe_producer_id(topology: str, stream: str, secondary_id: str = "") -> int:
    """The PID that SQE gives the same stream; for its Kafka streams `secondary_id` is broker ZooKeeper hosts + path.

    The parts are joined without a mark between them, as SQE does it. Raises as `producer_id`.
    """
    texts = {"topology": topology, "stream": stream, "secondary_id": secondary_id}
    pid = murmur_hash2_64a(b"".join(_utf8(field, text) for field, text in texts.items()))
    return _PROCESS_NAMES.claim(pid, ("sqe", *texts.values()))


def _utf8(field: str, text: object) -> bytes:
    if not isinstance(text, str):
        raise BadFilterSetting(field, text, "a text")
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise BadFilterSetting(field, text, "text that UTF-8 can carry (no lone surrogates)") from None
