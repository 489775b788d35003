"""A public class name means one thing in the product, and modules do not import each other in circles."""

from tests.house.figures import circles, double_names

ONE_PER_CLIENT = {"ReplayFilteredConsumer", "SourcePartitionPartitioner", "SourcePartitionProducer"}
"""Public names that an adapter for each Kafka client has by intent."""

DOUBLE_STILL = {
    "Answers",
    "AppendRecordsResult",
    "Batch",
    "Checkpoint",
    "Cut",
    "EpochEnd",
    "Finding",
    "Grant",
    "Kind",
    "Lead",
    "LogFacts",
    "Member",
    "Opening",
    "PartitionLog",
    "PartitionStopped",
    "Readable",
    "Replica",
    "Rule",
    "Step",
    "Worker",
}
"""What is left to rename: delete a name here with its last double, and add none."""

ROOMS_WITH_CIRCLES = {"pushrep.node", "pushrep.outbox", "pushrep.push", "pushrep.startpoints"}
"""The same for circles of imports."""


def room(module):
    package, _, rest = module.partition(".")
    return f"pushrep.{rest.partition('.')[0]}" if package == "pushrep" else package


def test_no_public_class_name_gets_a_second_meaning():
    found = double_names()
    new = {name: modules for name, modules in found.items() if name not in DOUBLE_STILL | ONE_PER_CLIENT}
    assert not new, f"public class names with two meanings, give one another name: {new}"
    gone = DOUBLE_STILL - found.keys()
    assert not gone, f"no longer double, delete from DOUBLE_STILL: {sorted(gone)}"


def test_no_room_gets_a_circle_of_imports():
    found = {room(module): circle for circle in circles() for module in circle}
    new = {where: circle for where, circle in found.items() if where not in ROOMS_WITH_CIRCLES}
    assert not new, f"modules that import each other: {new}"
    gone = ROOMS_WITH_CIRCLES - found.keys()
    assert not gone, f"without a circle now, delete from ROOMS_WITH_CIRCLES: {sorted(gone)}"
