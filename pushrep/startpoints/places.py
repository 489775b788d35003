"""A store by its place, as commands, jobs and options name it: the one parser of them.

    store_at("out/startpoints")                                                a directory
    store_at("kafka:startpoints", {"bootstrap.servers": "broker:9092"})        a compacted topic; librdkafka's names

A kind that is no directory comes from whoever knows its client, by an entry point of the group
`pushrep.startpoint_stores`; so whoever names a store here needs no such client, and loads none that it does not use.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path

from filtering.extras import MissingExtra, needed_by
from pushrep.errors import BadArgument
from pushrep.startpoints.errors import StoreUnavailable
from pushrep.startpoints.store import StartpointStore

GROUP = "pushrep.startpoint_stores"
KAFKA = "kafka"
BOOTSTRAP_SERVERS = "bootstrap.servers"


@dataclass(frozen=True, slots=True)
class StorePlace:
    """Where a store lies: `kind` "" is the directory `name`, "kafka" the topic `name`.

    settings: of the client, by librdkafka's names; shown nowhere.
    """

    kind: str
    name: str
    settings: Mapping[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def parse(cls, text: str | Path, settings: Mapping[str, str] | None = None) -> "StorePlace":
        """A directory, or kafka:TOPIC with its client's settings; looks nowhere. Raises BadArgument, StoreUnavailable.

        BadArgument names the setting: one that is missing, or that a directory has no use for.
        """
        words, given = str(text), dict(settings or {})
        if not words.strip():
            raise BadArgument("store", "it is empty: name a directory, or kafka:TOPIC")
        if kind_of(words) == KAFKA:
            name = words.removeprefix(f"{KAFKA}:")
            if not name:
                raise StoreUnavailable(words, "name the topic: kafka:TOPIC")
            if not given.get(BOOTSTRAP_SERVERS):
                raise BadArgument(BOOTSTRAP_SERVERS, f"{words} lies on brokers: say where, HOST:PORT")
            return cls(KAFKA, name, given)
        if "://" in words:
            raise StoreUnavailable(words, "a store lies in a directory of this machine, or in kafka:TOPIC")
        if given:
            raise BadArgument(min(given), f"{words} is a directory; settings of a client are for kafka:TOPIC")
        return cls("", words)

    def open(self) -> StartpointStore:
        """The store there; close it. Raises StoreUnavailable, BadArgument for settings that can't be."""
        if not self.kind:
            return StartpointStore.open(self.name)
        place = f"{self.kind}:{self.name}"
        for entry in entry_points(group=GROUP, name=self.kind):
            try:
                with needed_by("it"):
                    make = entry.load()
            except MissingExtra as error:
                raise StoreUnavailable(place, str(error)) from error
            opened: StartpointStore = make(self.name, self.settings)
            return opened
        why = f"this installation has no {self.kind!r} in its entry points {GROUP}: install pushrep again"
        raise StoreUnavailable(place, why)


def kind_of(place: str | Path) -> str:
    """Empty for a directory, "kafka" for a topic."""
    return KAFKA if str(place).startswith(f"{KAFKA}:") and "://" not in str(place) else ""


def store_at(place: str | Path, settings: Mapping[str, str] | None = None) -> StartpointStore:
    """The store at a directory or at kafka:TOPIC; close it. Raises as `StorePlace.parse` and `StorePlace.open` do."""
    return StorePlace.parse(place, settings).open()
