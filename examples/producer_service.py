"""A producer service that loses nothing: it appends its events, acknowledges them when they are safe, and after any
crash continues where its log ends. Run it twice: the second run continues.

    python examples/producer_service.py DIRECTORY
"""

import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from filtering import StreamMetadata, producer_id
from pushrep import Outbox, Receipt

TOPIC, PARTITIONS = "orders", 2
UPSTREAM = producer_id(application="billing", stream=TOPIC, source="order-database", destination="outbox")


def orders(partition: int, first: int) -> Iterator[tuple[int, bytes]]:
    """Stands for your source: rows of one partition from a position on, in order."""
    for number in range(first, first + 1000):
        yield number, f'{{"partition": {partition}, "order": {number}}}'.encode()


def main(directory: Path) -> None:
    with Outbox.open(directory, topic=TOPIC, partitions=PARTITIONS, producer="billing") as outbox:
        for partition in range(PARTITIONS):
            last = outbox.last_metadata(UPSTREAM, partition)
            first = 0 if last is None else last + 1
            unanswered: deque[Receipt] = deque()
            for number, value in orders(partition, first):
                unanswered.append(outbox.append(partition, value, metadata=StreamMetadata(UPSTREAM, partition, number)))
                while unanswered and unanswered[0].done():
                    unanswered.popleft().result()  # raises if it failed; here the source could be told "kept"
            while unanswered:
                unanswered.popleft().result(timeout=30)
            end = outbox.log(partition).log_end_offset
            print(f"{TOPIC}-{partition}: began at order {first}, the log ends at {end}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "orders-outbox"))
