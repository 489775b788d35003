"""What the repository's page is made of: workflow, forms and dependabot by their published schemas, one address."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from tests.house.floors import floors

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"
ADDRESS = "github.com/OWNER/pushrep"
"""The one placeholder for the repository's address. Who publishes replaces it everywhere, here too."""
PAGES = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
SCHEMAS = {
    "vendor.github-workflows": [*GITHUB.glob("workflows/*.yml")],
    "vendor.dependabot": [GITHUB / "dependabot.yml"],
    "vendor.github-issue-config": [GITHUB / "ISSUE_TEMPLATE" / "config.yml"],
    "vendor.github-issue-forms": [path for path in GITHUB.glob("ISSUE_TEMPLATE/*.yml") if path.name != "config.yml"],
}


@pytest.mark.parametrize("schema", SCHEMAS)
def test_a_file_keeps_to_its_published_schema(schema):
    assert SCHEMAS[schema], "no such file"
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, *map(str, SCHEMAS[schema])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_n11_each_week_the_lowest_versions_are_tried_and_none_is_below_a_hole_that_was_met():
    jobs = YAML(typ="safe").load(GITHUB / "workflows" / "weekly.yml")["jobs"]
    assert "make floors" in [step.get("run") for step in jobs["floors"]["steps"]]
    lowest = {name: tuple(map(int, version.split("."))) for name, version in floors().items()}
    # A Host header made the URL by which routes were chosen (CVE-2026-48710); a chunk's end was not checked.
    assert lowest["starlette"] >= (1, 3, 1)
    assert lowest["h11"] >= (0, 16)


def test_the_workflow_runs_what_ci_runs_on_pythons_that_are_named():
    jobs = YAML(typ="safe").load(GITHUB / "workflows" / "tests.yml")["jobs"]
    assert ".ci/run" in [step.get("run") for step in jobs["everything"]["steps"]]
    pythons = set(jobs["everything"]["strategy"]["matrix"]["python"])
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    assert pythons <= {name.rpartition(" ")[2] for name in classifiers}


def test_the_repository_has_one_address():
    """A place that was forgotten when the placeholder was replaced leads nowhere."""
    pages = [*PAGES, ROOT / "pyproject.toml", *(path for path in GITHUB.rglob("*") if path.is_file())]
    found = {
        (path.name, address)
        for path in pages
        for address in re.findall(r"github\.com/[\w.-]+/pushrep\b", path.read_text(encoding="utf-8"))
    }
    assert {address for _, address in found} == {ADDRESS}, found
    assert {"README.md", "pyproject.toml", "config.yml"} <= {name for name, _ in found}


def test_no_page_installs_from_an_index_that_has_no_pushrep():
    from_an_index = re.compile(r"pip install [^\n`]*(?<![/\w])pushrep(\[[\w,-]+\])?(?! @ )['\"]?(\s|`|$)", re.MULTILINE)
    assert from_an_index.search("`pip install 'pushrep[console]'`")
    found = [(path.name, hit[0]) for path in PAGES if (hit := from_an_index.search(path.read_text(encoding="utf-8")))]
    assert not found
