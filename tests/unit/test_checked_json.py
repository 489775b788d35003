"""JSON that others wrote: one named error for each reader, whatever the bytes are."""

import errno
import json
import os

import google_crc32c
import pytest

from pushrep.env import REAL_FILESYSTEM, SYSTEM_CLOCK, RealFilesystem
from pushrep.env.checked_json import BadJsonFile, journal_line, parse_json, scan_journal
from pushrep.errors import CorruptFile
from pushrep.kafka.progress import read_progress
from pushrep.log.directory_id import read_directory_id
from pushrep.outbox.identity import read_identity
from pushrep.outbox.kept_settings import read_kept
from pushrep.outbox.relay_note import RelayNotes
from pushrep.replay.catalogue import Catalogue
from pushrep.replicate.election_state import find_election_state, raise_replica_epoch, read_node_file


def nested(levels: int) -> bytes:
    return b"[" * levels + b"]" * levels


HOSTILE = {
    "brackets": b"[" * 60_000,
    "lists": nested(60_000),
    "objects": b'{"a":' * 60_000,
    "levels": b'{"crc32c":1,"a":' + nested(900) + b"}",
    "digits": b"9" * 60_000,
    "bytes": b"\xff\xfe{}",
    "nothing": b"",
    "no object": b"7",
    "no checksum": b"{}",
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_n8_each_file_of_json_has_its_one_named_error(tmp_path, data):
    (tmp_path / "outbox.json").write_bytes(data)
    with pytest.raises(CorruptFile, match=r"outbox\.json"):
        read_identity(REAL_FILESYSTEM, tmp_path)
    (tmp_path / "settings.json").write_bytes(data)
    with pytest.raises(CorruptFile, match=r"settings\.json"):
        read_kept(REAL_FILESYSTEM, tmp_path)
    (tmp_path / "table-relay.json").write_bytes(data)
    with pytest.raises(CorruptFile, match=r"table-relay\.json"):
        RelayNotes(REAL_FILESYSTEM, tmp_path)
    for name in ("replica-epoch.json", "promises.json", "owner.json"):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(CorruptFile, match=name):
            read_node_file(tmp_path / name, REAL_FILESYSTEM, dict)
    with pytest.raises(CorruptFile, match="promises"):
        find_election_state(tmp_path, REAL_FILESYSTEM)
    with pytest.raises(CorruptFile, match="replica-epoch"):
        raise_replica_epoch(tmp_path, REAL_FILESYSTEM, SYSTEM_CLOCK)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO, errno.EACCES], ids=errno.errorcode.get)
@pytest.mark.parametrize(
    "read",
    [
        read_identity,
        read_kept,
        read_progress,
        RelayNotes,
        read_directory_id,
        find_election_state,
        lambda filesystem, directory: Catalogue.open(directory, filesystem),
    ],
)
def test_what_the_system_refuses_is_its_error_and_no_damage_of_the_file(tmp_path, read, number):
    class Refusing(RealFilesystem):
        def open(self, path, *, create=False, writable=True):
            raise OSError(number, os.strerror(number), str(path))

    arguments = (tmp_path, Refusing()) if read in {find_election_state, read_directory_id} else (Refusing(), tmp_path)
    with pytest.raises(OSError, match=os.strerror(number)) as refused:
        read(*arguments)
    assert refused.value.errno == number


def test_n8_64_levels_are_read_and_65_are_not():
    assert parse_json(nested(64)) == json.loads(nested(64))
    for deep in (nested(65), b'{"a": ' + nested(64) + b"}", nested(65).decode()):
        with pytest.raises(BadJsonFile, match="64 levels"):
            parse_json(deep)
    wide = json.dumps([[1], {"a": []}] * 1000)
    assert parse_json(wide) == json.loads(wide), "many are not deep"


def test_numbers_are_read_as_they_are_and_what_json_has_no_number_for_is_refused():
    assert parse_json(b"[1.5, -2e3, 7]") == [1.5, -2000.0, 7]
    for text in (b"NaN", b"[Infinity]", b'{"a": -Infinity}', b"1e999"):
        with pytest.raises(BadJsonFile):
            parse_json(text)


def test_n8_a_line_of_a_journal_with_its_checksum_that_is_no_json_is_named():
    text = b"[" * 60_000
    with pytest.raises(BadJsonFile):
        scan_journal(journal_line({"a": 1}) + b"%08x %s\n" % (google_crc32c.value(text), text))
