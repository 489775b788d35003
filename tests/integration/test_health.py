"""/livez, /readyz and /metrics as probes and scrapers ask for them: of outboxes and nodes, plain and by TLS."""

import errno
import json
import re
import shutil
import socket
import ssl
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from pushrep import Outbox, OutboxConfig
from pushrep.cli.main import run
from pushrep.cli.status import look_at
from pushrep.env import REAL_FILESYSTEM, RealFilesystem
from pushrep.errors import BadArgument
from pushrep.health import HealthServer, HealthSettings
from pushrep.kafka.answers import Code
from pushrep.kafka.destination import KafkaDestination
from pushrep.kafka.errors import RefusedByTopic
from pushrep.kafka.progress import PartitionProgress, ShippingProgress, write_progress
from pushrep.outbox import DeliveryFailed, OutboxClosed
from pushrep.outbox import status as outbox_status
from pushrep.outbox.configured import outbox_settings
from pushrep.replicate.certificates import mutual_tls
from pushrep.status import PROBLEMS, PlaceStatus, Problem
from tests.integration.certificates import make_certificates
from tests.integration.outboxes import WAIT_S, open_outbox, wait_until
from tests.ports import reserve
from tests.programs import PythonProgram
from tests.support.outbox_arguments import outbox_arguments
from tests.unit.gated_disk import GatedDisk

PORT_0 = HealthSettings(listen="127.0.0.1:0")


def get(url, tls=None, method="GET"):
    """(status, body) whatever the status is."""
    request = urllib.request.Request(url, method=method)
    try:
        with urllib.request.urlopen(request, timeout=WAIT_S, context=tls) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def ready(url, tls=None):
    """(status, the problems' words, the whole answer)."""
    status, body = get(f"{url}/readyz", tls)
    answer = json.loads(body)
    assert answer["ready"] == (status == 200)
    assert all(one["since_ms"] for one in answer["problems"] if one["problem"] != "not_answering"), answer
    return status, [one["problem"] for one in answer["problems"]], answer


@pytest.fixture
def free_port():
    """A port that no other process gets, but that `HealthServer` can bind."""
    held = reserve()
    yield held.getsockname()[1]
    held.close()


def test_what_is_not_served_is_404_and_problems_decide_on_ready():
    problems = []
    with HealthServer(PORT_0, lambda: PlaceStatus(found=tuple(problems)), CollectorRegistry()) as server:
        assert get(f"{server.url}/livez") == (200, b"ok\n")
        assert get(f"{server.url}/livez", method="HEAD") == (200, b"")
        assert ready(server.url)[:2] == (200, [])
        for path in ("/", "/healthz", "/nonsense", "/livez/", "/metricsx", "/readyz/x"):
            assert get(server.url + path)[0] == 404, path
        assert get(f"{server.url}/readyz?verbose")[0] == 200
        problems[:] = [Problem("kafka_away", "topic orders", "one", 1), Problem("replica_away", "member 2", "two", 2)]
        assert ready(server.url)[:2] == (200, ["kafka_away", "replica_away"]), "an operator's, not a probe's"
        problems.append(Problem("disk_full", "disk /", "three", 5))
        status, words, answer = ready(server.url)
        assert (status, words[0]) == (503, "disk_full"), "worst first"
        assert answer["problems"][0] == {
            "problem": "disk_full",
            "subject": "disk /",
            "why": "three",
            "since_ms": 5,
            "blocks": "appends",
            "advice": PROBLEMS["disk_full"].advice,
            "command": "pushrep log ls DIRECTORY",
        }
        assert get(f"{server.url}/livez")[0] == 200, "a restart mends no disk"
    with pytest.raises(urllib.error.URLError):
        get(f"{server.url}/livez")


def test_n6_without_tls_a_host_that_is_not_its_own_is_refused(tmp_path):
    def answer(server, *hosts):
        with socket.create_connection(server.address[:2], WAIT_S) as sock:
            sent = "".join(f"Host: {host}\r\n" for host in hosts)
            sock.sendall(f"GET /metrics HTTP/1.1\r\n{sent}Connection: close\r\n\r\n".encode())
            return int(sock.makefile("rb").readline().split()[1])

    with HealthServer(PORT_0, PlaceStatus, CollectorRegistry()) as server:
        port = server.address.port
        for own in ("localhost", f"LOCALHOST:{port}", "127.0.0.1", f"127.0.0.2:{port}", f"[::1]:{port}"):
            assert answer(server, own) == 200, own
        assert answer(server) == 200, "a probe without the header is no browser"
        for other in ("rebound.example", f"rebound.example:{port}", "10.0.0.7", "localhost.rebound.example", "", "["):
            assert answer(server, other) == 421, other
        assert answer(server, "localhost", "rebound.example") == 421
    everywhere = HealthSettings(listen="0.0.0.0:0", plain=True)
    with HealthServer(everywhere, PlaceStatus, CollectorRegistry()) as server:
        local = SimpleNamespace(address=("127.0.0.1", server.address.port))
        assert [answer(local, host) for host in ("10.0.0.7:9400", "rebound.example")] == [200, 421]
    make_certificates(tmp_path)
    files = {
        name: str(tmp_path / f"{stem}") for name, stem in (("cert", "node.pem"), ("key", "node.key"), ("ca", "ca.pem"))
    }
    with HealthServer(HealthSettings(listen="127.0.0.1:0", **files), PlaceStatus, CollectorRegistry()) as server:
        trusts = ssl.create_default_context(cafile=tmp_path / "ca.pem")
        asked = urllib.request.Request(f"{server.url}/livez", headers={"Host": "billing.example"})
        with urllib.request.urlopen(asked, timeout=WAIT_S, context=trusts) as found:
            assert found.status == 200, "its certificate says whose name it is"


@pytest.mark.parametrize(
    ("given", "argument"),
    [
        ({"listen": "nowhere"}, "health.listen"),
        ({"listen": 9400}, "health.listen"),
        ({"listen": "0.0.0.0:0"}, "health.listen"),
        ({"listen": "127.0.0.1:0", "cert": "a.pem"}, "health.cert"),
    ],
)
def test_settings_are_refused_by_name(given, argument):
    with pytest.raises(BadArgument) as refused:
        HealthSettings(**given)
    assert refused.value.argument == argument


def test_an_address_in_use_and_a_closed_outbox_are_said(tmp_path):
    with HealthServer(PORT_0, PlaceStatus) as server:
        taken = HealthSettings(listen=str(server.address))
        with pytest.raises(BadArgument, match=r"can't listen on .*in use"):
            Outbox.open(tmp_path / "outbox", "orders", 1, "billing", health=taken)
    with Outbox.open(tmp_path / "outbox", "orders", 1, "billing", health=taken) as outbox:
        outbox.append(0, b"the directory was freed").result(WAIT_S)
        assert ready(server.url)[:2] == (200, [])
        assert b"pushrep_outbox_state{" in get(f"{server.url}/metrics")[1]
    with pytest.raises(urllib.error.URLError):
        get(f"{server.url}/livez")


def test_an_outbox_that_is_being_closed_is_not_ready_and_says_why():
    def closed():
        raise OutboxClosed(Path("orders"))

    with HealthServer(PORT_0, closed) as server:
        status, words, answer = ready(server.url)
        assert (status, words) == (503, ["not_answering"])
        assert answer["problems"][0]["why"] == str(OutboxClosed(Path("orders")))
        assert get(f"{server.url}/leader")[0] == 503


class BadLogs(RealFilesystem):
    """`fails` has (name of a log's directory, call of its files) and the error number."""

    def __init__(self):
        self.fails = {}

    def open(self, path, **more):
        return _BadFile(super().open(path, **more), path.parent.name, self.fails)


class _BadFile:
    def __init__(self, file, log, fails):
        self._file, self._log, self._fails = file, log, fails

    def __getattr__(self, name):
        if (number := self._fails.get((self._log, name))) is not None:
            raise OSError(number, "the disk is gone")
        return getattr(self._file, name)


def told(outbox):
    """The problems as `pushrep status` tells them, and its exit code."""
    return [(one["problem"], one["subject"]) for one in look_at(str(outbox.directory))[0]["problems"]], run(
        ["status", str(outbox.directory)]
    )


def test_a_log_that_stopped_is_a_problem_from_its_first_refused_append_and_unready_if_all_are(tmp_path, free_port):
    disk, url = BadLogs(), f"http://127.0.0.1:{free_port}"
    health = HealthSettings(listen=f"127.0.0.1:{free_port}")
    with Outbox.open(tmp_path / "o", "orders", 2, "billing", health=health, filesystem=disk) as outbox:
        for partition in range(2):
            outbox.append(partition, b"before").result(WAIT_S)
        assert told(outbox) == ([], 0)
        disk.fails["orders-0", "sync"] = errno.EIO
        before_ms = time.time_ns() // 1_000_000
        with pytest.raises(DeliveryFailed, match="the disk is gone"):
            outbox.append(0, b"lost").result(WAIT_S)
        status, words, answer = ready(url)
        assert (status, words) == (200, ["log_stopped"]), "the other one takes appends"
        assert told(outbox) == ([("log_stopped", "partition 0")], 1)
        (problem,) = answer["problems"]
        assert before_ms <= problem["since_ms"] <= time.time_ns() // 1_000_000
        assert "the disk is gone" in problem["why"]
        page = get(f"{url}/metrics")[1].decode()
        assert re.search(r'pushrep_problem\{[^}]*problem="log_stopped"[^}]*\} 1.0', page)
        assert re.search(r"pushrep_outbox_stopped_partitions\{[^}]*\} 1.0", page)
        outbox.append(1, b"the other goes on").result(WAIT_S)
        disk.fails["orders-1", "sync"] = errno.EIO
        with pytest.raises(DeliveryFailed):
            outbox.append(1, b"lost").result(WAIT_S)
        assert ready(url)[:2] == (503, ["log_stopped"])
        assert told(outbox) == ([("log_stopped", "2 of 2 partitions")], 1)
        disk.fails.clear()


def test_a_parking_log_that_takes_entries_makes_no_service_ready(tmp_path, free_port):
    disk, url = BadLogs(), f"http://127.0.0.1:{free_port}"
    with Outbox.open(
        tmp_path / "o",
        "orders",
        1,
        "billing",
        kafka=KafkaDestination(bootstrap_servers="127.0.0.1:1", on_refused="park"),
        health=HealthSettings(listen=f"127.0.0.1:{free_port}"),
        filesystem=disk,
        config=OutboxConfig(open_timeout_s=0.1),
    ) as outbox:
        outbox.append(0, b"before").result(WAIT_S)
        assert ready(url)[0] == 200
        disk.fails["orders-0", "sync"] = errno.EIO
        with pytest.raises(DeliveryFailed, match="the disk is gone"):
            outbox.append(0, b"lost").result(WAIT_S)
        assert ready(url)[0] == 503
        disk.fails.clear()


def test_a_parking_log_that_stopped_or_is_damaged_blocks_shipping_and_no_opening(tmp_path):
    """faults S1: what it blocks is said truly: requests append to the partitions, and only shipping to this one."""
    disk = BadLogs()

    def opened(**more):
        kafka = KafkaDestination(bootstrap_servers="127.0.0.1:1", on_refused="park")
        config = OutboxConfig(open_timeout_s=0.1)
        return Outbox.open(tmp_path / "o", "orders", 2, "billing", kafka=kafka, filesystem=disk, config=config)

    def told(outbox):
        found = [one for one in look_at(str(outbox.directory))[0]["problems"] if one["problem"] != "kafka_away"]
        return [(one["problem"], one["subject"], one["blocks"], one["command"]) for one in found]

    def park(outbox, offset):
        (record,) = outbox.log(0).records(offset, offset + 1)
        refused = RefusedByTopic("orders", 0, offset, directory=outbox.directory, code=Code.INVALID_RECORD, why="no")
        outbox.facts.shipping.parking.park(record, refused, 1_000)

    with opened() as outbox:
        outbox.append_many(0, [b"a", b"b"]).result(WAIT_S)
        park(outbox, 0)
        disk.fails["orders.parked-2", "sync"] = errno.EIO
        with pytest.raises(DeliveryFailed, match="the disk is gone"):
            park(outbox, 1)
        at = outbox.directory
        stopped = ("log_stopped", "parking log", "shipping", f"pushrep status {at} --partitions")
        parked = ("records_parked", "topic orders", "nothing", f"pushrep outbox parked list --directory {at}")
        assert told(outbox) == [stopped, parked]
        assert outbox.status().is_ready
        disk.fails.clear()
    segment = tmp_path / "o" / "orders.parked-2" / f"{0:020d}.log"
    data = bytearray(segment.read_bytes())
    data[80] ^= 1
    segment.write_bytes(data)
    (tmp_path / "o" / ".pushrep_cleanshutdown").unlink()
    with opened() as outbox:
        outbox.append(1, b"goes on").result(WAIT_S)
        damaged = ("damaged", "parking log", "shipping", f"pushrep log verify {outbox.directory} orders.parked-2")
        assert damaged in told(outbox)
        assert outbox.status().is_ready


def test_a_log_that_refuses_an_append_is_a_problem_until_it_takes_one(tmp_path, free_port, monkeypatch):
    disk, url = BadLogs(), f"http://127.0.0.1:{free_port}"
    health = HealthSettings(listen=f"127.0.0.1:{free_port}")
    with Outbox.open(tmp_path / "o", "orders", 1, "billing", health=health, filesystem=disk) as outbox:
        outbox.append(0, b"before").result(WAIT_S)
        disk.fails["orders-0", "write_at"] = errno.EDQUOT
        for _ in range(2):
            with pytest.raises(DeliveryFailed, match="quota"):
                outbox.append(0, b"refused").result(WAIT_S)
            assert ready(url)[:2] == (200, ["log_stopped"]), "the next append may be taken"
        monkeypatch.setattr(outbox_status, "PAUSE_MS", 0)
        assert ready(url)[0] == 503
        monkeypatch.setattr(outbox_status, "TRIED_AGAIN_MS", 0)
        assert ready(url)[0] == 200, "without requests nobody would learn that it takes some again"
        disk.fails.clear()
        outbox.append(0, b"taken").result(WAIT_S)
        assert ready(url)[:2] == (200, [])


def test_workers_share_a_health_port_and_each_answers_for_all_of_them(tmp_path, free_port, monkeypatch):
    disk, url = BadLogs(), f"http://127.0.0.1:{free_port}"
    given = {"health": HealthSettings(listen=f"127.0.0.1:{free_port}"), "filesystem": disk}

    def until_both_answered(what):
        """The system picks a worker by the connection, so of twenty each answers some."""
        (answer,) = {what() for _ in range(20)}
        return answer

    with Outbox.open_slot(tmp_path, "orders", 1, "p", **given) as first:
        with Outbox.open_slot(tmp_path, "orders", 1, "p", **given) as second:
            for outbox in (first, second):
                outbox.append(0, b"a").result(WAIT_S)
            disk.fails["orders-0", "write_at"] = errno.EDQUOT
            with pytest.raises(DeliveryFailed):
                second.append(0, b"refused").result(WAIT_S)

            def told():
                status, _, answer = ready(url)
                return status, *((one["problem"], one["subject"]) for one in answer["problems"])

            assert until_both_answered(told) == (200, ("log_stopped", "slot-1, partition 0"))
            appended = r'pushrep_append_records_total\{outbox="([^"]+)"[^}]*\} 1.0'
            ids = {first.identity.outbox_id, second.identity.outbox_id}
            seen = until_both_answered(lambda: tuple(sorted(re.findall(appended, get(f"{url}/metrics")[1].decode()))))
            assert set(seen) == ids
            disk.fails.clear()
        assert ready(url)[:2] == (200, [])
        shipped = ShippingProgress(partitions={0: PartitionProgress(0, 1, 0)})
        write_progress(REAL_FILESYSTEM, second.directory, {"orders": shipped})
        monkeypatch.setattr(outbox_status, "SLOT_WAITS_MS", 0)
        wait_until(lambda: ready(url)[1] == ["slot_waits"], "no worker ships what the second left")
        waits = f'pushrep_problem{{outbox="{second.identity.outbox_id}",problem="slot_waits",topic="orders"}} 1.0'
        assert waits in get(f"{url}/metrics")[1].decode(), "and its alert fires"
    with pytest.raises(urllib.error.URLError):
        get(f"{url}/livez")


def test_records_that_wait_for_a_disk_that_hangs_are_a_problem(tmp_path, free_port, monkeypatch):
    disk, url = GatedDisk(), f"http://127.0.0.1:{free_port}"
    health = HealthSettings(listen=f"127.0.0.1:{free_port}")
    with Outbox.open(tmp_path / "o", "orders", 1, "billing", health=health, filesystem=disk) as outbox:
        outbox.append(0, b"before").result(WAIT_S)
        monkeypatch.setattr(outbox_status, "PAUSE_MS", 50)
        with disk.hanging():
            receipt = outbox.append(0, b"hangs")
            wait_until(lambda: ready(url)[1] == ["not_acknowledged"], "it waits")
            status, _, answer = ready(url)
            assert (status, answer["problems"][0]["blocks"]) == (200, "acknowledgements")
            assert answer["problems"][0]["why"] == "records wait for the disk"
        receipt.result(WAIT_S)
        assert ready(url)[1] == []


def test_an_outbox_without_its_members_is_not_ready_and_ready_once_it_leads(world, free_port, monkeypatch):
    health = HealthSettings(listen=f"127.0.0.1:{free_port}")
    url = f"http://127.0.0.1:{free_port}"
    for index in (1, 2):
        world.node(index)
        world.nodes[index].stop()
    with open_outbox(world, 1, 2, open_timeout_s=0.1, replica_lag_max_ms=200, health=health) as outbox:
        status, words, _ = ready(url)
        assert (status, words[0]) == (503, "not_leading"), "it never led"
        assert get(f"{url}/leader")[0] == 503
        world.node(1)
        wait_until(lambda: ready(url)[0] == 200, "two of three are enough")
        assert get(f"{url}/leader") == (200, b'{"leads": true, "member": 0, "address": ""}\n')
        wait_until(lambda: ready(url)[1] == ["replica_away"], "an operator is told of the third")
        world.nodes[1].stop()
        receipt = outbox.append(0, b"held by one alone")
        wait_until(lambda: ready(url)[1][0] == "under_min_insync", "one is too few")
        assert ready(url)[0] == 200, "members come back: the moment is no reason to send requests elsewhere"
        monkeypatch.setattr(outbox_status, "PAUSE_MS", 0)
        assert ready(url)[0] == 503
        world.node(1)
        wait_until(lambda: ready(url)[0] == 200, "two are enough again")
        receipt.result(WAIT_S)


def test_an_outbox_whose_in_sync_member_hangs_is_not_ready_until_records_are_acknowledged(
    world, free_port, monkeypatch
):
    """faults S2: 503 "if ALL was impossible for 5 s; 200 again after a success"."""
    disk, url = GatedDisk(), f"http://127.0.0.1:{free_port}"
    health = HealthSettings(listen=f"127.0.0.1:{free_port}")
    world.node(1, filesystem=disk)
    with open_outbox(world, 1, replica_lag_max_ms=60_000, min_insync_replicas=2, health=health) as outbox:
        outbox.append(0, b"before").result(WAIT_S)
        with disk.hanging():
            receipt = outbox.append(0, b"waits for the member")
            wait_until(lambda: outbox.log(0).log_end_offset == 2, "it is in the log")
            assert ready(url)[0] == 200, "a moment is no reason to send requests elsewhere"
            monkeypatch.setattr(outbox_status, "PAUSE_MS", 50)
            wait_until(lambda: ready(url)[:2] == (503, ["not_acknowledged"]), "it acknowledges nothing")
        receipt.result(WAIT_S)
        assert ready(url)[:2] == (200, [])


def test_a_kafka_away_for_longer_than_the_limit_is_a_problem_and_ready(tmp_path, free_port, monkeypatch):
    monkeypatch.setattr(outbox_status, "KAFKA_AWAY_MS", 200)
    held = reserve()
    with held:
        kafka = KafkaDestination(bootstrap_servers=f"127.0.0.1:{held.getsockname()[1]}")
        file = tmp_path / "billing.toml"
        file.write_text(
            f'[outbox]\ndirectory = "{tmp_path / "outbox"}"\ntopic = "orders"\npartitions = 1\nproducer = "billing"\n'
            "open_timeout_s = 0.1\n"
        )
        settings = outbox_settings(file, {"PUSHREP_HEALTH_LISTEN": f"127.0.0.1:{free_port}"}, kafka=kafka)
        with Outbox.open(**outbox_arguments(**settings)) as outbox:
            outbox.append(0, b"later").result(WAIT_S)
            wait_until(lambda: ready(f"http://127.0.0.1:{free_port}")[1], "the limit is over")
            status, words, answer = ready(f"http://127.0.0.1:{free_port}")
            assert (status, words) == (200, ["kafka_away"])
            assert [one["problem"] for one in look_at(str(outbox.directory))[0]["problems"]] == words
            page = get(f"http://127.0.0.1:{free_port}/metrics")[1].decode()
            lines = [
                line for line in page.splitlines() if line.startswith("pushrep_problem{") and line.endswith(" 1.0")
            ]
            assert [re.search(r'problem="(\w+)"', line)[1] for line in lines] == words, "metrics show the same value"
            (problem,) = answer["problems"]
            assert "1 records are not shipped" in problem["why"]
            assert 0 <= time.time() * 1000 - problem["since_ms"] < 1000 * WAIT_S


def test_a_probe_needs_no_certificate_and_a_scraper_does(tmp_path):
    made = make_certificates(tmp_path)

    def served(name):
        return {"cert": str(made / f"{name}.pem"), "key": str(made / f"{name}.key"), "ca": str(made / "ca.pem")}

    shutil.copy(made / "node.pem", made / "mine.pem")
    shutil.copy(made / "node.key", made / "mine.key")
    settings = HealthSettings(listen="127.0.0.1:0", **served("mine"))
    probe = ssl._create_unverified_context()  # as a kubelet
    scraper = mutual_tls(cert=made / "billing.pem", key=made / "billing.key", ca=made / "ca.pem")
    stranger = mutual_tls(cert=made / "stranger.pem", key=made / "stranger.key", ca=made / "ca.pem")
    problems = (Problem("damaged", "partition 3", "bits", 7),)
    with HealthServer(settings, lambda: PlaceStatus(found=problems), CollectorRegistry()) as server:
        assert get(f"{server.url}/livez", probe)[0] == 200
        status, _, answer = ready(server.url, probe)
        assert (status, answer["problems"]) == (503, [{"problem": "damaged", "since_ms": 7, "blocks": "appends"}])
        assert get(f"{server.url}/leader", probe) == (503, b'{"leads": false}\n')
        assert get(f"{server.url}/metrics", probe)[0] == 403
        assert ready(server.url, scraper)[2]["problems"][0]["subject"] == "partition 3"
        assert get(f"{server.url}/leader", scraper)[1] == b'{"leads": false, "member": null, "address": ""}\n'
        assert get(f"{server.url}/metrics", scraper)[0] == 200
        with pytest.raises((urllib.error.URLError, ssl.SSLError, ConnectionError)):
            get(f"{server.url}/livez", stranger)
        shown = ssl.get_server_certificate(server.address)
        shutil.copy(made / "elsewhere.key", made / "mine.key")
        (made / "mine.pem").write_text("not yet whole")
        assert ssl.get_server_certificate(server.address) == shown, "the last one that could be used"
        shutil.copy(made / "elsewhere.pem", made / "mine.pem")
        assert ssl.get_server_certificate(server.address) != shown, "renewed, without a restart"


def test_probes_need_no_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)  # as if it was not installed
    monkeypatch.delitem(sys.modules, "pushrep.status.metrics", raising=False)
    with HealthServer(PORT_0, PlaceStatus) as server:
        assert (get(f"{server.url}/livez")[0], ready(server.url)[0], get(f"{server.url}/leader")[0]) == (200, 200, 503)
        status, why = get(f"{server.url}/metrics")
        assert (status, why) == (404, b"no metrics: install pushrep with the extra metrics\n")


def test_a_node_answers_for_its_health_and_for_nothing_else(tmp_path):
    serve = ("replica", "serve", tmp_path / "copies", "--listen", "127.0.0.1:0")
    with PythonProgram("-m", "pushrep.cli.main", *serve, PUSHREP_REPLICA_SERVE_METRICS="127.0.0.1:0") as node:
        try:
            url = node.stdout.readline().strip().rpartition(" ")[2].removesuffix("/metrics")
            assert ready(url)[:2] == (200, [])
            assert get(f"{url}/livez")[0] == 200
            assert b"pushrep_node_replica_epoch" in get(f"{url}/metrics")[1]
            assert [get(url + path)[0] for path in ("/healthz", "/nonsense", "/")] == [404, 404, 404]
        finally:
            node.terminate()
    assert node.returncode == 0
