"""Everything of pushrep in one zip, for clusters whose Pythons don't have it: spark-submit --py-files pushrep.zip

    python -m spark_jobs.jobs.py_files pushrep.zip

What it needs from others must be in those Pythons: numpy, google-crc32c, cramjam, fastavro, tenacity, click, pyarrow
and, for topics as destination or marks, confluent-kafka.
"""

import zipfile
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import click

PACKAGES = ("filtering", "partitioner", "pushrep", "spark_jobs")
_DATE = (1980, 1, 1, 0, 0, 0)  # the same sources make the same bytes


def write_zip(target: Path) -> int:
    """Write the zip, whole or not at all; how many files are in it. Raises OSError."""
    aside = target.with_name(f".{target.name}.writing")
    count = 0
    try:
        with zipfile.ZipFile(aside, "w", zipfile.ZIP_DEFLATED) as out:
            for count, (name, path) in enumerate(_sources(), start=1):  # noqa: B007 - how many is wanted
                out.writestr(zipfile.ZipInfo(name, _DATE), path.read_bytes(), zipfile.ZIP_DEFLATED)
        aside.replace(target)
    finally:
        aside.unlink(missing_ok=True)
    return count


def _sources() -> Iterator[tuple[str, Path]]:
    """Names in the zip and where they come from, sorted."""
    for package in PACKAGES:
        root = Path(str(files(package)))
        for path in sorted(root.rglob("*")):
            if path.is_file() and path.suffix != ".pyc":
                yield path.relative_to(root.parent).as_posix(), path


@click.command()
@click.argument("target", type=click.Path(dir_okay=False, path_type=Path))
def main(target: Path) -> None:
    """Write pushrep's packages into TARGET, a zip for spark-submit.

    \b
    python -m spark_jobs.jobs.py_files pushrep.zip
    cp "$(python -m spark_jobs.jobs.relay --where)" relay.py
    spark-submit --master spark://HOST:7077 --py-files pushrep.zip --packages ... relay.py --source kafka ...
    """  # noqa: D301 - \b is click's word for: keep these lines as they are
    try:
        count = write_zip(target)
    except OSError as error:
        raise click.ClickException(
            f"{target} can't be written: {error.strerror}; name a file in a directory"
        ) from error
    click.echo(f"{count} files in {target}")


if __name__ == "__main__":
    main()
