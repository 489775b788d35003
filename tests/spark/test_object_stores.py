"""Table, marks and checkpoint in object stores: killed at each write, two drivers at once, and who is refused.

`make object-stores` fetches what this needs, and names it: Hadoop's clients of S3, of Azure (ABFS, a flat account by
its Blob endpoint) and of Google; s3proxy, moto, Azurite and fake-gcs-server.
"""

import contextlib
import http.client
import json
import os
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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
jclouds.provider=transient
"""
"""In memory: over a directory s3proxy waits ten seconds wherever it is to delete a directory before what lies in it."""
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
        (place / "settings").write_text(SETTINGS.format(endpoint=f"http://{at}"))
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


class Unconditional(BaseHTTPRequestHandler):
    """A store's server whose conditional writes are answered as those of stores that don't know them."""

    protocol_version = "HTTP/1.1"
    timeout = 60

    def answer(self):
        body = self._body()
        condition = self.headers["If-None-Match"] is not None and self.command == "PUT"
        if condition and self.server.refuses:
            return self._say(501, {}, b"<Error><Code>NotImplemented</Code></Error>")
        del self.headers["If-None-Match"], self.headers["Transfer-Encoding"], self.headers["Content-Length"]
        path = self.path.replace("ifGenerationMatch=0", "ignored=0")
        connection = http.client.HTTPConnection(self.server.inner, timeout=60)
        with contextlib.closing(connection):
            connection.request(self.command, path, body or None, dict(self.headers.items()))
            found = connection.getresponse()
            return self._say(found.status, dict(found.getheaders()), found.read())

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = answer  # noqa: N815 - the names that the server calls

    def _body(self):
        if self.headers["Transfer-Encoding"] != "chunked":
            return self.rfile.read(int(self.headers["Content-Length"] or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _say(self, status, headers, body):
        self.send_response(status)
        for name, text in headers.items():
            if name.lower() not in {"transfer-encoding", "content-length", "connection", "date", "server"}:
                self.send_header(name, text)
        length = headers.get("Content-Length") if self.command == "HEAD" else str(len(body))
        self.send_header("Content-Length", length or "0")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        """Nothing: a test's output is its own."""


@contextlib.contextmanager
def unconditional(inner, *, refuses=False):
    """A server's address in front of that at `inner`, which ignores conditions, or refuses requests that have one."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Unconditional) as server:
        server.inner, server.refuses, server.daemon_threads = inner, refuses, True
        runs = threading.Thread(target=server.serve_forever)
        runs.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            runs.join()


def test_of_two_drivers_one_is_refused_and_a_store_that_lets_both_is_named(request, programs, store):
    root, settings = store
    with contextlib.ExitStack() as servers:
        unfit = {}
        if root.startswith("s3a:"):
            inner = settings["fs.s3a.endpoint"].removeprefix("http://")
            unfit["off"] = {"fs.s3a.create.conditional.enabled": "false"}
            for name, refuses in (("ignored", False), ("refused", True)):
                at = servers.enter_context(unconditional(inner, refuses=refuses))
                unfit[name] = {"fs.s3a.endpoint": f"http://{at}"}
        if root.startswith("gs:"):
            inner = settings["fs.gs.storage.root.url"].removeprefix("http://").removesuffix("/")
            at = servers.enter_context(unconditional(inner))
            unfit["ignored"] = {"fs.gs.storage.root.url": f"http://{at}/"}
        seen = told(programs.start(arguments("drivers", store, json.dumps(unfit))))
    assert "written by another driver while batch 0 of query q ran" in seen["second"]
    if request.node.callspec.params["store"] != "s3proxy":  # it looks, and then writes
        assert all(made == [stands] for made, stands in seen["at_once"]), seen["at_once"]
    assert (seen["again"], seen["aside"], seen["left"]) == (False, [], [[] for _ in unfit])
    assert "a batch is one there" in seen["partitioned"]
    assert "another driver began to write there" in seen["table"]
    assert seen["rows"] == 4
    for name in unfit:
        why = "its server refuses a file that" if name == "refused" else "of two drivers that make one new file there"
        assert f"unfit/{name}: {why}" in seen["unfit"][name]


def test_a_checkpoint_goes_back_and_another_query_is_refused_until_it_adopts(programs, store):
    seen = told(programs.start(arguments("back", store)))
    assert seen["q"] == [[0, "v0"], [0, "v1"], [0, "v2"], [0, "v5"], [1, "v6"], [1, "v7"], [1, "v8"]]
    assert "belong to query q (last batch 1), this is query r" in seen["MarksOfAnotherQuery"]
    assert "is written by query q, this is query r" in seen["TableNotOurs"]
    assert seen["r"] == [[0, "v0"], [0, "v1"], [0, "v2"], [0, "v5"], [1, "v6"]]


def test_a_query_killed_in_a_batch_goes_on_with_its_checkpoint_in_the_store(programs, store):
    killed = programs.start(arguments("query", store, 2))
    assert killed.stdout.readline() == "in batch 1\n", said(killed)
    kill_session(killed)
    finished = programs.start(arguments("query", store, 3))
    assert told(finished)["rows"] == 7
