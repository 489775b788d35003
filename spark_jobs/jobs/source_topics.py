"""The topics of a job with source kafka: what their brokers say, and whether they are those that its checkpoint read.

    <checkpoint>-source/<topic>     one line, written before the first batch: <cluster id>/<topic id>

Spark's checkpoint has a topic's name and places in it. Of a topic that was made anew under that name those places mean
other records, and what stands below them would never be read. So the brokers are asked at the start and before each
batch, by Kafka's own client in Spark's JVM, with the source's own `kafka.` options. A compacted topic is refused, too:
compaction keeps a replay and deletes the first copy of a record.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any, NamedTuple, Self
from uuid import UUID

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.sql import SparkSession

from filtering.retry import Failure, ask
from pushrep.env.checked_json import BadJsonFile, parse_json
from spark_jobs.errors import BadJobOption
from spark_jobs.jobs.options import JobOptions
from spark_jobs.sinks.hadoop import HadoopDirectory
from spark_jobs.spark_internals import hadoop_of

_LOG = logging.getLogger(__name__)
_MASK = 2**64 - 1
_KAFKA = "kafka."
_NOT_THERE = {"UnknownTopicOrPartitionException", "InvalidTopicException"}


class KafkaTopic(NamedTuple):
    """`incarnation`: cluster id / topic id."""

    incarnation: str
    partitions: int


class SourceTopics:
    """The topics of one job; of another source than kafka there are none."""

    def __init__(self, spark: SparkSession, options: JobOptions, jvm: Any, admin: Any) -> None:
        self._jvm, self._admin, self._subscribed = jvm, admin, options.topic
        self._names = options.topics() if options.source == "kafka" else ()
        self._checkpoint = HadoopDirectory(spark, options.checkpoint)
        self._pins = HadoopDirectory(spark, options.checkpoint.rstrip("/") + "-source")
        self._agreed: dict[str, str] = {}
        self._unknown_settings: set[str] = set()

    @classmethod
    @contextmanager
    def of(cls, spark: SparkSession, options: JobOptions) -> Iterator[Self]:
        """Those of this job, with a connection to their brokers."""
        jvm, _ = hadoop_of(spark, "a job", "write the query with ReplayFilteredBatches")
        if options.source != "kafka":
            yield cls(spark, options, jvm, None)
            return
        settings = jvm.java.util.Properties()
        for name, text in options.source_options.items():
            if name.lower().startswith(_KAFKA):
                settings.setProperty(name[len(_KAFKA) :], text)
        try:
            admin = jvm.org.apache.kafka.clients.admin.AdminClient.create(settings)
        except Py4JJavaError as error:
            raise BadJobOption(
                "--source-option", None, f"Kafka's client refuses them: {_causes(error)[-1][1]}"
            ) from error
        with closing(admin):
            yield cls(spark, options, jvm, admin)

    def look(self) -> Mapping[str, KafkaTopic]:
        """Each topic by its name. Raises BadJobOption for one that is not there, or is compacted."""
        return {name: self._look_at(name) for name in self._names}

    def agree(self) -> None:
        """Before the first batch of a run: what `check` raises, also for what the checkpoint has read; then store which
        topics these are.
        """
        if not self._names:
            return
        read = self._read()
        if gone := sorted(read - set(self._names)):
            why = f"the checkpoint's query has read {', '.join(gone)}: name that, too, or begin with a fresh checkpoint"
            raise BadJobOption("--topic", self._subscribed, why)
        self._agreed = {name: self._pinned(name) for name in read}
        found = self.check()
        for name in found.keys() - read:
            self._pins.remove(name)  # of a checkpoint that was here before
            self._pins.create_bytes(name, f"{found[name].incarnation}\n".encode())
        self._agreed = {name: topic.incarnation for name, topic in found.items()}

    def check(self) -> Mapping[str, KafkaTopic]:
        """As `look`, before a batch; raises BadJobOption for a topic that was made anew, too."""
        found = self.look()
        for name, now in found.items():
            if (began := self._agreed.get(name, now.incarnation)) != now.incarnation:
                why = (
                    f"the topic was made anew: this checkpoint has read {began}, it is {now.incarnation} now, and its "
                    "offsets count from 0 again. Begin with a fresh checkpoint; with --adopt it goes on from the marks "
                    "of this one"
                )
                raise BadJobOption("--topic", name, why)
        return found

    def _read(self) -> set[str]:
        """The topics in what the checkpoint planned last."""
        planned = sorted(int(name) for name in self._checkpoint.names("offsets") if name.isdigit())
        if not planned:
            return set()
        name = f"offsets/{planned[-1]}"
        texts = _logged_offsets(self._checkpoint.path_of(name), self._checkpoint.read(name))
        offsets = [parsed(self._checkpoint, name, text) for text in texts]
        return {topic for offset in offsets if isinstance(offset, dict) for topic in offset}

    def _pinned(self, name: str) -> str:
        text = self._pins.read(name).strip() if name in self._pins.names() else ""
        if "/" not in text:
            why = (
                f"it says which topic {name} the checkpoint has read, and it is gone or damaged; restore it, or begin "
                "with a fresh checkpoint"
            )
            raise BadJobOption("--checkpoint", self._pins.path_of(name), why)
        return text

    def _look_at(self, name: str) -> KafkaTopic:
        try:
            found = ask(lambda _: self._admin.describeTopics([name]).topicNameValues().get(name).get(), _judged)
            cluster = str(self._admin.describeCluster().clusterId().get())
            policy = self._cleanup_policy(name)
        except Py4JJavaError as error:
            kind, why = _causes(error)[-1]
            why = "there is no such topic" if kind in _NOT_THERE else f"the brokers don't say what it is: {kind}: {why}"
            raise BadJobOption("--topic", name, why) from error
        if "compact" in policy:
            why = (
                f"it has cleanup.policy={policy}: compaction keeps a replayed record and deletes its first copy, which "
                "the filter then misses; set cleanup.policy=delete"
            )
            raise BadJobOption("--topic", name, why)
        high, low = found.topicId().getMostSignificantBits(), found.topicId().getLeastSignificantBits()
        topic_id = UUID(int=(high & _MASK) << 64 | (low & _MASK))
        return KafkaTopic(f"{cluster}/{topic_id}", int(found.partitions().size()))

    def _cleanup_policy(self, name: str) -> str:
        config = self._jvm.org.apache.kafka.common.config
        resource = config.ConfigResource(getattr(config, "ConfigResource$Type").TOPIC, name)
        try:
            settings = self._admin.describeConfigs([resource]).values().get(resource).get()
        except Py4JJavaError as error:
            if "AuthorizationException" not in _causes(error)[-1][0]:
                raise
            if name not in self._unknown_settings:
                self._unknown_settings.add(name)
                _LOG.warning(
                    "topic %s: the right DESCRIBE_CONFIGS is missing, so nobody knows whether the topic is compacted, "
                    "which would lose records",
                    name,
                )
            return ""
        return str(settings.get("cleanup.policy").value())


def _logged_offsets(path: str, text: str) -> list[str]:
    """The offset of each source that has one, from a file `offsets/N` of Spark's. Raises BadJobOption.

    v1 | {"batchWatermarkMs": ...} | one line a source: its offset, or -
    v2 | the same                  | <source>:<offset>                      Spark 4.1 and newer can write it
    """
    version, _, *lines = text.split("\n")
    if version not in {"v1", "v2"}:
        raise BadJobOption("--checkpoint", path, "it holds no offsets of version v1 or v2; this release reads no other")
    texts = [line.partition(":")[2] if version == "v2" else line for line in lines if line]
    return [offset for offset in texts if offset != "-"]


def _causes(error: Py4JJavaError) -> list[tuple[str, str]]:
    """Class and message of a Java exception and of what caused it; the last one says most."""
    found, cause = [], error.java_exception
    while cause is not None:
        found.append((str(cause.getClass().getSimpleName()), str(cause.getMessage())))
        cause = cause.getCause()
    return found


def _judged(error: BaseException) -> Failure:
    """Whether a topic may still appear; all other failures Kafka's client tries again itself."""
    is_missing = isinstance(error, Py4JJavaError) and _causes(error)[-1][0] in _NOT_THERE
    return Failure.NOT_THERE if is_missing else Failure.PERMANENT


def parsed(checkpoint: HadoopDirectory, name: str, text: str) -> Any:
    """JSON of a file in a query's checkpoint. Raises BadJobOption."""
    try:
        return parse_json(text)
    except BadJsonFile as error:
        raise BadJobOption(
            "--checkpoint", checkpoint.path_of(name), f"it is {error}: restore it from a copy"
        ) from error
