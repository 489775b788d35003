"""The table of metrics: its page, Prometheus' own check of the names, and collectors that need no outbox."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from filtering.replay_filter import FilterCounts
from pushrep.log.disk import Durations
from pushrep.status import Histogram, JobStatus
from pushrep.status.metrics import FAMILIES, Families, StatusCollector
from spark_jobs.operator_counts import CountsListener
from tests.house import metrics_page

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def shown(collector):
    registry = CollectorRegistry()
    registry.register(collector)
    return generate_latest(registry).decode()


class Everything:
    """A collector with a sample of every family in the table."""

    def describe(self):
        return ()

    def collect(self):
        families = Families()
        for name, family in FAMILIES.items():
            labels = dict.fromkeys(family.labels, "x")
            if family.kind == "histogram":
                families.add(name, labels, Histogram.of([Durations()]))
            else:
                families.add(name, labels, 1)
        return families


def test_the_page_is_made_from_the_table():
    assert PAGE.read_text() == metrics_page.page(), "python -m tests.house.metrics_page > docs/metrics.md"


def test_promtool_finds_nothing_wrong_with_any_name():
    page = shown(Everything())
    assert {name for name in FAMILIES if f"# HELP {name} " not in page} == set()
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed: apt-get install prometheus")
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=page, capture_output=True, text=True, check=False, timeout=60
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_names_say_what_they_count():
    units = re.compile(r"_(bytes|seconds|records|batches|partitions|offsets?|replicas|info)(_total|_max|_min)?$")
    for name, family in FAMILIES.items():
        assert family.help.endswith("."), name
        if family.kind == "histogram":
            assert name.endswith("_duration_seconds")
        if name.endswith(("_time", "_ms", "_age", "_latency", "_mb", "_expiry")):
            pytest.fail(f"{name} has no base unit")
    assert sum(units.search(name) is not None for name in FAMILIES) > len(FAMILIES) // 2


def test_a_label_that_is_not_in_the_table_is_refused():
    with pytest.raises(AssertionError, match="has the labels"):
        Families().add("pushrep_node_connections", {"node": "1"}, 1)


def test_a_filters_numbers_by_topic():
    counts = FilterCounts(kept=5, dropped=3, unkeyed=1, other_pids=1, late=2, pairs=4, jumped=7)
    page = shown(StatusCollector(lambda: JobStatus(name="billing", counts={"orders": counts})))
    labels = '{name="billing",source="orders"}'
    for name, value in (("kept_records", 5), ("dropped_records", 3), ("late_records", 2), ("unkeyed_records", 2)):
        assert f"pushrep_filter_{name}_total{labels} {value}.0" in page
    assert f"pushrep_filter_jumped_offsets_total{labels} 7.0" in page


def test_a_spark_querys_numbers_add_up_over_its_batches():
    listener = CountsListener()
    after = {"pairs": 2, "kept": 8, "dropped": 2, "late": 1, "jumped": 3, "unlikely": 0, "all_dropped": [], "gaps": []}
    observed = {"filter_replays.before": {"rows": 11, "unkeyed": 1}, "filter_replays.after": after}
    for batch_id in range(2):
        text = json.dumps({"batchId": batch_id, "observedMetrics": observed})
        listener.onQueryProgress(SimpleNamespace(progress=SimpleNamespace(json=text, id="7", name="sums")))
    page = shown(StatusCollector(lambda: JobStatus(name="job", counts=listener.counts)))
    for name, value in (("kept_records_total", 16), ("dropped_records_total", 4), ("jumped_offsets_total", 6)):
        assert f'pushrep_filter_{name}{{name="job",source="sums"}} {value}.0' in page
    assert 'pushrep_filter_pairs{name="job",source="sums"} 2.0' in page
