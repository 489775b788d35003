"""For pytest, which loads this module by itself: the fixture `pushrep_outbox`. It loads nothing more before its use."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pushrep.testing import FakeOutbox


@pytest.fixture
def pushrep_outbox() -> "Iterator[FakeOutbox]":
    """A FakeOutbox of topic `orders` with 4 partitions, which ends with the test."""
    from pushrep.testing import FakeOutbox  # noqa: PLC0415 - every run of pytest loads this module

    with FakeOutbox() as outbox:
        yield outbox
