"""What `pushrep demo-kafka` leaves in its directory, beside what every demo does.

relay/ apply/         checkpoints of the two jobs; the relay's marks beside its own
broker/               the broker's settings and its topics, in Kafka's own file format
*.err                 what the programs said
"""

from pathlib import Path
from typing import ClassVar

from spark_jobs.demo.output import Output


class KafkaOutput(Output):
    """Names of the files under the output directory."""

    OURS: ClassVar[tuple[str, ...]] = (
        *("original", "log", "flights.avsc", "position.json", "relay", "relay-marks", "relay-relay", "apply", "broker"),
        *("broker.err", "database.err", "topics.err", "watch.err", "producer.err", "relay.err", "apply.err"),
        *("check.err", "summary.json", "report.html", "scratch"),
    )

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.relay = root / "relay"
        self.apply = root / "apply"
        self.broker = root / "broker"
