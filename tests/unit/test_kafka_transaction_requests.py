"""Requests to a transaction coordinator, as bytes: those that aiokafka lacks."""

from io import BytesIO

import pytest
from aiokafka.errors import IncompatibleBrokerVersion

from pushrep.kafka.requests import (
    ASK_FEATURES,
    END_TXN_AND_BUMP_EPOCH,
    INIT_PRODUCER_ID,
    Ask,
    transaction_version_of,
)

FEATURES_NONE = bytes.fromhex("000002001200000004000000000000")
_FINALIZED = bytes.fromhex(
    "03"
    "12" + b"group.coordinator".hex() + "0001" "0000" "00"
    "14" + b"transaction.version".hex() + "0002" "0002" "00"
)  # fmt: skip
FEATURES = FEATURES_NONE[:-1] + bytes.fromhex("0200010102") + bytes([len(_FINALIZED)]) + _FINALIZED


def test_an_init_names_what_the_caller_has():
    init = Ask(INIT_PRODUCER_ID, "id", 60_000, 7, 5)
    request = init.prepare({22: (0, 5)})
    assert request.encode() == bytes.fromhex("03" + b"id".hex() + "0000ea600000000000000007000500")
    answer = request.RESPONSE_TYPE.decode(BytesIO(bytes.fromhex("0000000000000000000000000007000600")))
    assert (answer.error_code, answer.producer_id, answer.producer_epoch) == (0, 7, 6)
    for versions in ({}, {22: (0, 2)}):
        with pytest.raises(IncompatibleBrokerVersion):
            init.prepare(versions)


def test_the_end_of_a_transaction_that_raises_the_epoch():
    raising = Ask(END_TXN_AND_BUMP_EPOCH, "id", 7, 5, False).prepare({26: (0, 5)})
    assert (raising.API_VERSION, raising.encode()) == (
        5,
        bytes.fromhex("03" + b"id".hex() + "000000000000000700050000"),
    )
    answer = raising.RESPONSE_TYPE.decode(BytesIO(bytes.fromhex("0000000000000000000000000007000600")))
    assert (answer.producer_id, answer.producer_epoch) == (7, 6)


def test_the_clusters_transaction_version():
    request = ASK_FEATURES.prepare({18: (0, 4)})
    answer = request.RESPONSE_TYPE.decode(BytesIO(FEATURES))
    assert transaction_version_of(answer) == 2
    assert transaction_version_of(request.RESPONSE_TYPE.decode(BytesIO(FEATURES_NONE))) == 0
