"""Which Java Spark would start, before it is."""

import pytest

from spark_jobs.errors import SparkUnfit
from spark_jobs.spark_internals import java_version, require_java


@pytest.mark.parametrize(
    ("banner", "version"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('java version "1.8.0_392"', 8),
        ('openjdk version "21" 2023-09-19', 21),
        ("no java here", None),
    ],
)
def test_javas_banner_is_read(banner, version):
    assert java_version(banner) == version


def test_a_missing_java_is_named_with_what_to_do(monkeypatch, tmp_path):
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SparkUnfit, match="there is no java on the PATH; Spark needs Java 17"):
        require_java()
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(SparkUnfit, match="has no bin/java"):
        require_java()


def test_an_old_java_is_named(monkeypatch, tmp_path):
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text("#!/bin/sh\necho 'java version \"11.0.2\"' >&2\n")
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(SparkUnfit, match="is Java 11; Spark needs Java 17"):
        require_java()
