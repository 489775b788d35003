"""The .avsc files: read, and held against the classes and against each other before anything is sent.

A file is `<class>.<version>.avsc`, versions without gaps; one that was released is never changed. The newest describes
the class exactly. A field that an older version lacks has a default in the newest, one that the newest lacks has a
default in the older; `"ignorable": true` on a field says that an older peer may do without what it says. All of it is
checked when the files are loaded, because a peer would find out later.
"""

import json
import re
from collections.abc import Iterator, Mapping
from enum import IntEnum
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Annotated, Any, TypeAlias, get_args, get_origin
from uuid import UUID

from pushrep.topic_id_partition import TopicIdPartition
from pushrep.wire.errors import SchemaMismatch
from pushrep.wire.values import INT_MAX, Struct, Within, columns_of, notes, optional_of

Schema: TypeAlias = Any  # Avro's JSON: a name, or an object
Versions: TypeAlias = Mapping[int, Schema]

RECORDS_FIELD = "records"
RECORDS_SIZE_FIELD = "records_bytes"
"""What stands in the header where the class has its records."""

_FILE = re.compile(r"([A-Za-z]+)\.(0|[1-9][0-9]{0,3})\.avsc")
_UUID: Schema = {"type": "fixed", "name": "Uuid", "size": 16}


def released_schemas() -> Traversable:
    """Where the schemas of this version of pushrep are."""
    return files("pushrep.wire") / "schemas"


def read_schemas(folder: Traversable) -> dict[str, dict[int, Schema]]:
    """{class name: {version: schema}} of every file. Raises SchemaMismatch."""
    found: dict[str, dict[int, Schema]] = {}
    for file in folder.iterdir():
        match = _FILE.fullmatch(file.name)
        if match is None:
            raise SchemaMismatch(f"schemas/{file.name}: the name is not <class>.<version>.avsc")
        found.setdefault(match[1], {})[int(match[2])] = json.loads(file.read_text(encoding="utf-8"))
    for name, versions in found.items():
        if sorted(versions) != list(range(min(versions), max(versions) + 1)):
            raise SchemaMismatch(f"schemas of {name}: versions {sorted(versions)} have a gap")
    return found


def check_schemas(struct: type[Struct], versions: Versions) -> None:
    """Raises SchemaMismatch unless the newest schema is the class, and the others can be read and written as it."""
    newest = max(versions)
    wanted, got = expected_schema(struct), stripped(versions[newest])
    if wanted != got:
        raise SchemaMismatch(f"{struct.__name__}.{newest}.avsc is not its class:\nfile  {got}\nclass {wanted}")
    for version in versions:
        at = f"{struct.__name__}.{version}.avsc"
        for path, field in missing_fields(versions[newest], versions[version]):
            if "default" not in field:
                raise SchemaMismatch(f"{at} lacks {'.'.join(path)}, which has no default in version {newest}")
        for path, field in missing_fields(versions[version], versions[newest]):
            if "default" not in field:
                raise SchemaMismatch(f"{at} has {'.'.join(path)}, which version {newest} lacks, and no default for it")


def expected_schema(struct: type[Any], seen: set[str] | None = None) -> Schema:
    """The schema that says the same as a class."""
    seen = set() if seen is None else seen
    name = struct.__name__.removeprefix(
        "Wire"
    )  # the prefix tells a part of a message from the rules' class of its name
    if name in seen:
        return name
    seen.add(name)
    columns = []
    for at, column in columns_of(struct, include_extras=True).items():
        if at == RECORDS_FIELD:
            columns.append({"name": RECORDS_SIZE_FIELD, "type": "int"})
        else:
            columns.append({"name": at, "type": _expected_type(column.hint, seen)})
    return {"type": "record", "name": name, "fields": columns}


def _expected_type(hint: Any, seen: set[str]) -> Schema:
    if get_origin(hint) is Annotated:
        (within,) = (note for note in notes(hint) if isinstance(note, Within))
        return "int" if within.high <= INT_MAX else "long"
    if get_origin(hint) is tuple:
        return {"type": "array", "items": _expected_type(get_args(hint)[0], seen)}
    if UUID in {hint, optional_of(hint)}:
        known = "Uuid" in seen
        seen.add("Uuid")
        return "Uuid" if known else _UUID
    if issubclass(hint, Struct | TopicIdPartition):
        return expected_schema(hint, seen)
    simple = {bool: "boolean", str: "string", int: "int"}
    return "int" if issubclass(hint, IntEnum) else simple[hint]


def stripped(schema: Schema) -> Schema:
    """Without what is not needed to read the bytes: docs, defaults, aliases, our own marks."""
    if isinstance(schema, dict):
        kept = {key: schema[key] for key in ("type", "name", "size", "items", "fields") if key in schema}
        return {key: value if key == "name" else stripped(value) for key, value in kept.items()}
    return [stripped(item) for item in schema] if isinstance(schema, list) else schema


def missing_fields(here: Schema, there: Schema) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """(path, field) of every field of `here` that `there` lacks; a path goes through arrays."""
    yield from _missing(here, there, dict(_named(here)), dict(_named(there)), ())


def _missing(
    here: Schema,
    there: Schema,
    names_here: Mapping[str, Schema],
    names_there: Mapping[str, Schema],
    path: tuple[str, ...],
) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    here, there = _record(here, names_here), _record(there, names_there)
    if here is None or there is None:
        return
    others = {field["name"]: field for field in there["fields"]}
    for field in here["fields"]:
        at = (*path, field["name"])
        if field["name"] in others:
            yield from _missing(field["type"], others[field["name"]]["type"], names_here, names_there, at)
        else:
            yield at, field


def _record(schema: Schema, names: Mapping[str, Schema]) -> dict[str, Any] | None:
    """The record that a type is, or is an array of; None if it is something else."""
    while isinstance(schema, dict) and schema.get("type") == "array":
        schema = schema["items"]
    schema = names.get(schema, schema) if isinstance(schema, str) else schema
    return schema if isinstance(schema, dict) and schema.get("type") == "record" else None


def _named(schema: Schema) -> Iterator[tuple[str, Schema]]:
    if isinstance(schema, dict):
        if "name" in schema and schema.get("type") in {"record", "fixed"}:
            yield schema["name"], schema
        yield from _named(schema.get("items"))
        for field in schema.get("fields", ()):
            yield from _named(field["type"])
