"""Reading ahead: one piece in a thread, its result or its error for whoever asks, and nobody left behind."""

import threading

import pytest

from pushrep.replay.reading_ahead import ReadingAhead


def test_the_piece_is_read_while_its_caller_does_something_else():
    ahead = ReadingAhead()
    may_end = threading.Event()
    ahead.begin(lambda piece: (may_end.wait(30), piece)[1], 7)
    assert ahead.is_under_way
    may_end.set()
    assert ahead.result() == 7
    assert not ahead.is_under_way
    ahead.close()


def test_an_error_of_reading_is_raised_where_the_result_is_asked_for():
    def fail():
        raise OSError("the disk is gone")

    ahead = ReadingAhead()
    ahead.begin(fail)
    with pytest.raises(OSError, match="the disk is gone"):
        ahead.result()
    ahead.begin(lambda: "more")
    assert ahead.result() == "more"
    ahead.close()


def test_closing_waits_for_what_is_read_so_that_its_file_may_be_closed():
    ahead, seen = ReadingAhead(), []
    begun, may_end = threading.Event(), threading.Event()

    def read():
        begun.set()
        may_end.wait(30)
        seen.append("read")

    ahead.begin(read)
    assert begun.wait(30)
    closer = threading.Thread(target=ahead.close)
    closer.start()
    may_end.set()
    closer.join(30)
    assert seen == ["read"]
    ahead.close()
    assert not [one for one in threading.enumerate() if one.name == "pushrep-replay-reads-ahead" and one.is_alive()]
