"""The alerts: each by its own series, each with its page, and real faults that fire theirs and no other."""

import errno
import json
import os
import re
import shutil
import subprocess
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import HistogramMetricFamily

from pushrep import Acks, KafkaDestination, LogConfig, Outbox, OutboxConfig, ReplayClient, ReplayRequest
from pushrep.cli.status import look_at
from pushrep.health import HealthSettings
from pushrep.log.directory_files import segment_path
from pushrep.outbox import DeliveryFailed
from pushrep.outbox import status as outbox_status
from pushrep.outbox.creating import create_outbox
from pushrep.replay import NodeAccess
from pushrep.replicate import node_status
from pushrep.replicate.certificates import CertificateFiles, expires_s, mutual_tls
from pushrep.status import PROBLEMS, Blocks
from pushrep.status.metrics import StatusCollector
from tests.integration.certificates import make_certificates
from tests.integration.outboxes import QUICK, SMALL, WAIT_S, open_outbox, wait_for_all, wait_until
from tests.integration.prometheus import RULES, firing, prometheus, served, up
from tests.integration.test_health import BadLogs
from tests.integration.test_standbys import Instance, Members
from tests.ports import reserve

DOCS = Path(__file__).parents[2] / "docs"
HEALTHY = {
    'up{job="pushrep",instance="a"}': "1x60",
    'pushrep_filter_jumped_offsets_total{instance="a",name="billing",source="orders"}': "3x60",
    'pushrep_node_standby{instance="b",outbox="an-id",state="standing_by"}': "1x60",
    'pushrep_outbox_state{instance="a",outbox="an-id",topic="orders",state="leading"}': "1x60",
}
"""Series while nothing is wrong, a value a minute."""
FAULTS = {
    "PushrepDown": ("up{", "1x9 0x29 1x20"),
    "PushrepFilterGap": ("pushrep_filter_jumped_offsets_total", "3x9 4x50"),
    "PushrepNobodyLeads": ("pushrep_outbox_state", "1x9 0x29 1x20"),
}
"""Which series of HEALTHY shows the fault, from minute 10 to minute 39; of other alerts their problem does."""
TRIES = 20
SMALL_SEGMENTS = replace(SMALL, segment_bytes=4000)

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed: apt-get install prometheus"
)


def rules():
    """{alert: (expression, minutes, severity)}"""
    rule = r"alert: (\w+)\n\s+expr: (.+)\n\s+for: (\d+)m\n(?:.*\n)*?\s+severity: (\w+)"
    found = re.findall(rule, RULES.read_text())
    return {name: (expression, int(minutes), severity) for name, expression, minutes, severity in found}


def case_of(name, expression, minutes):
    """A test for promtool: the alert fires once its reason has lasted for its time, alone, and ends with it."""
    word = re.search(r'problem="(\w+)"', expression)
    problems = {f'pushrep_problem{{instance="a",topic="orders",problem="{one}"}}': "0x60" for one in PROBLEMS}
    series = HEALTHY | problems
    metric, values = FAULTS.get(name, (f'problem="{word[1]}"' if word else name, "0x9 1x29 0x20"))
    (faulty,) = [one for one in series if metric in one]
    firing = 'group by (alertname) (ALERTS{alertstate="firing"})'
    wanted = {9: [], 10 + minutes: [{"labels": f'{{alertname="{name}"}}', "value": 1}], 41: []}
    return {
        "interval": "1m",
        "input_series": [{"series": one, "values": had} for one, had in (series | {faulty: values}).items()],
        "promql_expr_test": [
            {"expr": firing, "eval_time": f"{at}m", "exp_samples": samples} for at, samples in wanted.items()
        ],
    }


def promtool(*arguments, **more):
    command = ["promtool", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **more)
    assert done.returncode == 0, done.stdout + done.stderr


def look(collector):
    """{series: value} of one scrape, without histograms."""
    registry = CollectorRegistry()
    registry.register(collector)
    return {
        f"{sample.name}{json.dumps(sample.labels, sort_keys=True)}": (sample.name, sample.labels, float(sample.value))
        for family in registry.collect()
        if not isinstance(family, HistogramMetricFamily)
        for sample in family.samples
    }


@pytest.fixture
def assert_fires(tmp_path, torture):
    """Exactly these alerts fire if every target stays as it is. A target that is None does not answer.

    One scrape, as it would look for half an hour, and again for as long as another one fires: a busy machine's member
    may be behind for a moment, and the rules wait for minutes. The long form waits for a real Prometheus to say so.
    """

    def check(expected, **targets):
        for attempt in range(TRIES):
            try:
                check_scrape(tmp_path, expected, targets)
                break
            except AssertionError:
                if attempt == TRIES - 1:
                    raise
        if torture.is_long and shutil.which("prometheus") is not None:
            check_live(tmp_path, expected, targets)

    return check


def check_live(tmp_path, expected, targets):
    with ExitStack() as stack:
        servers = {name: served(stack, *([] if one is None else [one])) for name, one in targets.items()}
        for name, collector in targets.items():
            if collector is None:
                servers[name].close()
        url = stack.enter_context(prometheus(tmp_path, [str(server.address) for server in servers.values()]))
        with suppress(pytest.fail.Exception):
            wait_until(lambda: len(up(url)) == len(targets) and firing(url) == expected, f"{expected} fire")
        assert firing(url) == expected


def check_scrape(tmp_path, expected, targets):
    series = []
    for instance, collector in targets.items():
        series.append({"series": _series("up", {}, instance), "values": f"{int(collector is not None)}x40"})
        for name, labels, value in () if collector is None else look(collector).values():
            series.append({"series": _series(name, labels, instance), "values": f"{value}x40"})
    firing = {
        "expr": 'group by (alertname) (ALERTS{alertstate="firing"})',
        "eval_time": "30m",
        "exp_samples": [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in expected],
    }
    check_cases(tmp_path, [{"interval": "1m", "input_series": series, "promql_expr_test": [firing]}])


def check_cases(tmp_path, cases):
    file = tmp_path / "cases.json"  # every JSON is YAML
    file.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": cases}))
    promtool("test", "rules", file)


def _series(name, labels, instance):
    shown = {**labels, "instance": instance, "job": "pushrep"}
    return f"{name}{{{','.join(f'{label}={json.dumps(value)}' for label, value in shown.items())}}}"


def small_disk(stack, place, size):
    """A small file system at `place` until `stack` ends. Returns why it can't be made, else None."""
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode:
        return f"no file system can be mounted here: {mounted.stderr.strip()}"
    stack.callback(subprocess.run, ["umount", str(place)], check=True, timeout=60)
    return None


def fill(place, share):
    """A file of another's takes the disk so far, at one blow; that file."""
    used, filler = shutil.disk_usage(place), place / "another's"
    with filler.open("ab") as file:
        os.posix_fallocate(file.fileno(), file.tell(), int(used.total * share) - used.used)
    return filler


def append_segments(outbox):
    """Some sealed ones."""
    for number in range(20):
        outbox.append(0, b"%4d" % number + bytes(800)).result(WAIT_S)


def rot(log):
    """A bit of its first segment flips, and the scrub comes by; once more, and it is as before."""
    path = segment_path(log.path, min(int(path.stem) for path in log.path.glob("*.log")))
    data = bytearray(path.read_bytes())
    data[100] ^= 0x10
    path.write_bytes(data)
    log.scrub.run_pass()


CRITICAL = {Blocks.APPENDS, Blocks.ACKNOWLEDGEMENTS, Blocks.SHIPPING}


def problems(outbox):
    found = outbox.status().problems()
    assert all(one.since_ms for one in found), found
    return [one.name for one in found]


def test_each_problem_has_an_alert_of_its_weight_and_each_alert_a_page():
    by_word = {}
    for name, (expression, _, severity) in rules().items():
        if (word := re.search(r'problem="(\w+)"', expression)) is not None:
            by_word[word[1]] = severity
        assert f"### {name}\n" in (DOCS / "alerts.md").read_text(), name
        assert f"docs/alerts.md#{name.lower()}\n" in RULES.read_text(), name
    wanted = {word: "critical" if kind.blocks in CRITICAL else "warning" for word, kind in PROBLEMS.items()}
    del wanted["not_answering"]  # nobody says so of himself: PushrepDown
    assert by_word == wanted


def test_each_alert_is_drilled_or_said_not_to_be():
    from tests.drill import FAULTS, NOT_DRILLED

    drilled = [alert for fault in FAULTS for alert in fault.alerts]
    assert sorted([*drilled, *NOT_DRILLED]) == sorted(rules())


@needs_promtool
def test_each_alert_fires_alone_after_its_time_and_ends_with_its_reason(tmp_path):
    promtool("check", "rules", RULES)
    cases = [case_of(name, expression, minutes) for name, (expression, minutes, _) in rules().items()]
    assert RULES.read_text().count("alert: ") == len(cases)
    check_cases(tmp_path, cases)


@needs_promtool
def test_nothing_fires_while_nothing_is_wrong_and_a_killed_replica_is_away(world, tmp_path, assert_fires):
    for index in (1, 2):
        world.node(index)
    with open_outbox(world, 1, 2) as outbox:
        outbox.append(0, b"both").result(WAIT_S)
        wait_for_all(outbox)
        service, first, second = (
            StatusCollector(outbox.status),
            *(StatusCollector(world.nodes[n].status) for n in (1, 2)),
        )
        assert_fires(set(), service=service, first=first, second=second)
        world.nodes[2].stop()
        wait_until(lambda: problems(outbox) == ["replica_away"], "it is away")
        outbox.append(0, b"two are enough").result(WAIT_S)
        expected = {"PushrepReplicaAway", "PushrepDown"}
        assert_fires(expected, service=service, first=first, second=None)


@needs_promtool
def test_a_kafka_that_is_away_fires_its_alert(tmp_path, assert_fires, monkeypatch):
    with reserve() as held:
        kafka = KafkaDestination(bootstrap_servers=f"127.0.0.1:{held.getsockname()[1]}")
        with Outbox.open(
            tmp_path / "o", "orders", 1, "billing", kafka=kafka, config=OutboxConfig(open_timeout_s=0.1)
        ) as outbox:
            outbox.append(0, b"later").result(WAIT_S)
            assert_fires(set(), service=StatusCollector(outbox.status))  # a pause
            monkeypatch.setattr(outbox_status, "KAFKA_AWAY_MS", 100)
            wait_until(lambda: problems(outbox), "it is away for longer than the limit")
            assert_fires({"PushrepKafkaAway"}, service=StatusCollector(outbox.status))


@needs_promtool
def test_a_filled_disk_fires_its_alert(tmp_path, assert_fires):
    place = tmp_path / "small"
    with ExitStack() as stack:
        if (why := small_disk(stack, place, "16m")) is not None:
            pytest.skip(why)
        outbox = stack.enter_context(
            Outbox.open(place / "outbox", "orders", 1, "billing", config=OutboxConfig(log_config=SMALL))
        )
        outbox.append(0, b"before").result(WAIT_S)
        collector = StatusCollector(outbox.status)
        assert_fires(set(), service=collector)
        fill(place, 0.88)
        wait_until(lambda: problems(outbox) == ["disk_filling"], "it is seen")
        assert_fires({"PushrepDiskFilling"}, service=collector)
        fill(place, 0.96)
        wait_until(lambda: problems(outbox) == ["disk_full"], "it is seen")
        assert_fires({"PushrepDiskFull"}, service=collector)


@needs_promtool
def test_a_clock_beyond_all_records_fires_its_alert(tmp_path, assert_fires):
    for is_beyond in (False, True):
        config = OutboxConfig(log_config=LogConfig(retention_ms=86_400_000 if is_beyond else None))
        with Outbox.open(tmp_path / "outbox", "orders", 1, "billing", config=config) as outbox:
            outbox.append(0, b"of 1970", timestamp_ms=1).result(WAIT_S)
            assert problems(outbox) == ["retention_held"] * is_beyond
            assert_fires({"PushrepRetentionHeld"} if is_beyond else set(), service=StatusCollector(outbox.status))


@needs_promtool
def test_a_log_that_stopped_fires_its_alert(tmp_path, assert_fires):
    disk = BadLogs()
    with Outbox.open(tmp_path / "o", "orders", 2, "billing", filesystem=disk) as outbox:
        outbox.append(0, b"before").result(WAIT_S)
        disk.fails["orders-0", "write_at"] = errno.EDQUOT
        with pytest.raises(DeliveryFailed):
            outbox.append(0, b"refused").result(WAIT_S)
        assert_fires({"PushrepLogStopped"}, service=StatusCollector(outbox.status))
        disk.fails.clear()
        outbox.append(0, b"taken").result(WAIT_S)
        assert_fires(set(), service=StatusCollector(outbox.status))


@needs_promtool
def test_a_damaged_segment_fires_its_alert(tmp_path, assert_fires):
    with Outbox.open(
        tmp_path / "outbox", "orders", 1, "billing", config=OutboxConfig(log_config=SMALL_SEGMENTS)
    ) as outbox:
        append_segments(outbox)
        rot(outbox.log(0))
        assert problems(outbox) == ["segment_damaged"]
        assert_fires({"PushrepSegmentDamaged"}, service=StatusCollector(outbox.status))


@needs_promtool
def test_a_certificate_that_expires_soon_fires_its_alert(world, tmp_path, assert_fires):
    made = make_certificates(tmp_path)  # for two days
    files = CertificateFiles(made / "node.pem", made / "node.key", made / "ca.pem")
    world.node(1, certificates=files, allow=frozenset({"billing"}))
    expected = {"PushrepCertificateExpires"}
    assert_fires(expected, node=StatusCollector(world.nodes[1].status))

    named = {"cert": str(made / "billing.pem"), "key": str(made / "billing.key"), "ca": str(made / "ca.pem")}
    health = HealthSettings(listen="127.0.0.1:0", **named)
    with reserve() as held:
        kafka = KafkaDestination(
            bootstrap_servers=f"127.0.0.1:{held.getsockname()[1]}", security_protocol="SSL", ssl_cafile=named["ca"]
        )
        push = replace(QUICK, tls=mutual_tls(**named))
        with open_outbox(world, 1, push=push, health=health, kafka=kafka, open_timeout_s=0.1) as outbox:
            blocked = {"not_leading", "under_min_insync"}
            wait_until(lambda: blocked.isdisjoint(problems(outbox)), "it leads, and does not wait for Kafka")
            outbox.append(0, b"a").result(WAIT_S)
            assert_fires(expected, service=StatusCollector(outbox.status))
            told = look_at(str(outbox.directory))[0]
            assert told["certificates"] == dict.fromkeys(("replicas", "kafka", "health"), expires_s(made / "ca.pem"))
            assert [one["problem"] for one in told["problems"]] == ["certificate_expires"] * 3
            shutil.copy(made / "other-ca.pem", made / "ca.pem")
            (made / "billing.pem").write_text("lost")
            assert look_at(str(outbox.directory))[0]["certificates"] == {**told["certificates"], "health": None}


@needs_promtool
def test_a_consumer_that_stopped_fires_its_alert(world, tmp_path, assert_fires, monkeypatch):
    monkeypatch.setattr(node_status, "STALLED_MS", 400)
    world.node(1)
    node = StatusCollector(world.nodes[1].status)

    def stalled():
        return next(value for name, _, value in look(node).values() if name == "pushrep_replay_stalled_seconds")

    with open_outbox(world, 1, acks=Acks.ALL, min_insync_replicas=2) as outbox:
        outbox.append_many(0, [bytes(1000)] * 500).result(WAIT_S)
        wait_for_all(outbox)
        access = NodeAccess(credit_bytes=64 << 10)
        with ReplayClient(str(world.nodes[1].address), node=access) as client:
            replay = client.replay(ReplayRequest(recording="orders-0", position=0))
            wait_until(lambda: stalled() > 0.2, "it takes nothing and is behind")
            before = stalled()
            wait_until(lambda: stalled() > before + 0.2, "and so it goes on")
            (problem,) = world.nodes[1].status().problems()
            assert problem.name == "replay_stalled"
            assert problem.since_ms > 0
            assert (
                f"replay {world.nodes[1].replay_server.counters().sessions[0].session_id:016x} of " in problem.subject
            )
            assert_fires({"PushrepReplayStalled"}, node=node)
            replay.close()
            wait_until(lambda: stalled() == 0, "nobody is behind")
        assert_fires(set(), node=node)


@needs_promtool
def test_standbys_that_are_kept_from_leading_fire_their_alert(tmp_path, assert_fires):
    """The leader is killed, so no process reports that it does not lead."""
    with ExitStack() as stack:
        members = Members(tmp_path, stack)
        create_outbox(members.data[0], members.addresses, "orders")
        first, second = Instance(members.data[0]), Instance(members.data[1])
        nodes = {f"node_{index}": StatusCollector(node.status) for index, node in enumerate(members.nodes)}
        try:
            first.wait_until_it_leads()
            second.wait_for("was in contact")
            wait_for_all(first.outbox)
            first.outbox.facts.replication.hold_takeovers(3_600_000, "new switches")
            assert_fires(set(), service=StatusCollector(first.outbox.status), **nodes)
            first.outbox.close()
            second.wait_for("takeovers are held")
            assert_fires({"PushrepNobodyLeads"}, **nodes)
        finally:
            first.end()
            second.end()
