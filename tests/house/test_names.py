"""A public class name means one thing in the product, and modules do not import each other in circles."""

from tests.house.figures import circles, double_names

ROOMS_WITH_CIRCLES = {"pushrep.node", "pushrep.outbox", "pushrep.push", "pushrep.startpoints"}
"""What is left to untie: delete a room here with its last circle of imports, and add none."""


def room(module):
    package, _, rest = module.partition(".")
    return f"pushrep.{rest.partition('.')[0]}" if package == "pushrep" else package


def test_no_public_class_name_has_two_meanings():
    assert not double_names()


def test_no_room_gets_a_circle_of_imports():
    found = {room(module): circle for circle in circles() for module in circle}
    new = {where: circle for where, circle in found.items() if where not in ROOMS_WITH_CIRCLES}
    assert not new, f"modules that import each other: {new}"
    gone = ROOMS_WITH_CIRCLES - found.keys()
    assert not gone, f"without a circle now, delete from ROOMS_WITH_CIRCLES: {sorted(gone)}"
