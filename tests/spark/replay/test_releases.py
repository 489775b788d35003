"""The main cases of each form under other releases of Spark, each with a separate Python; and the replacements for
missing features.

`make spark-releases` creates those Pythons and prints PUSHREP_SPARK_PYTHONS=<python>:<python>:...
"""

import json
import os
import signal
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from filtering.stream_metadata import StreamMetadata
from spark_jobs import filter_frame, spark_internals
from spark_jobs.errors import SparkUnfit
from spark_jobs.spark_internals import a_task_a_number
from tests.spark.replay.test_restored_parts import cells
from tests.spark_programs import PYTHONS

pytestmark = pytest.mark.spark

TABLES = Path(__file__).parents[3] / ".cache" / "spark-tables"
FORMS = ("frames", "batches", "operator", "applied")
SOURCE = {
    "3.5": "source pushrep needs Spark 4.0",
    "4.0": "a stream of source pushrep needs Spark 4.2",
    "4.1": "a stream of source pushrep needs Spark 4.2",
    "4.2": "ran",
    "4.3": "ran",
}


def tables_of(python):
    """The directories of the jars of Delta and Iceberg for this Python's Spark."""
    asked = [python, "-c", "import pyspark; print(pyspark.__version__.rpartition('.')[0])"]
    release = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    if not list((TABLES / release).glob("*.jar")):
        pytest.skip(f"no jars of Delta and Iceberg for Spark {release}: make spark-releases fetches what there is")
    return TABLES / release


def run(python, program, *words):
    """A program beside this file, in that Python, to its end."""
    path = Path(__file__).with_name(program)
    own = {**os.environ, "PYSPARK_PYTHON": python, "PYTHONPATH": str(path.parents[3])}
    return subprocess.run([python, path, *words], env=own, capture_output=True, text=True, timeout=900)


@pytest.mark.skipif(not PYTHONS, reason="make spark-releases names Pythons with other releases of pyspark")
@pytest.mark.parametrize("python", PYTHONS)
def test_each_form_runs_or_is_refused_by_name(python, tmp_path):
    ran = run(python, "releases_program.py", tmp_path)
    assert ran.returncode == 0, ran.stderr[-4000:]
    told = json.loads(ran.stdout.splitlines()[-1])
    assert [told[form] for form in FORMS] == ["ran"] * len(FORMS)
    assert told["source"].startswith(SOURCE[told["release"]])


@pytest.mark.skipif(not PYTHONS, reason="make spark-releases names Pythons with other releases of pyspark")
@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("form", ["delta", "iceberg"])
def test_a_table_with_transactions_is_right_after_a_startpoint_killed_around_its_commit(python, form, tmp_path):
    jars = tables_of(python)
    for die_at in ("before", "after", "-"):
        ran = run(python, "tables_program.py", tmp_path, jars, form, die_at)
        assert ran.returncode == (0 if die_at == "-" else -signal.SIGKILL), (die_at, ran.stderr[-4000:])
    assert ran.stdout.splitlines()[-1] == "ran"


@pytest.mark.skipif(not PYTHONS, reason="make spark-releases names Pythons with other releases of pyspark")
@pytest.mark.parametrize("python", PYTHONS)
def test_faults_f7_after_a_restore_a_delta_table_has_each_record_once_or_is_refused_by_name(python, tmp_path):
    ran = run(python, "tables_program.py", tmp_path, tables_of(python), "delta", "restored")
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert json.loads(ran.stdout.splitlines()[-1]) == {parts: told for kind, parts, told in cells() if kind == "Delta"}


def test_without_to_arrow_and_inner_names_rows_are_judged_the_same(frames, logs, monkeypatch):
    """Features that Spark 3.5 and 4.0 lack are switched off."""
    rows = [*logs.random_topic(5, rows=60), logs.Row("t", 0, 0, StreamMetadata(1, 0, 9), None, "a")]
    frame = frames.split(rows, 2)
    monkeypatch.setattr(spark_internals, "has_to_arrow", lambda _: False)
    monkeypatch.setattr(spark_internals, "asked", lambda _: None)
    result = filter_frame(frame)
    assert not result.verdict.by_runs, "the rows should have been decided one by one"
    assert logs.ids(result.rows) == logs.Model().kept(rows)


def test_before_4_1_a_number_s_rows_are_in_one_task_too(spark, monkeypatch):
    """The relay's order: one producer has all records of a source partition."""
    rows = spark.range(200).selectExpr("id", "cast(id % 7 as int) number").repartition(5)
    for version, most in (("4.1.0", 1), ("4.0.5", 7)):
        monkeypatch.setattr("pyspark.__version__", version)
        found = (
            a_task_a_number(rows, 7, "number").selectExpr("number", "spark_partition_id() task").distinct().collect()
        )
        assert sorted(row.number for row in found) == list(range(7)), "no number in two tasks"
        assert max(Counter(row.task for row in found).values()) <= most


def test_an_older_spark_is_told_by_name_what_it_lacks(monkeypatch, spark):
    from spark_jobs import register_sources

    monkeypatch.setattr("pyspark.__version__", "3.5.9")
    with pytest.raises(SparkUnfit, match=r"source pushrep needs Spark 4.0 or newer: this is 3.5.9"):
        register_sources(spark)
