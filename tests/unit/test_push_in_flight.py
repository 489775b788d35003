"""How large a request from a log's file may be, by what became of those before it."""

from pushrep.replicate.channel import FileRequests
from pushrep.replicate.settings import PushSettings

MIB = 1 << 20


def test_requests_from_the_file_get_smaller_with_each_connection_that_goes_with_a_large_one_and_grow_again():
    requests = FileRequests(PushSettings(request_bytes_max=MIB, request_file_bytes_max=4 * MIB))
    assert requests.bytes_max == 4 * MIB
    requests.lost(0)
    requests.lost(MIB)
    assert requests.bytes_max == 4 * MIB, "that was not too large"
    for expected in (2 * MIB, MIB, MIB):
        requests.lost(4 * MIB)
        assert requests.bytes_max == expected
    requests.answered(0)
    assert requests.bytes_max == MIB, "nothing is known from that"
    requests.answered(MIB)
    assert MIB < requests.bytes_max < 2 * MIB, "what a replica refuses is tried seldom"
    for _ in range(1_000):
        requests.answered(MIB)
    assert requests.bytes_max == 4 * MIB


def test_what_is_set_below_is_never_exceeded():
    requests = FileRequests(PushSettings(request_bytes_max=MIB, request_file_bytes_max=MIB // 2))
    requests.lost(4 * MIB)
    requests.answered(MIB)
    assert requests.bytes_max == MIB // 2
