"""Does a topic carry its metadata where a reader looks for it? A filter that finds none filters nothing.

    a batch with metadata                      nothing is said
    the first batch without                    one warning, with topic and carrier
    the first 100 records of all, each with    WrongCarrier, which names the setting. Later no number of records stops
    none in the key and some in the header     a reader: another producer may have written them

Nobody who reads headers is sent to the keys: every text of 20 ASCII characters is valid metadata. Pure.
"""

import logging
from collections.abc import Callable

from filtering.errors import WrongCarrier
from filtering.stream_metadata import METADATA_HEADER

FIRST_RECORDS = 100


class CarrierCheck:
    """Of one topic. carrier: "key", "header", or a text for another rule. wanted: what the reader looks for."""

    def __init__(self, log: logging.Logger, topic: str, carrier: str, wanted: str = "stream metadata") -> None:
        self._log, self._topic, self._carrier, self._wanted = log, topic, carrier, wanted
        self._has_warned = False
        self._left = FIRST_RECORDS if carrier == "key" else 0
        self.is_proven = False
        """Whether a record has had metadata."""

    def prove(self) -> None:
        """A record has had metadata, maybe in an earlier run: marks say so."""
        self.is_proven, self._left = True, 0

    def look(self, records: int, without: int, in_header: Callable[[int], int]) -> None:
        """A batch of so many records has come, and so many of them are without metadata.

        in_header(n): how many of its first n have none in the key and valid metadata in the header. Raises WrongCarrier
        before any of these records is given to anybody.
        """
        if without < records:
            self.prove()
            return
        if records and not self._has_warned:
            self._has_warned = True
            self._log.warning(
                "topic %s: no record of a batch has %s as carrier=%r: all of them pass, replayed or not. If the "
                "metadata are elsewhere, give that as carrier",
                self._topic,
                self._wanted,
                self._carrier,
            )
        if records and self._left:
            first = min(records, self._left)
            if in_header(first) < first:
                self._left = 0
            elif first == self._left:  # and stays so: whoever reads them again is refused again
                raise first_records_in_header(self._topic)
            else:
                self._left -= first


def first_records_in_header(topic: str) -> WrongCarrier:
    """The refusal of a topic whose records carry their metadata in the header."""
    why = (
        f"for topic {topic}: its first {FIRST_RECORDS} records have no metadata in the key, and all of them in the "
        f"header {METADATA_HEADER}; read by the key, every replay would pass"
    )
    return WrongCarrier("key", "header", why)
