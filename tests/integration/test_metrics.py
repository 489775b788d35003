"""Metrics as a scraper gets them: by HTTP, in the exposition format, read by the client library's own parser."""

import gc
import shutil
import urllib.request
from contextlib import contextmanager
from importlib.metadata import version

import pytest
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.parser import text_string_to_metric_families

from pushrep import Acks, Durability, LogConfig, Outbox, OutboxConfig, ReplayClient, ReplayRequest
from pushrep.cli.main import run
from pushrep.outbox import RecordRefused
from pushrep.replay import ReplayRefused
from pushrep.status import PROBLEMS
from pushrep.status.metrics import StatusCollector
from tests.integration.outboxes import WAIT_S, open_outbox, wait_for_all, wait_until
from tests.programs import PythonProgram

WHOLE = LogConfig(preallocate_bytes=0)  # a file is as long as what it holds


class Scrape:
    """One look: value(name, label=...) is the one sample that has these labels."""

    def __init__(self, url):
        with urllib.request.urlopen(url, timeout=WAIT_S) as answer:
            assert answer.status == 200
            text = answer.read().decode()
        self.families = {family.name: family for family in text_string_to_metric_families(text)}
        self.samples = [sample for family in self.families.values() for sample in family.samples]

    def values(self, name, **labels):
        return [
            sample.value for sample in self.samples if sample.name == name and labels.items() <= sample.labels.items()
        ]

    def value(self, name, **labels):
        (value,) = self.values(name, **labels)
        return value


@contextmanager
def served(collector):
    """The URL at which a registry with this collector answers."""
    registry = CollectorRegistry()
    registry.register(collector)
    server, thread = start_http_server(0, "127.0.0.1", registry)
    try:
        yield f"http://127.0.0.1:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_an_outbox_tells_lag_watermarks_sets_session_ends_buffers_syncs_disk_and_refusals(world):
    """Contract, "Metrics": lag per replica (records, bytes, age), HWM, in-sync size, session ends by reason, buffer
    bytes, fsync seconds, disk used, refusals by code; Q2: record_follower_not_caught_up is a metric, by replica.
    """

    def not_caught_up(scrape):
        return scrape.values("pushrep_follower_not_caught_up_total", replica="2")

    world.node(1)
    world.node(2)
    far = str(world.nodes[2].address)
    with (
        open_outbox(world, 1, 2, partitions=2, acks=Acks.LOCAL) as outbox,
        served(StatusCollector(outbox.status)) as url,
    ):
        for number in range(10):
            outbox.append(number % 2, b"both").result(WAIT_S)
        wait_for_all(outbox)
        wait_until(lambda: all(outbox.log(n).high_watermark == 5 for n in range(2)), "the watermark follows")
        scrape = Scrape(url)
        assert scrape.values("pushrep_replica_lag_records") == [0, 0]
        assert scrape.values("pushrep_replica_lag_seconds") == [0, 0]
        assert scrape.value("pushrep_high_watermark", partition="0") == 5
        assert scrape.value("pushrep_log_end_offset", partition="1", topic="orders") == 5
        assert scrape.value("pushrep_in_sync_members", partition="1") == 3
        assert scrape.value("pushrep_replica_partition_lag_records", partition="1", replica="2") == 0
        for replica in ("1", "2"):
            assert scrape.value("pushrep_replica_request_duration_seconds_count", replica=replica) >= 1
        assert scrape.value("pushrep_outbox_in_sync_members_min") == 3
        assert scrape.value("pushrep_outbox_state", state="leading") == 1
        assert scrape.value("pushrep_outbox_state", state="resigned") == 0
        assert scrape.value("pushrep_outbox_epoch") == outbox.status().epoch
        assert scrape.value("pushrep_disk_used_bytes") > 0
        assert scrape.value("pushrep_fsync_duration_seconds_count") >= 10
        assert 0 < scrape.value("pushrep_fsync_duration_seconds_sum") < 3600
        buckets = scrape.values("pushrep_fsync_duration_seconds_bucket")
        assert buckets == sorted(buckets)
        assert buckets[-1] == scrape.value("pushrep_fsync_duration_seconds_count")

        left_before = sum(not_caught_up(scrape))
        world.nodes[2].stop()
        for partition in range(2):
            outbox.append(partition, b"x" * 3000).result(WAIT_S)
        wait_until(lambda: not outbox.lag()[far].in_sync, "it left")
        wait_until(lambda: sum(not_caught_up(Scrape(url))) >= left_before + 2, "and that is counted")
        scrape = Scrape(url)
        assert scrape.value("pushrep_replica_lag_records", address=far) == 2
        assert scrape.values("pushrep_replica_partition_lag_records", replica="2") == [1, 1]
        assert 6000 <= scrape.value("pushrep_replica_lag_bytes", address=far) <= 6000 + 2 * 4500
        assert scrape.value("pushrep_replica_lag_seconds", replica="2") > 0
        assert scrape.value("pushrep_replica_in_sync_partitions", replica="2") == 0
        assert not_caught_up(scrape) == [left_before + 2]
        assert scrape.value("pushrep_push_buffer_bytes") > 6000
        world.node(2)
        wait_for_all(outbox)
        scrape = Scrape(url)
        assert scrape.value("pushrep_replica_lag_records", address=far) == 0
        # The node came back under another replica epoch: what was sent on the old session was refused as stale.
        assert scrape.value("pushrep_replica_refusals_total", replica="2", code="STALE_SESSION") >= 1
        assert sum(scrape.values("pushrep_push_session_ends_total", reason="STALE_REPLICA_EPOCH")) >= 1
        wait_until(lambda: Scrape(url).value("pushrep_push_buffer_bytes") == 0, "given back")
    assert scrape.value("pushrep_outbox_buffer_limit_bytes") == 64 << 20


def test_a_closed_outbox_tells_nothing_and_another_can_be_added(tmp_path):
    collector = StatusCollector()
    with served(collector) as url:
        assert Scrape(url).samples == []
        with (
            Outbox.open(tmp_path / "a", "orders", 3, "billing") as first,
            Outbox.open(tmp_path / "b", "refunds", 1, "billing", durability=Durability.BUFFERED) as second,
        ):
            collector.sources.append(first.status)
            collector.sources.append(second.status)
            scrape = Scrape(url)
            assert scrape.value("pushrep_outbox_state", topic="refunds", state="alone") == 1
            assert len(scrape.values("pushrep_outbox_epoch")) == 2
            collector.sources.remove(second.status)
            assert scrape.values("pushrep_outbox_epoch", topic="refunds") == [-1]
            assert Scrape(url).values("pushrep_outbox_epoch", topic="refunds") == []
        assert Scrape(url).samples == []


def test_an_outbox_counts_what_it_took_refused_and_failed_and_how_long_that_took(tmp_path):
    directory = tmp_path / "outbox"
    with (
        Outbox.open(directory, "orders", 2, "billing", config=OutboxConfig(log_config=WHOLE)) as outbox,
        served(StatusCollector(outbox.status)) as url,
    ):
        for number in range(6):
            outbox.append(number % 2, b"x" * 100).result(WAIT_S)
        outbox.append_many(0, [b"many"] * 50).result(WAIT_S)
        for _ in range(2):
            with pytest.raises(RecordRefused):
                outbox.append(0, "no bytes")
        with pytest.raises(RecordRefused):
            outbox.append_many(9, [b"a"])
        scrape = Scrape(url)
        assert scrape.value("pushrep_append_records_total") == 56
        assert scrape.value("pushrep_append_batches_total") == 7
        size = sum(path.stat().st_size for path in directory.glob("orders-*/*.log"))
        assert scrape.value("pushrep_append_bytes_total") == size
        assert scrape.value("pushrep_append_refused_total", reason="RecordRefused") == 3
        assert scrape.value("pushrep_append_duration_seconds_count") == 7
        assert scrape.value("pushrep_acknowledge_duration_seconds_count") == 7
        assert 0 < scrape.value("pushrep_append_duration_seconds_sum") < 7 * WAIT_S
        assert scrape.values("pushrep_append_failed_records_total") == []
        assert scrape.values("pushrep_problem", topic="orders") == [0] * len(PROBLEMS)
        assert scrape.value("pushrep_build_info", version=version("pushrep")) == 1
        assert scrape.value("pushrep_log_recoveries_total") == 0


def test_disk_is_shown_once_for_its_mount_and_recoveries_and_cuts_are_counted(tmp_path):
    collector = StatusCollector()
    with (
        served(collector) as url,
        Outbox.open(tmp_path / "a", "orders", 1, "billing", config=OutboxConfig(log_config=WHOLE)) as first,
    ):
        first.append_many(0, [b"a"] * 10).result(WAIT_S)
        first.append_many(0, [b"b"] * 10).result(WAIT_S)
        shutil.copytree(tmp_path / "a", tmp_path / "b", ignore=shutil.ignore_patterns("*.lock", "*.sock", ".lock"))
        torn = next((tmp_path / "b").glob("orders-0/*.log"))
        with torn.open("ab") as file:
            file.write(b"a batch that was not written whole")
        with Outbox.open(tmp_path / "b", "orders", 1, "billing", config=OutboxConfig(copy_check=False)) as second:
            collector.sources.append(first.status)
            collector.sources.append(second.status)
            scrape = Scrape(url)
            assert len(scrape.values("pushrep_disk_size_bytes")) == len(scrape.values("pushrep_disk_used_bytes")) == 1
            assert scrape.values("pushrep_log_recoveries_total") == [0], "a copy has the same labels: the first counts"
            collector.sources.remove(first.status)
            scrape = Scrape(url)
            assert scrape.values("pushrep_log_recoveries_total") == [1]
            assert scrape.value("pushrep_log_recovery_cut_bytes_total") > 0
            log = second.log(0)
            log.truncate_to(0, force=True)
            assert Scrape(url).values("pushrep_log_cuts_total") == [1]


@pytest.fixture(autouse=True)
def no_socket_left():
    yield
    gc.collect()  # what is not closed warns, and warnings are errors


def test_a_node_tells_its_logs_refusals_syncs_and_disk(world):
    world.node(1, allow=frozenset({"nobody"}))
    node = world.nodes[1]
    with served(StatusCollector(node.status)) as url:
        with open_outbox(world, 1, acks=Acks.LOCAL) as outbox:
            wait_until(lambda: Scrape(url).values("pushrep_node_refusals_total"), "it may not create")
            scrape = Scrape(url)
            assert scrape.value("pushrep_node_refusals_total", call="DescribeLog", code="UNAUTHORISED") >= 1
            assert scrape.value("pushrep_node_open_logs") == 0
            assert scrape.value("pushrep_node_connections") >= 0
        node.stop()
        world.node(1)
    with served(StatusCollector(world.nodes[1].status)) as url, open_outbox(world, 1, min_insync_replicas=2) as outbox:
        for _ in range(5):
            outbox.append(0, b"both").result(WAIT_S)
        wait_for_all(outbox)
        labels = {"outbox": outbox.identity.outbox_id, "topic": "orders", "partition": "0"}
        with ReplayClient(str(world.nodes[1].address)) as client:
            assert len(list(client.replay(ReplayRequest(recording="orders-0", length=5)))) == 5
            with pytest.raises(ReplayRefused):
                client.replay(ReplayRequest(recording="orders-0", position=99))
        wait_until(lambda: Scrape(url).values("pushrep_replay_session_ends_total"), "the end is counted")
        scrape = Scrape(url)
        assert sum(scrape.values("pushrep_replay_session_ends_total")) == 1
        assert scrape.value("pushrep_replay_refusals_total", code="INVALID_POSITION") == 1
        assert scrape.value("pushrep_replay_lag_max_records") == 0
        assert scrape.values("pushrep_replay_sessions") == [0, 0, 0]
        assert scrape.value("pushrep_replay_sent_records_total") == 5
        assert scrape.values("pushrep_problem") == [0] * len(PROBLEMS)
        assert scrape.value("pushrep_log_end_offset", **labels) == 5
        assert scrape.value("pushrep_node_log_offline", **labels) == 0
        assert scrape.value("pushrep_node_last_contact_timestamp_seconds", **labels) > 1_600_000_000
        assert scrape.value("pushrep_fsync_duration_seconds_count", topic="orders") >= 5
        assert scrape.value("pushrep_disk_size_bytes") > 0
        assert scrape.value("pushrep_node_open_logs") == 1
        assert scrape.value("pushrep_node_replica_epoch") == node.replica_epoch + 1


def test_replica_serve_shows_its_metrics_where_it_is_told(tmp_path):
    serve = ("replica", "serve", tmp_path / "copies", "--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0")
    with PythonProgram("-m", "pushrep.cli.main", *serve) as node:
        try:
            line = node.stdout.readline().strip()
            scrape = Scrape(line.rpartition(" ")[2])
            assert scrape.value("pushrep_node_replica_epoch") > 1_600_000_000_000, "the first is the time in ms"
        finally:
            node.terminate()
    assert node.returncode == 0


def test_metrics_off_loopback_want_tls_or_a_word(tmp_path, capfd):
    assert run(["replica", "serve", str(tmp_path), "--listen", "127.0.0.1:0", "--metrics", "0.0.0.0:0"]) == 2
    assert "other machines reach 0.0.0.0:0" in capfd.readouterr().err
