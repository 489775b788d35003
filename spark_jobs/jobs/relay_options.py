"""What the relay job is told beside what every job is. Pure."""

import re
from dataclasses import dataclass, field

from partitioner.confluent_settings import held_settings
from partitioner.errors import BreaksPrefixCondition
from spark_jobs.jobs.options import BadOption, JobOptions

_SERVERS = "bootstrap.servers"
_EPOCH_MAX = 10**9 - 1


@dataclass(frozen=True, kw_only=True)
class RelayOptions(JobOptions):
    """The relay's command's --help tells each. Raises BadOption."""

    application: str
    to_topic: str
    to_servers: str | None = None
    to_options: dict[str, str] = field(default_factory=dict)
    to_carrier: str | None = None
    from_options: dict[str, str] = field(default_factory=dict)
    partition_count: int | None = None
    epoch: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.source not in {"pushrep", "kafka"}:
            why = "its incarnation can't be told, which is part of the new metadata: relay from pushrep or kafka"
            raise BadOption("--source", self.source, why)
        lossy = {name: text for name, text in self.source_options.items() if name.lower() == "failondataloss"}
        if "false" in map(str.lower, lossy.values()):
            why = "records that nobody sends would be a hole that no later record may pass"
            raise BadOption("--source-option failOnDataLoss", "false", why)
        if self.partition_count is not None and self.partition_count < 1:
            raise BadOption("--partition-count", self.partition_count, "give 1 or more")
        if not 0 <= self.epoch <= _EPOCH_MAX:
            raise BadOption("--epoch", self.epoch, f"give 0 to {_EPOCH_MAX}")
        for option, given in (("--to-option", self.to_options), ("--from-option", self.from_options)):
            if _SERVERS in given:
                by = "--to-servers" if option == "--to-option" else "--source-option kafka.bootstrap.servers"
                raise BadOption(f"{option} {_SERVERS}", given[_SERVERS], f"say it by {by}")
        if self.source != "kafka" and self.from_options:
            raise BadOption("--from-option", None, f"tells how to reach Kafka; source {self.source} is none")
        if self.source == "kafka" and (twice := set(self.topics()) & {self.to_topic}) and self._is_one_cluster():
            raise BadOption("--to-topic", twice.pop(), "it is the topic that is read: each record would come again")
        self.client()
        self._check_client()

    def carrier_out(self) -> str:
        """Where the new metadata travels: as the source has it, unless told otherwise."""
        return self.to_carrier or self.carrier

    def client(self) -> dict[str, str]:
        """Settings of librdkafka for the destination. Raises BadOption without its servers."""
        servers = self.to_servers or self.source_servers()
        if servers is None:
            raise BadOption("--to-servers", None, "name the destination's brokers: HOST:9092")
        return {_SERVERS: servers, **self.to_options}

    def source_client(self) -> dict[str, str]:
        """Settings of librdkafka for the source's cluster; the destination's where it is the same."""
        servers = self.source_servers() or ""
        return {_SERVERS: servers, **(self.from_options or (self.to_options if self._is_one_cluster() else {}))}

    def reader_options(self) -> dict[str, str]:
        """As every job's; the headers travel on."""
        return {"includeHeaders": "true"} | super().reader_options()

    def marks_brokers(self) -> str | None:
        """As every job's; of a source without brokers those of the destination."""
        return super().marks_brokers() or self.to_servers

    def _is_one_cluster(self) -> bool:
        return self.to_servers in {None, self.source_servers()}

    def _check_client(self) -> None:
        try:
            held_settings(self.client())
        except BreaksPrefixCondition as error:
            why = re.sub(r"^[^:]*: ", "", str(error))
            raise BadOption(f"--to-option {error.setting}", error.value, why) from error

    def _named_always(self) -> tuple[str, ...]:
        return ("application", "topic", "to_topic", "checkpoint", "marks")
