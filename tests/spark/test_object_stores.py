"""Table, marks and checkpoint in S3's servers: killed at each write, two drivers at once, and who is refused.

`make object-stores` fetches what this needs: S3A, s3proxy (over a directory) and moto, and names them.
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

JARS, SERVER, MOTO = (os.environ.get(f"PUSHREP_S3_{name}", "") for name in ("JARS", "SERVER", "MOTO"))
PROGRAM = Path(__file__).parent / "s3" / "program.py"
SETTINGS = """\
s3proxy.authorization=none
s3proxy.endpoint={endpoint}
s3proxy.ignore-unknown-headers=true
jclouds.provider=filesystem
jclouds.filesystem.basedir={place}
"""

if not JARS:
    pytest.skip("make object-stores names S3A's jars and the servers", allow_module_level=True)


@pytest.fixture(scope="module", params=["s3proxy", "moto"])
def endpoint(request, tmp_path_factory):
    """Of a server with a bucket, ended with the tests."""
    place, held = tmp_path_factory.mktemp(request.param), reserve()
    port = held.getsockname()[1]
    endpoint = f"http://127.0.0.1:{port}"
    if request.param == "s3proxy":
        (place / "settings").write_text(SETTINGS.format(endpoint=endpoint, place=place / "store"))
        (place / "store").mkdir()
        command = ["java", "-DLOG_LEVEL=warn", "-cp", f"{SERVER}/*", "org.gaul.s3proxy.Main"]
        command += ["--properties", place / "settings"]
    else:
        command = [MOTO, "-H", "127.0.0.1", "-p", str(port)]
    held.close()
    with (place / "said").open("w") as output, subprocess.Popen(command, stdout=output, stderr=output) as server:
        try:
            while not _has_bucket(endpoint):
                assert server.poll() is None, (place / "said").read_text()[-2000:]
            yield endpoint
        finally:
            server.kill()


def _has_bucket(endpoint):
    """Whether it answered the request for one."""
    with contextlib.suppress(urllib.error.URLError, ConnectionError):
        made = urllib.request.Request(f"{endpoint}/bucket", method="PUT")
        with urllib.request.urlopen(made, timeout=60) as answer:
            return answer.status == 200
    return False


@pytest.fixture
def programs(tmp_path):
    with SparkPrograms(tmp_path) as programs:
        yield programs


def told(process):
    out, _ = process.communicate(timeout=1500)
    assert process.returncode == 0, said(process)
    return json.loads(out.splitlines()[-1])


def test_stopped_at_each_write_and_run_again_the_table_is_sqls_answer(programs, endpoint):
    points = told(programs.start([sys.executable, PROGRAM, "stops", endpoint, JARS]))["points"]
    assert points >= 20, "before and behind each write of two batches"


def test_of_two_drivers_one_is_refused_and_a_store_that_lets_both_is_named(programs, endpoint):
    seen = told(programs.start([sys.executable, PROGRAM, "drivers", endpoint, JARS]))
    assert "written by another driver while batch 0 of query q ran" in seen["second"]
    assert (seen["stands"], seen["again"]) == ("first", False)
    assert "unfit/marks: of two drivers" in seen["unfit"]
    assert seen["left"] == []
    assert "a batch is one there" in seen["partitioned"]


def test_a_query_killed_in_a_batch_goes_on_with_its_checkpoint_in_the_store(request, programs, endpoint, tmp_path):
    """s3proxy lists no empty directory, and Spark wants to find those of its checkpoint: there it lies on this disk."""
    in_store = request.node.callspec.params["endpoint"] == "moto"
    checkpoint = "s3a://bucket/query/checkpoint" if in_store else str(tmp_path / "checkpoint")
    killed = programs.start([sys.executable, PROGRAM, "query", endpoint, JARS, 2, checkpoint])
    assert killed.stdout.readline() == "in batch 1\n", said(killed)
    kill_session(killed)
    finished = programs.start([sys.executable, PROGRAM, "query", endpoint, JARS, 3, checkpoint])
    assert told(finished)["rows"] == 7
