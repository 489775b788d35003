"""A public class name means one thing in the product, and modules do not import each other in circles."""

from tests.house.figures import circles, double_names


def test_no_public_class_name_has_two_meanings():
    assert not double_names()


def test_modules_import_each_other_in_no_circle():
    assert not circles()
