"""The examples in README.md and docs/ run unchanged, each file in an empty directory.

Each file runs in a separate process, except those with Spark, whose start takes longer than a page.
"""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.class_archives import FORKLESS, INTERPRETED
from tests.spark_programs import QUIET, WORKERS_PYTHON

ROOT = Path(__file__).parents[2]
DOCS = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
RUNNER = Path(__file__).with_name("doc_blocks.py")
TIMEOUT_S = 900
OF_A_READER = " ".join(re.findall(r"spark\.[\w.]+(?==)", f"{QUIET} {FORKLESS} {INTERPRETED}"))
"""Settings that a reader's Spark has as they are, and so has that of the last page."""
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s#]*)(?:#([^)\s]+))?\)|src(?:set)?=\"([^\"]+)\"")

_spec = importlib.util.spec_from_file_location("doc_blocks", RUNNER)
doc_blocks = importlib.util.module_from_spec(_spec)
sys.modules["doc_blocks"] = doc_blocks  # dataclasses look their module up
_spec.loader.exec_module(doc_blocks)


def name(path):
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


def files_with(needs_spark):
    """Files with a tested block; with needs_spark, those that have one for Spark."""
    for path in DOCS:
        found = doc_blocks.blocks_of(path)
        tested = [block for block in found if block.skip_reason is None and not block.needs_kafka]
        if any(block.needs_spark == needs_spark for block in tested):
            yield path


def run(paths, directory, *flags):
    """Run the blocks of some files; returns the finished process."""
    # Spark's workers are forked: a busy machine has no time to start each.
    own = {"PUSHREP_DRIVER_PYTHON": WORKERS_PYTHON, "PYSPARK_SUBMIT_ARGS": f"{QUIET} pyspark-shell"}
    own["PUSHREP_TESTS_LAST_PAGE_WITHOUT"] = OF_A_READER
    command = [sys.executable, str(RUNNER), *map(str, paths), *flags]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=directory, env=os.environ | own, start_new_session=True, **pipes) as running:
        try:
            printed = running.communicate(timeout=TIMEOUT_S)
        finally:  # what a page leaves in the background, or left when it failed
            with suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, running.returncode, *printed)


def report(done):
    return f"an example failed\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}"


@pytest.mark.timeout(TIMEOUT_S + 30)
@pytest.mark.parametrize("path", sorted({*files_with(needs_spark=False)} - {*files_with(needs_spark=True)}), ids=name)
def test_examples_run(path, tmp_path):
    done = run([path], tmp_path)
    assert done.returncode == 0, report(done)


@pytest.mark.spark
@pytest.mark.timeout(TIMEOUT_S + 30)
def test_examples_run_with_spark(tmp_path):
    """The whole files, which run here alone: what comes before a Spark block made the data that it reads."""
    readme, *pages = files_with(needs_spark=True)
    assert readme.name == "README.md"
    done = run([*pages, readme], tmp_path, "--with-spark")
    assert done.returncode == 0, report(done)


def anchors(path):
    """The anchors of a page's headings, as GitHub makes them."""
    prose = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", [*DOCS, ROOT / "CHANGELOG.md"], ids=name)
def test_examples_are_marked_and_links_lead_somewhere(path):
    for block in doc_blocks.blocks_of(path):
        assert block.skip_reason != "", f"{name(path)}:{block.line}: no-test gives no reason"
        if block.language == "console" and block.skip_reason is None:
            assert doc_blocks.commands_of(block), f"{name(path)}:{block.line}: a console block without a `$ ` line"
    for link, anchor, picture in _LINK.findall(path.read_text(encoding="utf-8")):
        target = link or picture
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        page = path.parent / target if target else path
        assert page.exists(), f"{name(path)}: the link to {target} leads nowhere"
        if anchor and page.suffix == ".md":
            assert anchor in anchors(page), f"{name(path)}: {name(page)} has no heading #{anchor}"


SAMPLE = """\
# Sample
```python
from pathlib import Path
value = 1
```
```
plain fences are prose
```
```console
$ echo one \\
  > made-by-shell
one
$ python -c 'open("made-by-python", "w").close()'
```
   ```python
   assert value == 1, "the namespace is shared"
   assert Path("made-by-shell").read_text() == "one\\n"
   assert Path("made-by-python").exists()
   ```
<!-- no-test: needs a broker -->
```python
raise SystemExit("must not run")
```
<!-- spark -->
```python
Path("spark-ran").touch()
```
<!-- file: written.sh -->
```sh
touch by-a-file
```
```console
$ sh written.sh
```
"""


def test_the_runner_runs_what_it_should(tmp_path):
    path = tmp_path / "sample.md"
    path.write_text(SAMPLE)
    blocks = doc_blocks.blocks_of(path)
    assert [(b.language, b.line, b.needs_spark, b.skip_reason) for b in blocks] == [
        ("python", 3, False, None),
        ("console", 10, False, None),
        ("python", 16, False, None),
        ("python", 22, False, "needs a broker"),
        ("python", 26, True, None),
        ("sh", 30, False, None),
        ("console", 33, False, None),
    ]
    done = run([path], tmp_path)
    assert done.returncode == 0, report(done)
    assert not (tmp_path / "spark-ran").exists()
    assert (tmp_path / "by-a-file").exists()
    assert run([path], tmp_path, "--with-spark").returncode == 0
    assert (tmp_path / "spark-ran").exists()


def test_what_a_page_started_ends_with_it_and_a_kill_reaches_the_command_itself(tmp_path):
    path = tmp_path / "sample.md"
    path.write_text(
        "```console\n$ sleep 600 > left.txt 2>&1 & echo $! > left.pid\n"
        "$ pushrep replica serve copies --listen 127.0.0.1:0 > node.txt 2>&1 & echo $! > node.pid\n"
        "$ until grep -q listening node.txt; do sleep 0.1; done; kill -9 $(cat node.pid)\n```\n"
    )
    done = run([path], tmp_path)
    assert done.returncode == 0, report(done)
    for name in ("left", "node"):
        process = Path(f"/proc/{(tmp_path / f'{name}.pid').read_text().strip()}/cmdline")
        until = time.monotonic() + 30
        while process.exists() and process.read_bytes():  # empty: it is dead, and nobody has asked for its end yet
            assert time.monotonic() < until, f"{name} runs on"
            time.sleep(0.05)


def test_pages_that_run_beside_each_other_get_ports_of_their_own(tmp_path):
    path = tmp_path / "sample.md"
    path.write_text("```python\na, b, c = '127.0.0.1:7401', '127.0.0.1:7402', '127.0.0.1:7401'\n```\n")
    (one,), (two,) = (doc_blocks.with_free_ports(doc_blocks.blocks_of(path)) for _ in range(2))
    a, b, again = re.findall(r"127\.0\.0\.1:\d+", one.code)
    assert a == again != b
    assert not {a, b} & {"127.0.0.1:7401", "127.0.0.1:7402"}
    assert one.path == two.path == path


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("```python\n\n1 / 0\n```\n", 'sample.md", line 3'),
        ("```console\n$ true | false | true\n```\n", "sample.md:2: exit code 1 from: true | false | true"),
        ("text\n```python\nnever closed\n", "never closed"),
        ("```python\nimport warnings\nwarnings.warn('old')\n```\n", "UserWarning: old"),
    ],
)
def test_a_failing_example_fails_and_names_its_line(tmp_path, text, told):
    path = tmp_path / "sample.md"
    path.write_text(text)
    done = run([path], tmp_path)
    assert done.returncode != 0
    assert told in done.stderr


def test_a_page_finds_nothing_of_the_one_before(tmp_path):
    texts = {
        "first.md": "```python\nleft = open('left', 'w').close()\n```\n",
        "second.md": "```python\nimport os\nassert not os.listdir() and 'left' not in globals()\n```\n",
    }
    for title, text in texts.items():
        (tmp_path / title).write_text(text)
    (here := tmp_path / "here").mkdir()
    done = run([tmp_path / title for title in texts], here)
    assert done.returncode == 0, report(done)
