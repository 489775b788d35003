"""Below 1000 an error's number means to us what it means to Kafka; two clients' tables are the judges."""

import warnings
from pathlib import Path

import pytest

from pushrep.election.messages import PushSessionEndReason
from pushrep.wire.calls import CALLS
from pushrep.wire.error_codes import ErrorCode

OTHERWISE = {"CORRUPT_MESSAGE": "CorruptRecord"}


def tables():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # theirs, on import
        import aiokafka.errors
        import kafka.errors
    for module in (aiokafka.errors, kafka.errors):
        yield [error for error in vars(module).values() if isinstance(error, type) and hasattr(error, "errno")]


def stem(code):
    """The clients spell UNKNOWN_TOPIC_ID as UnknownTopicIdError; some have a second class for a special case."""
    words = "".join(word.capitalize() for word in code.name.removesuffix("_ERROR").split("_"))
    return OTHERWISE.get(code.name, words)


@pytest.mark.parametrize("code", [code for code in ErrorCode if 0 < code < 1000], ids=lambda code: code.name)
def test_kafkas_numbers(code):
    judged = [{error.__name__ for error in errors if error.errno == code} for errors in tables()]
    assert any(judged), f"no client knows {code.value}"
    for names in filter(None, judged):
        assert any(name.startswith(stem(code)) for name in names), f"{code!r} is {names} to a client"


def test_the_page_has_every_code():
    page = (Path(__file__).parents[2] / "docs" / "internals" / "formats" / "protocol.md").read_text(encoding="utf-8")
    for code in ErrorCode:
        assert f"| {code.value} | {code.name} | {'yes' if code.retriable else ''} | {code.meaning} |" in page
    for reason in PushSessionEndReason:
        assert f"| {reason.value} | {reason.name} | {'yes' if reason.is_sent_to_replica else ''} |" in page
    for key, frames in CALLS.items():
        names = ", ".join(f"`{struct.__name__}`" for struct in frames.values())
        assert f"| {key.value} | {key.name} | {names}" in page
