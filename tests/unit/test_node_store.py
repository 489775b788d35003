"""What a node keeps of an outbox, where two calls meet."""

import json
import threading
from contextlib import suppress
from dataclasses import replace
from uuid import UUID

import pytest

from pushrep.node.promises import PromiseKeeper, Promises, find_promises, write_promises
from pushrep.node.settings import NodeSettings
from pushrep.node.store import KeptOutbox, NodeStore, Refusal
from pushrep.push.sockets import Address
from pushrep.replication.grants import Grant, Member
from pushrep.replication.outcome import Outcome
from pushrep.seams import REAL_FILESYSTEM, SYSTEM_CLOCK
from pushrep.seams.checked_json import write_checked_json

OUTBOX = UUID(int=7)
ADDRESSES = ["a:1", "b:1", "c:1"]


def grant(epoch):
    return Grant(
        outbox_id=OUTBOX, epoch=epoch, leader=epoch % 256, members=tuple(map(Member, range(3), ADDRESSES)),
        min_insync_replicas=2, members_epoch=256, pid_epoch=0, topic_id=UUID(int=8), topic="orders", partitions=1,
        carrier="key",
    )  # fmt: skip


class Watched(KeptOutbox):
    """Offers an old leader's grant whenever the thread that lets go has changed a part of what it changes."""

    @property
    def _is_unread(self):
        return self.__dict__.get("unread", False)

    @_is_unread.setter
    def _is_unread(self, value):
        other = threading.Thread(target=self.offer_if_it_would_be_judged_now)
        other.start()
        other.join()
        self.__dict__["unread"] = value

    def offer_if_it_would_be_judged_now(self):
        lock = self.__dict__.get("_keeper") and self._keeper.lock
        if lock and lock.acquire(blocking=False):
            with suppress(Refusal):
                self.offer_grant(grant(512), 0, ADDRESSES[1])
            lock.release()


@pytest.fixture
def store(tmp_path):
    store = NodeStore(tmp_path, NodeSettings(address=Address("127.0.0.1", 1)), REAL_FILESYSTEM, SYSTEM_CLOCK)
    yield store
    store.close()


def test_no_grant_is_judged_by_what_was_promised_before_a_promotion(store):
    kept = Watched(OUTBOX, store)
    assert kept.offer_grant(grant(256), 0, ADDRESSES[1]) is Outcome.NONE
    with kept.let_go() as directory:
        promotion = PromiseKeeper(directory, OUTBOX, REAL_FILESYSTEM)
        promotion.keep(replace(promotion.kept, grant=grant(1025), leader_epoch=1025))
    assert kept.offer_grant(grant(512), 0, ADDRESSES[1]) is not Outcome.NONE
    assert PromiseKeeper(directory, OUTBOX, REAL_FILESYSTEM).kept.grant == grant(1025)


def test_promises_of_version_2_are_read_as_grants_that_name_no_directories(tmp_path):
    kept = Promises(leader_epoch=256, grant=grant(256), member=1)
    write_promises(tmp_path, OUTBOX, kept, REAL_FILESYSTEM)
    path = tmp_path / "promises.json"
    fields = json.loads(path.read_text())
    del fields["version"], fields["crc32c"], fields["grant"]["generation"]
    fields["grant"]["members"] = [one[:2] for one in fields["grant"]["members"]]
    write_checked_json(REAL_FILESYSTEM, path, fields, 2)
    assert find_promises(tmp_path, REAL_FILESYSTEM) == (OUTBOX, kept)


def test_promises_keep_whose_directory_a_member_is_and_the_generation(tmp_path):
    named = tuple(replace(one, directory_id=UUID(int=9 + one.index), identity="billing") for one in grant(256).members)
    kept = Promises(grant=replace(grant(256), members=named, generation=3), member=1)
    write_promises(tmp_path, OUTBOX, kept, REAL_FILESYSTEM)
    assert find_promises(tmp_path, REAL_FILESYSTEM) == (OUTBOX, kept)
    assert kept.generation == 3
