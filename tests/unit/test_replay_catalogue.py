"""The catalogue of recordings: ids given once, whatever happens to logs, to the file and to the power."""

import itertools
from pathlib import Path
from uuid import UUID, uuid4

import pytest

from pushrep.replay import Catalogue, FoundLog, ReplayRefused, read_catalogue
from pushrep.replay.catalogue import CATALOGUE_NAME
from pushrep.topic_id_partition import TopicIdPartition
from pushrep.wire.replay_messages import RecordingState
from tests.support.simulated_disk import PowerLost, SimulatedDisk


def tp(number, partition=0):
    return TopicIdPartition(UUID(int=number), "orders", partition)


def found(*numbers, **more):
    return [FoundLog(tp(number), 0, **more) for number in numbers]


def states(catalogue):
    return {entry.recording_id: entry.state.name for entry in catalogue}


def test_an_entry_says_what_the_contract_lists_and_survives(tmp_path):
    catalogue = Catalogue.open(tmp_path)
    outbox = uuid4()
    (entry,) = catalogue.reconcile([FoundLog(tp(1), 7, outbox_id=outbox)], 1_700_000_000_000)
    assert (entry.recording_id, entry.tp, entry.start_offset, entry.stop_offset) == (1, tp(1), 7, None)
    catalogue.stopped(1, 1042)
    (again,) = Catalogue.open(tmp_path)
    assert (again.outbox_id, again.created_ms, again.stop_offset) == (outbox, 1_700_000_000_000, 1042)
    assert again.state is RecordingState.VALID
    Catalogue.open(tmp_path).resumed(1)
    assert read_catalogue(tmp_path)[0].stop_offset is None


def test_the_same_log_keeps_its_id_and_another_of_its_name_gets_another(tmp_path):
    catalogue = Catalogue.open(tmp_path)
    assert [entry.recording_id for entry in catalogue.reconcile(found(1, 2), 5)] == [1, 2]
    assert catalogue.reconcile(found(1, 2), 6) == []
    (anew,) = catalogue.reconcile(found(1, 3), 7)
    assert anew.recording_id == 3
    assert states(catalogue) == {1: "VALID", 2: "DELETED", 3: "VALID"}


def test_an_id_of_a_deleted_recording_is_never_given_again(tmp_path):
    given = []
    for number in range(1, 6):
        catalogue = Catalogue.open(tmp_path)
        given += [entry.recording_id for entry in catalogue.reconcile(found(number), 0)]
        catalogue.deleted(given[-1])
    assert given == [1, 2, 3, 4, 5]
    assert all(entry.state is RecordingState.DELETED for entry in Catalogue.open(tmp_path) if entry.tp == tp(5))
    assert [e.recording_id for e in Catalogue.open(tmp_path).reconcile(found(5), 0)] == [6], "not even to the same log"


def test_what_can_not_be_read_is_invalid_until_it_can(tmp_path):
    catalogue = Catalogue.open(tmp_path)
    catalogue.reconcile(found(1), 0)
    catalogue.reconcile(found(1, is_readable=False), 0)
    assert states(catalogue) == {1: "INVALID"}
    catalogue.reconcile(found(1), 0)
    assert states(Catalogue.open(tmp_path)) == {1: "VALID"}


def test_unknown_ids_are_refused_and_nothing_is_written(tmp_path):
    catalogue = Catalogue.open(tmp_path)
    before = (tmp_path / CATALOGUE_NAME).read_bytes()
    for change in (catalogue.deleted, catalogue.resumed, catalogue.get):
        with pytest.raises(ReplayRefused, match="no recording 4"):
            change(4)
    assert (tmp_path / CATALOGUE_NAME).read_bytes() == before


def test_a_file_cut_at_any_byte_gives_no_id_twice(tmp_path):
    Catalogue.open(tmp_path).reconcile(found(1, 2, 3), 0)
    whole = (tmp_path / CATALOGUE_NAME).read_bytes()
    head = whole.index(b"\n") + 1
    edges = [n + d for n in range(head, len(whole)) if whole[n : n + 1] == b"\n" for d in (-1, 0, 1)]
    for length in {head, *range(head, len(whole), 61), *edges}:
        (tmp_path / CATALOGUE_NAME).write_bytes(whole[:length])
        kept = {entry.recording_id for entry in read_catalogue(tmp_path)}
        catalogue = Catalogue.open(tmp_path)
        fresh = catalogue.reconcile(found(1, 2, 3, 4), 0)
        is_torn = whole[length - 1 : length] != b"\n"
        assert not kept & {entry.recording_id for entry in fresh}
        assert {entry.recording_id for entry in Catalogue.open(tmp_path)} == kept | {e.recording_id for e in fresh}
        if is_torn:
            assert min(e.recording_id for e in fresh) > 1 + len(kept), "ids that the torn end may have had are passed"


@pytest.mark.parametrize(("line", "is_last"), [(1, False), (2, False), (4, True)])
def test_damage_is_refused_by_line_and_a_bad_end_is_cut(tmp_path, line, is_last):
    Catalogue.open(tmp_path).reconcile(found(1, 2, 3), 0)
    path = tmp_path / CATALOGUE_NAME
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(lines) == 4
    lines[line - 1] = lines[line - 1].replace(b":", b";", 1)
    path.write_bytes(b"".join(lines))
    if is_last:
        (new,) = Catalogue.open(tmp_path).reconcile(found(1, 2, 3), 0)
        assert new.recording_id > 3, "3 was told, and rotted"
        return
    before = path.read_bytes()
    for look in (Catalogue.open, read_catalogue):
        with pytest.raises(ReplayRefused, match=f"line {line}: "):
            look(tmp_path)
    assert path.read_bytes() == before


def test_another_version_is_refused(tmp_path):
    path = tmp_path / CATALOGUE_NAME
    Catalogue.open(tmp_path)
    from pushrep.env.checked_json import journal_line

    path.write_bytes(journal_line({"format": "pushrep.recordings", "version": 2, "next_id": 1}))
    with pytest.raises(ReplayRefused, match="version 2"):
        Catalogue.open(tmp_path)


def test_many_changes_do_not_make_it_grow_for_ever(tmp_path):
    catalogue = Catalogue.open(tmp_path)
    catalogue.reconcile(found(1), 0)
    catalogue.stopped(1, 2)
    path = tmp_path / CATALOGUE_NAME
    changed = path.read_bytes().splitlines(keepends=True)[-1]
    path.write_bytes(path.read_bytes() + changed * 1_100)  # as many changes as one process may make
    again = Catalogue.open(tmp_path)
    assert again.get(1).stop_offset == 2
    assert len(path.read_bytes()) < 1_000
    assert [entry.recording_id for entry in again.reconcile(found(1, 2), 0)] == [2]


def test_an_id_that_was_told_survives_every_power_cut():
    for calls in itertools.count(1):
        disk = SimulatedDisk()
        directory = Path("/logs")
        disk.make_directory(directory)
        told = []
        disk.power_after(calls)
        try:
            for number in range(1, 5):
                told += [entry.recording_id for entry in Catalogue.open(directory, disk).reconcile(found(number), 0)]
        except PowerLost:
            pass
        else:
            break
        disk.lose_power()
        new = Catalogue.open(directory, disk).reconcile(found(9), 0)
        assert new[0].recording_id not in told, f"after {calls} calls"
    assert calls > 8


def test_a_write_that_failed_stops_it_until_it_is_opened_again():
    disk, directory = SimulatedDisk(), Path("/logs")
    disk.make_directory(directory)
    catalogue = Catalogue.open(directory, disk)
    catalogue.reconcile(found(1), 0)
    disk.fail_sync()
    with pytest.raises(OSError, match=r".*"):
        catalogue.reconcile(found(1, 2), 0)
    with pytest.raises(OSError, match="open the catalogue again"):
        catalogue.stopped(1, 5)
    again = Catalogue.open(directory, disk)
    again.reconcile(found(1, 2), 0)
    assert [entry.tp for entry in again] == [tp(1), tp(2)]


def test_the_bytes_are_those_that_were_released(tmp_path):
    catalogue = Catalogue.open(tmp_path)
    catalogue.reconcile([FoundLog(tp(1, 2), 7)], 1_700_000_000_000)
    catalogue.stopped(1, 1042)
    zero, one = UUID(int=0), UUID(int=1)
    bodies = [
        '{"format":"pushrep.recordings","version":1,"next_id":1}',
        (
            f'{{"add":1,"outbox":"{zero}","topic":"orders","topic_id":"{one}","partition":2,'
            '"start":7,"created_ms":1700000000000}'
        ),
        '{"id":1,"stop":1042}',
    ]
    crcs = ["62fe0b20", "2e10d3df", "028c3252"]
    wanted = "".join(f"{crc} {body}\n" for crc, body in zip(crcs, bodies, strict=True))
    assert (tmp_path / CATALOGUE_NAME).read_text() == wanted
