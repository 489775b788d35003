"""An index file is a list of entries: by any calls, with the file read anew at any moment."""

import struct
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from pushrep.log.directory_files import INDEX_SUFFIX, TIME_INDEX_SUFFIX
from pushrep.log.indexes import IndexCheck, IndexFile
from tests.support.simulated_disk import SimulatedDisk

ENTRY = struct.Struct(">ii")
PATH = Path("/logs/a-0/00000000000000000000.index")

appends = st.lists(st.integers(1, 3), max_size=70).map(lambda rises: ("append", rises))
"""By how much the next entry's first number is larger; more than fit into one block of a search now and then."""
others = st.tuples(st.sampled_from(["write", "sync", "mark", "reopen"]), st.none())
cuts = st.tuples(st.sampled_from(["keep", "rewind"]), st.integers(0, 200))


@given(st.lists(st.one_of(appends, others, cuts), max_size=20))
def test_by_any_calls_it_holds_what_a_list_holds(calls):
    disk = SimulatedDisk()
    disk.make_directory(PATH.parent)
    index, model, written, marks = IndexFile(disk, PATH, ENTRY), [], 0, []
    for call, what in calls:
        match call:
            case "append":
                for rise in what:
                    key = (model[-1][0] if model else 0) + rise
                    model.append((key, 7 * key))
                    index.append(*model[-1])
            case "write" | "sync":
                getattr(index, call)()
                written = len(model)
            case "mark":
                marks.append((index.mark(), len(model)))
            case "keep":
                index.keep(what)
                del model[what:]
            case "rewind" if marks:  # to what it was at an earlier moment, behind which nothing was cut
                mark, count = marks[what % len(marks)]
                index.rewind(mark)
                del model[count:]
            case "reopen":
                index.sync(retaken=True)
                index, written = IndexFile(disk, PATH, ENTRY), len(model)
        written = min(written, len(model))
        marks = [one for one in marks if one[1] <= len(model)]
        assert (len(index), index.last) == (len(model), model[-1] if model else None), call
        for key in {0, 1, *(first + off for first, _ in model[-3:] + model[:2] for off in (-1, 0, 1))}:
            up_to = [entry for entry in model if entry[0] <= key]
            assert index.floor_now(key) == (up_to[-1] if up_to else None), (call, key)
            assert index.count_up_to(key) == len(up_to), (call, key)
    index.sync(retaken=True)
    again = IndexFile(disk, PATH, ENTRY)
    assert again.is_whole
    assert (len(again), again.last, again.ascends(0, 1)) == (len(model), model[-1] if model else None, True)
    assert [again.floor(key) for key, _ in model] == model


def test_an_index_that_can_not_be_one_is_a_fault_at_its_place():
    falls = b"".join(ENTRY.pack(*entry) for entry in [(1, 10), (2, 20), (2, 30)])
    cases = {
        falls: (16, "its entries do not ascend"),
        ENTRY.pack(-1, 10): (0, "entry 0 has a number below 0"),
        ENTRY.pack(1, -10): (0, "entry 0 has a number below 0"),
        ENTRY.pack(1, 10) + b"abc": (8, "3 bytes at its end are no entry"),
    }
    for data, (position, why) in cases.items():
        [fault] = IndexCheck(0, data, b"").faults(None)
        assert (fault.suffix, fault.position) == (INDEX_SUFFIX, position), data
        assert fault.reason == why, data
    times = struct.pack(">qi", -1, 3)
    [fault] = IndexCheck(0, b"", times).faults(None)
    assert (fault.suffix, fault.position) == (TIME_INDEX_SUFFIX, 0)
