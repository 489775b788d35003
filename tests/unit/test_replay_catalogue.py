"""The catalogue of recordings: ids given once, whatever happens to logs, to the file and to the power."""

import itertools
import json
from pathlib import Path
from uuid import UUID, uuid4

import pytest

from pushrep.env import REAL_FILESYSTEM
from pushrep.env.checked_json import write_checked_json
from pushrep.replay import Catalogue, FoundLog, ReplayRefused, read_catalogue
from pushrep.replay.catalogue import CATALOGUE_NAME
from pushrep.topic_id_partition import TopicIdPartition
from pushrep.wire.replay_messages import RecordingState
from tests.support.simulated_disk import PowerLost, SimulatedDisk


def tp(number, partition=0):
    return TopicIdPartition(UUID(int=number), "orders", partition)


def found(*numbers):
    return [FoundLog(tp(number), 0) for number in numbers]


def states(catalogue):
    return {entry.recording_id: entry.state.name for entry in catalogue}


def test_an_entry_says_what_the_contract_lists_and_survives(tmp_path):
    outbox = uuid4()
    (entry,) = Catalogue.open(tmp_path).reconcile([FoundLog(tp(1), 7, outbox_id=outbox)], 1_700_000_000_000)
    assert (entry.recording_id, entry.tp, entry.start_offset) == (1, tp(1), 7)
    assert (entry.outbox_id, entry.created_ms, entry.state) == (outbox, 1_700_000_000_000, RecordingState.VALID)
    assert [*Catalogue.open(tmp_path)] == read_catalogue(tmp_path) == [entry]


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
        assert catalogue.reconcile(found(number), 0) == [], "a log that is being removed is no new recording"
        catalogue.removed(given[-1])
    assert given == [1, 2, 3, 4, 5]
    assert all(entry.state is RecordingState.DELETED for entry in Catalogue.open(tmp_path) if entry.tp == tp(5))
    assert [e.recording_id for e in Catalogue.open(tmp_path).reconcile(found(5), 0)] == [6], "not even to the same log"


def test_unknown_ids_are_refused_and_nothing_is_written(tmp_path):
    catalogue = Catalogue.open(tmp_path)
    for change in (catalogue.deleted, catalogue.removed, catalogue.get):
        with pytest.raises(ReplayRefused, match="no recording 4"):
            change(4)
    assert not (tmp_path / CATALOGUE_NAME).exists()


def test_a_file_that_is_cut_emptied_or_changed_is_refused_and_left_alone(tmp_path):
    Catalogue.open(tmp_path).reconcile(found(1, 2, 3), 0)
    path = tmp_path / CATALOGUE_NAME
    whole = path.read_bytes()
    cut = [whole[:length] for length in range(0, len(whole) - 2, 61)]
    for data in (*cut, whole.replace(b'"id": 3', b'"id": 4'), whole.replace(b'"VALID"', b'"VALUE"', 1)):
        path.write_bytes(data)
        for look in (Catalogue.open, read_catalogue):
            with pytest.raises(ReplayRefused, match="restore the file from a copy"):
                look(tmp_path)
        assert path.read_bytes() == data


def test_another_version_is_refused(tmp_path):
    write_checked_json(REAL_FILESYSTEM, tmp_path / CATALOGUE_NAME, {"recordings": []}, 2)
    with pytest.raises(ReplayRefused, match="version is 2"):
        Catalogue.open(tmp_path)


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


def test_an_id_of_a_write_that_failed_is_not_given_to_another_log():
    disk, directory = SimulatedDisk(), Path("/logs")
    disk.make_directory(directory)
    catalogue = Catalogue.open(directory, disk)
    catalogue.reconcile(found(1), 0)
    disk.fail_sync()
    with pytest.raises(OSError, match=r".*"):
        catalogue.reconcile(found(1, 2), 0)
    assert [entry.tp for entry in catalogue] == [entry.tp for entry in Catalogue.open(directory, disk)] == [tp(1)]
    (anew,) = catalogue.reconcile(found(1, 3), 0)
    assert (anew.recording_id, anew.tp) == (3, tp(3))
    assert states(Catalogue.open(directory, disk)) == {1: "VALID", 3: "VALID"}


def test_the_file_is_as_its_page_shows_it(tmp_path):
    Catalogue.open(tmp_path).reconcile([FoundLog(tp(1, 2), 7)], 1_700_000_000_000)
    page = Path(__file__).parents[2].joinpath("docs/internals/formats/recordings.md").read_text(encoding="utf-8")
    shown = json.loads(page.partition("```json\n")[2].partition("```")[0])
    written = json.loads((tmp_path / CATALOGUE_NAME).read_text(encoding="utf-8"))
    assert written == shown | {"crc32c": written["crc32c"]}
