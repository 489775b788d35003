"""Worker slots for Prometheus: REGISTRY.register(SlotsCollector(directory)), in any process."""

import logging
from collections.abc import Iterable
from pathlib import Path

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from pushrep.env import REAL_FILESYSTEM
from pushrep.errors import PushrepError
from pushrep.kafka.progress import read_progress
from pushrep.log.directory_files import log_name, slot_directories
from pushrep.log.inspection import lock_holder, summarize
from pushrep.outbox.identity import read_identity
from pushrep.status.metrics import Families

_LOG = logging.getLogger("pushrep.outbox")


class SlotsCollector(Collector):
    """The slots of one directory (`Outbox.open_slot`), for any process: it reads their files, so it has samples of
    workers that were killed, too.
    """

    def __init__(self, directory: Path | str) -> None:
        self._directory = Path(directory)

    def describe(self) -> Iterable[Metric]:
        """No families, so that registering does not scrape."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Samples of each slot: whether a process has it open, the sum of its log end offsets, and how many records
        each topic has not acknowledged.
        """
        families = Families()
        for path in slot_directories(self._directory):
            try:
                self._collect(families, path)
            except (PushrepError, OSError) as error:  # the slot is being made, or is damaged; the others have samples
                _LOG.warning("%s: no metrics of this slot: %s", path, error)
        return families

    @staticmethod
    def _collect(families: Families, path: Path) -> None:
        identity = read_identity(REAL_FILESYSTEM, path)
        if identity is None:
            return
        labels = {"slot": path.name, "outbox": identity.outbox_id, "topic": identity.topic}
        families.add("pushrep_slot_open", labels, lock_holder(path) is not None)
        ends = [summarize(path / log_name(identity.topic, n)).log_end_offset or 0 for n in range(identity.partitions)]
        families.add("pushrep_slot_log_end_offsets", labels, sum(ends))
        for topic, progress in read_progress(REAL_FILESYSTEM, path).items():
            has = (progress.partitions[n].acknowledged if n in progress.partitions else 0 for n in range(len(ends)))
            left = sum(max(0, end - acknowledged) for end, acknowledged in zip(ends, has, strict=True))
            families.add("pushrep_slot_unshipped_records", {**labels, "destination": topic}, left)
