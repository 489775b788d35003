"""The schema that says the same as a message's class."""

from enum import IntEnum
from typing import Annotated, Any, get_args, get_origin
from uuid import UUID

from pushrep.topic_id_partition import TopicIdPartition
from pushrep.wire.codec import RECORDS_FIELD, RECORDS_SIZE_FIELD
from pushrep.wire.values import INT_MAX, Struct, Within, columns_of, notes, optional_of

UUID_SCHEMA = {"type": "fixed", "name": "Uuid", "size": 16}


def expected_schema(struct: type[Any], seen: set[str] | None = None) -> Any:
    """The schema that says the same as a class."""
    seen = set() if seen is None else seen
    # The prefix distinguishes a part of a message from the rules' class of its name.
    name = struct.__name__.removeprefix("Wire")
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


def _expected_type(hint: Any, seen: set[str]) -> Any:
    if get_origin(hint) is Annotated:
        (within,) = (note for note in notes(hint) if isinstance(note, Within))
        return "int" if within.high <= INT_MAX else "long"
    if get_origin(hint) is tuple:
        return {"type": "array", "items": _expected_type(get_args(hint)[0], seen)}
    if UUID in {hint, optional_of(hint)}:
        known = "Uuid" in seen
        seen.add("Uuid")
        return "Uuid" if known else UUID_SCHEMA
    if issubclass(hint, Struct | TopicIdPartition):
        return expected_schema(hint, seen)
    simple = {bool: "boolean", str: "string", int: "int"}
    return "int" if issubclass(hint, IntEnum) else simple[hint]
