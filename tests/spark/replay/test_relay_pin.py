"""The partition count that a relay fixes in its checkpoint (contract "Partitioner": n is pinned at first use)."""

from dataclasses import replace

import pytest

from spark_jobs.errors import BadJobOption
from spark_jobs.jobs.relaying import RelayIdentity, RelayIdentityStore, check_same
from spark_jobs.sinks.hadoop import HadoopDirectory

pytestmark = pytest.mark.spark

PIN = RelayIdentity(
    application="billing", topic="out", destination="c/1", partition_count=2, carrier="key", sources={"in-0": "c/2"}
)


@pytest.fixture
def store(spark, tmp_path):
    return RelayIdentityStore(
        HadoopDirectory(spark, str(tmp_path / "c-relay")), HadoopDirectory(spark, str(tmp_path / "c"))
    )


@pytest.fixture
def progress(tmp_path):
    """Make the checkpoint look as after so many planned and committed batches."""

    def to(planned, committed):
        for log, count in (("offsets", planned), ("commits", committed)):
            (tmp_path / "c" / log).mkdir(parents=True, exist_ok=True)
            for batch in range(count):
                (tmp_path / "c" / log / str(batch)).write_text("v1")

    return to


def test_n_is_pinned_at_the_first_use_and_a_grown_topic_changes_nothing(store):
    assert store.agree(PIN, None) == PIN
    grown = replace(PIN, partition_count=6)
    assert store.agree(grown, None) == PIN
    with pytest.raises(BadJobOption, match=r"--partition-count=6.*began with 2: raise --epoch above 0"):
        store.agree(grown, 6)


def test_a_raised_epoch_pins_anew_once_no_batch_is_half_sent(store, progress):
    store.agree(PIN, None)
    raised = replace(PIN, partition_count=6, epoch=1)
    progress(planned=3, committed=2)
    with pytest.raises(BadJobOption, match="batch 2 is not finished"):
        store.agree(raised, 6)
    progress(planned=3, committed=3)
    assert store.agree(raised, 6) == raised
    assert store.agree(raised, None) == raised
    with pytest.raises(BadJobOption, match="an epoch only rises"):
        store.agree(PIN, None)


@pytest.mark.parametrize("setting", ["application", "topic", "carrier"])
def test_another_name_carrier_or_topic_is_another_relay(store, setting):
    store.agree(PIN, None)
    with pytest.raises(BadJobOption, match="fresh checkpoint"):
        store.agree(replace(PIN, **{setting: "other"}), None)


@pytest.mark.parametrize("changed", [{"destination": "c/9"}, {"sources": {"in-0": "c/9"}}])
def test_a_topic_made_anew_is_refused_and_a_new_partition_is_not(changed):
    with pytest.raises(BadJobOption, match="made anew"):
        check_same(replace(PIN, **changed), PIN)
    check_same(replace(PIN, sources={"in-0": "c/2", "in-1": "c/3"}), PIN)


def test_a_lost_or_damaged_pin_is_never_guessed(store, progress, tmp_path):
    progress(planned=1, committed=0)
    with pytest.raises(BadJobOption, match="nothing says how they were sent"):
        store.agree(PIN, None)
    (tmp_path / "c-relay").mkdir()
    (tmp_path / "c-relay" / "epoch-0.json").write_text("{")
    with pytest.raises(BadJobOption, match=r"epoch-0\.json"):
        store.agree(PIN, None)
