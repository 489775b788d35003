"""A member of a consumer group that follows startpoints and dies of kill -9 at a named step.

python group_startpoint_program.py <client> <servers> <topic> <store> <out> <end> <step>

It reads partition 0 up to the offset `end`, commits what it read at every turn, and notes each offset in <out>. STEPS
are in the order in which a startpoint comes by them; "none" lives.
"""

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

from filtering.consumers.confluent_client import failure_of_code
from filtering.retry import Failure
from pushrep.startpoints import GroupStartpoints, StartpointStore

STEPS = ("pending", "applied", "read", "committed", "consumed")


def die():
    os.kill(os.getpid(), signal.SIGKILL)


class DyingStore(StartpointStore):
    step = "none"

    def apply(self, claim, log, **more):
        if self.step == "pending":
            die()
        applied = super().apply(claim, log, **more)
        if self.step == "applied":
            die()
        return applied

    def consume(self, claim, sequence, **more):
        if self.step == "committed":
            die()
        super().consume(claim, sequence, **more)
        if self.step == "consumed":
            die()


class Confluent:
    def __init__(self, servers, topic, startpoints):
        from confluent_kafka import TopicPartition

        from filtering.consumers.confluent import ReplayFilteredConsumer

        settings = {"bootstrap.servers": servers, "group.id": topic, "auto.offset.reset": "earliest"}
        settings |= {"log_level": 0, "fetch.wait.max.ms": 10}
        self.consumer = ReplayFilteredConsumer(settings, startpoints=startpoints)
        self.consumer.assign([TopicPartition(topic, 0)])

    async def take(self):
        found = []
        for message in self.consumer.consume(500, 0.03):
            if message.error() is None:
                found.append(message.offset())
            else:  # of the client's events, which it gets over by itself, alone
                assert failure_of_code(message.error()) is Failure.TRANSIENT, message.error()
        return found

    async def commit(self):
        self.consumer.commit()


class Aiokafka:
    def __init__(self, servers, topic, startpoints):
        from filtering.consumers.aiokafka import ReplayFilteredConsumer

        self.consumer = ReplayFilteredConsumer(
            topic, group_id=topic, group_instance_id=topic, bootstrap_servers=servers, auto_offset_reset="earliest",
            session_timeout_ms=60_000, fetch_max_wait_ms=10, startpoints=startpoints,
        )  # fmt: skip
        self.is_started = False

    async def take(self):
        if not self.is_started:
            await self.consumer.start()
            self.is_started = True
        found = await self.consumer.getmany(timeout_ms=30)
        return [record.offset for records in found.values() for record in records]

    async def commit(self):
        await self.consumer.commit()


async def main(seen, client, servers, topic, store, end, step):
    DyingStore.step = step
    startpoints = GroupStartpoints(DyingStore.open(store), look_every_s=0.05)
    member = {"confluent": Confluent, "aiokafka": Aiokafka}[client](servers, topic, startpoints)
    reading = member.consumer._member.assignment
    async with contextlib.AsyncExitStack() as closing:
        if client == "aiokafka":
            closing.push_async_callback(member.consumer.close)
        else:
            closing.callback(member.consumer.close)
        while (topic, 0) not in reading or (reading.position((topic, 0)) or 0) < int(end):
            for offset in await member.take():
                print(offset, file=seen)
                if step == "read" and reading.startpoint((topic, 0)):
                    die()
            await member.commit()


if __name__ == "__main__":
    with Path(sys.argv[5]).open("a", buffering=1) as seen:
        asyncio.run(main(seen, *sys.argv[1:5], *sys.argv[6:]))
