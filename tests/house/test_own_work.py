"""Every line here is the project's own: libraries come as packages, never as copies."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINE_MAX = 1_000
"""Characters; a minified file has lines of tens of thousands, the longest line that somebody wrote here has 613."""
TEXTS = {".py", ".js", ".css", ".html", ".sh", ".go", ".java", ".yml", ".toml"}
LICENCES = {"LICENSE", "NOTICE"}
THEIRS = re.compile(r"(?i)\bcopyright\b\s*(?:\(c\)|©|\d{4})|@license\b|SPDX-License-Identifier")


def files():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a checkout of git")
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def test_no_file_is_minified():
    for path in files():
        assert ".min." not in path.name, path
        if path.suffix in TEXTS:
            longest = max(map(len, path.read_text(encoding="utf-8").splitlines()), default=0)
            assert longest <= LINE_MAX, f"{path}: a line of {longest:,} characters"


def test_only_the_licence_has_a_copyright():
    for path in files():
        if path.suffix in TEXTS | {".md", ".txt", ""} and path.name not in LICENCES and path != Path(__file__):
            found = THEIRS.search(path.read_text(encoding="utf-8", errors="replace"))
            assert found is None, f"{path}: {found[0]}"
