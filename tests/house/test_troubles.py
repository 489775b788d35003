"""docs/troubles.md is made of the code; what it and the code propose can be typed as it stands."""

import pytest

from tests.house.figures import nodes, sources
from tests.house.statements_page import ROOT, held_by
from tests.house.test_named_in_docs import wrong_in
from tests.house.test_statements import functions
from tests.house.troubles_page import FAULTS, errors_told, page, text_of

PAGE = ROOT / "docs" / "troubles.md"


def test_the_page_is_made_of_the_code():
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m tests.house.troubles_page > docs/troubles.md"


def test_each_error_says_what_it_is():
    assert not [name for name, text, _ in errors_told() if not text]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda one: one.name)
def test_each_fault_has_its_tests(fault):
    for path, name in held_by(fault.tests):
        assert name in functions(path), f"{path.name}::{name} is not there"


def test_each_command_in_a_text_of_the_code_is_there():
    wrong = [
        (module, found)
        for module, path in sources().items()
        for node in nodes(path)
        if (text := text_of(node))
        for found in wrong_in(text)
    ]
    assert not wrong
