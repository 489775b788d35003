"""What every collector of pushrep is made of: names, and the families of Prometheus, filled when they are scraped.

Names begin with `pushrep_`, sizes are `_bytes`, durations `_seconds`, counters end in `_total`, as Prometheus wants it.
Needs the extra `metrics` (prometheus-client); nothing else in pushrep imports it.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from filtering.extras import needed_by

with needed_by("the collector for Prometheus"):
    import prometheus_client  # noqa: F401 - the message says how to get it

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from pushrep.log.disk_space import SYNC_BOUNDS_S, DiskWatch
from pushrep.log.scrub import ScrubStatus


class Families:
    """Metric families by name, each made when it gets its first sample. All samples of one have the same labels."""

    def __init__(self) -> None:
        self._made: dict[str, Metric] = {}

    def gauge(self, name: str, help_: str, labels: dict[str, str], value: float) -> None:
        """A number that goes up and down."""
        family = self._made.setdefault(name, GaugeMetricFamily(name, help_, labels=list(labels)))
        assert isinstance(family, GaugeMetricFamily), f"{name} is a gauge everywhere"
        family.add_metric(list(labels.values()), value)

    def counter(self, name: str, help_: str, labels: dict[str, str], value: float) -> None:
        """A number that only rises; `name` without `_total`."""
        family = self._made.setdefault(name, CounterMetricFamily(name, help_, labels=list(labels)))
        assert isinstance(family, CounterMetricFamily), f"{name} is a counter everywhere"
        family.add_metric(list(labels.values()), value)

    def disk(self, labels: dict[str, str], disk: DiskWatch) -> None:
        """How full it is, how long syncs took. What a disk does not answer is left out."""
        usage = disk.look()
        self.gauge("pushrep_disk_used_bytes", "Used on the file system of the logs.", labels, usage.used_bytes)
        self.gauge("pushrep_disk_size_bytes", "Size of the file system of the logs.", labels, usage.total_bytes)
        counts, seconds = disk.syncs.read()
        name = "pushrep_fsync_seconds"
        family = self._made.setdefault(name, HistogramMetricFamily(name, "Syncs of segments.", labels=list(labels)))
        assert isinstance(family, HistogramMetricFamily), f"{name} is a histogram everywhere"
        family.add_metric(list(labels.values()), list(_buckets(counts)), seconds)

    def scrub(self, labels: dict[str, str], status: ScrubStatus) -> None:
        """What the background reading of sealed segments has found."""
        self.gauge("pushrep_scrub_findings", "Sealed segments that are damaged.", labels, len(status.findings))
        for name, help_, value in (
            ("pushrep_scrub_passes", "Times that all sealed segments were read.", status.passes),
            ("pushrep_scrub_read_bytes", "Read by the scrub.", status.bytes_read),
            ("pushrep_scrub_seals_made", "Segments that had no seal and got one.", status.seals_made),
            ("pushrep_scrub_damaged", "Sealed segments that were found damaged.", status.damaged),
            ("pushrep_scrub_repaired", "Segments that were repaired with another member's batches.", status.repaired),
        ):
            self.counter(name, help_, labels, value)

    def __iter__(self) -> Iterator[Metric]:
        return iter(self._made.values())


def _buckets(counts: Sequence[int]) -> Iterable[tuple[str, float]]:
    bounds = [*map(str, SYNC_BOUNDS_S), "+Inf"]
    return zip(bounds, accumulate(counts), strict=True)
