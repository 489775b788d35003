"""Table, marks and checkpoint in object stores: killed at each write, two drivers at once, and who is refused.

`make object-stores` fetches what this needs, and names it: Hadoop's clients of S3, of Azure (ABFS, a flat account by
its Blob endpoint) and of Google; s3proxy (over a directory), moto, Azurite and fake-gcs-server.
"""

import contextlib
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.ports import reserve
from tests.spark_programs import SparkPrograms, kill_session, said

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(1800)]

NAMES = ("JARS", "S3PROXY", "MOTO", "AZURITE", "GCS")
JARS, *SERVERS = (os.environ.get(f"PUSHREP_STORES_{name}", "") for name in NAMES)
SERVERS = dict(zip(map(str.lower, NAMES[1:]), SERVERS, strict=True))
PROGRAM = Path(__file__).parent / "stores" / "program.py"
SETTINGS = """\
s3proxy.authorization=none
s3proxy.endpoint={endpoint}
s3proxy.ignore-unknown-headers=true
jclouds.provider=filesystem
jclouds.filesystem.basedir={place}
"""
LOGBACK = """\
<configuration>
  <appender name="said" class="ch.qos.logback.core.ConsoleAppender">
    <encoder><pattern>%msg%n</pattern></encoder>
  </appender>
  <root level="warn"><appender-ref ref="said"/></root>
</configuration>
"""
ACCOUNT, KEY = "tests.dfs.core.windows.net", "dGVzdHM="
MIB = str(1 << 20)

if not JARS:
    pytest.skip("make object-stores names the clients' jars and the servers", allow_module_level=True)


@pytest.fixture(scope="module", params=SERVERS)
def store(request, tmp_path_factory):
    """A bucket of a server, which ends with the tests: its root, and the settings of Hadoop's client."""
    name, place, held = request.param, tmp_path_factory.mktemp(request.param), reserve()
    if not SERVERS[name]:
        pytest.skip(f"make object-stores could not fetch {name}")
    at = f"127.0.0.1:{held.getsockname()[1]}"
    command, asked, root, settings = described(name, at, place)
    held.close()
    own = os.environ | {"AZURITE_ACCOUNTS": f"tests:{KEY}"}
    with (
        (place / "said").open("w") as output,
        subprocess.Popen(command, cwd=place, env=own, stdout=output, stderr=output) as server,
    ):
        try:
            while not _answers(asked):
                assert server.poll() is None, (place / "said").read_text()[-2000:]
            yield root, settings
        finally:
            server.kill()


def described(name, at, place):
    """How to start a server, the request that creates a bucket, and the client's settings."""
    host, port = at.split(":")
    if name == "azurite":
        command = [SERVERS[name], "--blobHost", host, "--blobPort", port]
        command += ["--skipApiVersionCheck", "--inMemoryPersistence"]
        return command, urllib.request.Request(f"http://{at}/"), f"abfs://bucket@{ACCOUNT}", azure_settings(at)
    if name == "gcs":
        command = [SERVERS[name], "-scheme", "http", "-backend", "memory"]
        command += ["-host", host, "-port", port, "-public-host", at]
        named = {"Content-Type": "application/json"}
        asked = urllib.request.Request(f"http://{at}/storage/v1/b?project=p", b'{"name": "bucket"}', named)
        return command, asked, "gs://bucket", google_settings(at)
    command = [SERVERS[name], "-H", host, "-p", port]
    if name == "s3proxy":
        (place / "settings").write_text(SETTINGS.format(endpoint=f"http://{at}", place=place / "store"))
        (place / "store").mkdir()
        (place / "logback.xml").write_text(LOGBACK)  # without it every byte of every request is logged
        command = ["java", f"-Dlogback.configurationFile={place / 'logback.xml'}", "-cp", f"{SERVERS[name]}/*"]
        command += ["org.gaul.s3proxy.Main", "--properties", place / "settings"]
    return command, urllib.request.Request(f"http://{at}/bucket", method="PUT"), "s3a://bucket", s3_settings(at)


def s3_settings(at):
    return {
        "fs.s3a.endpoint": f"http://{at}",
        "fs.s3a.endpoint.region": "us-east-1",
        "fs.s3a.access.key": "a",
        "fs.s3a.secret.key": "b",
        "fs.s3a.path.style.access": "true",
    }


def azure_settings(at):
    return {
        "fs.azure.abfs.endpoint": at,
        "fs.azure.always.use.https": "false",
        "fs.azure.networking.library": "JDK_HTTP_URL_CONNECTION",
        "fs.azure.account.auth.type": "SharedKey",
        f"fs.azure.account.key.{ACCOUNT}": KEY,
        "fs.azure.account.hns.enabled": "false",
        "fs.azure.fns.account.service.type": "BLOB",
        "fs.azure.ingress.service.type": "BLOB",
        "fs.azure.createRemoteFileSystemDuringInitialization": "true",
    }


def google_settings(at):
    """Sizes as numbers: Hadoop 3.5 has defaults of the same names with unit letters, for its own client."""
    sizes = ("block.size", "outputstream.buffer.size", "inputstream.inplace.seek.limit")
    sizes += ("inputstream.min.range.request.size", "rewrite.max.chunk.size")
    return {f"fs.gs.{name}": MIB for name in sizes} | {
        "fs.gs.impl": "com.google.cloud.hadoop.fs.gcs.GoogleHadoopFileSystem",
        "fs.AbstractFileSystem.gs.impl": "com.google.cloud.hadoop.fs.gcs.GoogleHadoopFS",
        "fs.gs.client.type": "HTTP_API_CLIENT",
        "fs.gs.storage.root.url": f"http://{at}/",
        "fs.gs.auth.type": "UNAUTHENTICATED",
        "fs.gs.project.id": "p",
        "fs.gs.operation.move.enable": "false",  # the server doesn't know this call; without it the client copies
    }


def _answers(asked):
    """Whether the server answered; for a request that creates the bucket, whether it succeeded."""
    with contextlib.suppress(urllib.error.URLError, ConnectionError):
        try:
            with urllib.request.urlopen(asked, timeout=60) as answer:
                return answer.status == 200
        except urllib.error.HTTPError:
            return asked.get_method() == "GET"
    return False


@pytest.fixture
def programs(tmp_path):
    with SparkPrograms(tmp_path) as programs:
        yield programs


def told(process):
    out, _ = process.communicate(timeout=1500)
    assert process.returncode == 0, said(process)
    return json.loads(out.splitlines()[-1])


def arguments(what, store, *more):
    root, settings = store
    return [sys.executable, PROGRAM, what, root, json.dumps(settings), JARS, *more]


def test_stopped_at_each_write_and_run_again_the_table_is_sqls_answer(programs, store):
    points = told(programs.start(arguments("stops", store)))["points"]
    assert points >= 20, "before and behind each write of two batches"


def test_of_two_drivers_one_is_refused_and_a_store_that_lets_both_is_named(request, programs, store):
    seen = told(programs.start(arguments("drivers", store)))
    assert "written by another driver while batch 0 of query q ran" in seen["second"]
    if request.node.callspec.params["store"] != "s3proxy":  # over a directory it looks, and then writes
        assert all(made == [stands] for made, stands in seen["at_once"]), seen["at_once"]
    assert (seen["again"], seen["aside"], seen["left"]) == (False, [], [])
    assert "a batch is one there" in seen["partitioned"]
    if store[0].startswith("s3a:"):  # the others' clients can't be told to write without a condition
        assert "unfit/marks: of two drivers" in seen["unfit"]


def test_a_query_killed_in_a_batch_goes_on_with_its_checkpoint_in_the_store(request, programs, store, tmp_path):
    """s3proxy does not list empty directories, which Spark needs for its checkpoint: there the checkpoint is on the
    local disk.
    """
    in_store = request.node.callspec.params["store"] != "s3proxy"
    checkpoint = f"{store[0]}/query/checkpoint" if in_store else str(tmp_path / "checkpoint")
    killed = programs.start(arguments("query", store, 2, checkpoint))
    assert killed.stdout.readline() == "in batch 1\n", said(killed)
    kill_session(killed)
    finished = programs.start(arguments("query", store, 3, checkpoint))
    assert told(finished)["rows"] == 7
