"""The number of partitions of a topic that are used: by the file, by the members, or all that the topic has.

Contract: "n is fixed at first use"; a grant says "per destination (topic id, n)".
"""

from uuid import UUID

import pytest

from pushrep.kafka.errors import DestinationRefused, KafkaUnreachable
from pushrep.kafka.progress import (
    EpochPartitions,
    ShippingProgress,
    check_kept,
    check_seen,
    counts_of,
    fixed_count,
)

KNOWN = ShippingProgress(topic_id=UUID(int=7), epochs=(EpochPartitions(0, 3),))


def test_the_file_is_believed_then_the_members_then_the_topic():
    assert fixed_count(KNOWN, "orders", 8, (5,)) == 8, "with_topic keeps the file's own numbers"
    assert KNOWN.with_topic(UUID(int=7), 8, 0).epochs == KNOWN.epochs
    assert fixed_count(ShippingProgress(), "orders", 8, (5,)) == 5
    assert fixed_count(ShippingProgress(), "orders", 8, (5, 5)) == 5
    assert fixed_count(ShippingProgress(), "orders", 8, ()) == 8
    assert fixed_count(ShippingProgress(), "orders", 8, ()) == 8


def test_several_numbers_without_the_file_are_refused():
    """Only the file has the offsets where each of them begins."""
    with pytest.raises(DestinationRefused, match=r"used 2, 4 of them in turn.*copy it from the member") as caught:
        fixed_count(ShippingProgress(), "orders", 8, (2, 4))
    assert (caught.value.setting, caught.value.value) == ("partitions", 8)


def test_a_file_that_does_not_know_what_another_member_used_is_refused():
    """Contract: "else a reader would meet 1000 in the new partition before 900 in the old, and drop 900"."""
    check_kept(KNOWN, "orders", ())
    check_kept(KNOWN, "orders", (3,))
    grown = ShippingProgress(topic_id=UUID(int=7), epochs=(*KNOWN.epochs, EpochPartitions(1, 6, {0: 9})))
    check_kept(grown, "orders", (3,))
    check_kept(grown, "orders", (3, 6))
    for stale, known in [(KNOWN, (3, 6)), (KNOWN.with_topic(UUID(int=8), 9, 0), (9,)), (grown, (3, 9))]:
        with pytest.raises(DestinationRefused, match=r"has used .* in turn: copy it from the member"):
            check_kept(stale, "orders", known)


def test_a_broker_that_has_not_heard_of_all_partitions_changes_no_number():
    """Contract: "n is fixed at first use". A broker lags behind; another topic of the name may well have fewer."""
    check_seen(ShippingProgress(), "orders", UUID(int=7), 1)
    check_seen(KNOWN, "orders", UUID(int=7), 3)
    check_seen(KNOWN, "orders", UUID(int=8), 2)
    with pytest.raises(KafkaUnreachable, match="knows 2 of topic orders's partitions, 3 are used"):
        check_seen(KNOWN, "orders", UUID(int=7), 2)


def test_members_keep_each_number_that_was_used_oldest_first():
    epochs = (EpochPartitions(0, 3), EpochPartitions(1, 3, {0: 5}), EpochPartitions(2, 6, {0: 9}))
    assert counts_of(ShippingProgress(epochs=epochs)) == (3, 6)
    assert counts_of(ShippingProgress(epochs=(*epochs, EpochPartitions(3, None)))) == (3, 6), (
        "it is fixed when it is seen"
    )
    assert counts_of(ShippingProgress()) == ()
