"""Where a job's startpoints lie, as its options name it: told to the source in the source's own words.

--store out/startpoints                            startpoints=out/startpoints
--store kafka:TOPIC --store-servers HOST:PORT      startpoints=kafka:TOPIC, startpoints.bootstrap.servers=HOST:PORT
--store-config FILE                                startpoints.NAME=VALUE for each line of it
"""

from pathlib import Path

from pushrep.errors import BadArgument
from pushrep.kafka.properties import read_properties
from pushrep.startpoints import StorePlace, StoreUnavailable
from pushrep.startpoints.places import BOOTSTRAP_SERVERS, KAFKA, kind_of
from spark_jobs.errors import SparkJobError


class BadStore(SparkJobError):
    """An option that names the store can't be used; `option` names it."""

    def __init__(self, option: str, value: str | None, why: str) -> None:
        super().__init__(f"{option}: {why}" if value is None else f"{option}={value!r}: {why}")
        self.option, self.value, self.why = option, value, why


def store_words(store: str | None, servers: str | None, config: Path | None) -> dict[str, str]:
    """The source's options for it; none without --store. Raises BadStore."""
    for option, given in (("--store-servers", servers), ("--store-config", config)):
        if given is not None and kind_of(store or "") != KAFKA:
            raise BadStore(option, str(given), "belongs to startpoints in a topic: --store kafka:TOPIC")
    if store is None:
        return {}
    try:
        settings = read_properties(config) | ({} if servers is None else {BOOTSTRAP_SERVERS: servers})
        StorePlace.parse(store, settings)
    except BadArgument as error:
        option = "--store-servers" if error.argument == BOOTSTRAP_SERVERS else "--store-config"
        raise BadStore("--store" if error.argument == "store" else option, None, error.why) from error
    except (StoreUnavailable, OSError) as error:
        raise BadStore("--store", store, str(error)) from error
    return {"startpoints": store} | {f"startpoints.{name}": value for name, value in settings.items()}
