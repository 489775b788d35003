"""One way to name a store of startpoints, for commands, jobs and options: a directory, or kafka:TOPIC."""

import pytest

from pushrep.errors import BadArgument
from pushrep.startpoints import Startpoint, StorePlace, StoreUnavailable, store_at

SERVERS = {"bootstrap.servers": "broker:9092"}


def test_a_directory_is_a_store(tmp_path):
    with store_at(tmp_path / "startpoints") as store:
        number = store.write("billing", "orders", 0, Startpoint.earliest(), "go")
    with store_at(str(tmp_path / "startpoints")) as store:
        assert store.read("billing", "orders", 0).sequence == number


def test_a_topic_is_named_with_its_brokers_and_no_secret_is_shown():
    place = StorePlace.parse("kafka:startpoints", SERVERS | {"sasl.password": "hush"})
    assert (place.kind, place.name, place.settings["bootstrap.servers"]) == ("kafka", "startpoints", "broker:9092")
    assert "hush" not in repr(place)


@pytest.mark.parametrize(
    ("text", "settings", "error", "named"),
    [
        ("", {}, BadArgument, "store"),
        ("kafka:", SERVERS, StoreUnavailable, "kafka:TOPIC"),
        ("kafka:startpoints", {}, BadArgument, "bootstrap.servers"),
        ("kafka://broker:9092/startpoints", SERVERS, StoreUnavailable, "kafka:TOPIC"),
        ("s3://bucket/startpoints", {}, StoreUnavailable, "kafka:TOPIC"),
        ("out/startpoints", SERVERS, BadArgument, "bootstrap.servers"),
    ],
)
def test_what_names_no_store_is_refused_by_name(text, settings, error, named):
    with pytest.raises(error, match=named):
        StorePlace.parse(text, settings)


def test_settings_that_a_client_does_not_know_are_refused_by_name():
    for name, value, told in (("sasl.user", "ann", "no such setting"), ("request.timeout.ms", "soon", "whole number")):
        with pytest.raises(BadArgument, match=told) as refused:
            store_at("kafka:startpoints", SERVERS | {name: value})
        assert refused.value.argument == name


def test_a_kind_without_its_package_is_told(monkeypatch):
    class Missing:
        def load(self):
            raise ModuleNotFoundError("no module", name="confluent_kafka")

    monkeypatch.setattr("pushrep.startpoints.store.entry_points", lambda **_: [Missing()])
    with pytest.raises(StoreUnavailable, match=r"confluent_kafka.*pip install .*\[kafka\]"):
        store_at("kafka:startpoints", SERVERS)
    monkeypatch.setattr("pushrep.startpoints.store.entry_points", lambda **_: [])
    with pytest.raises(StoreUnavailable, match="install pushrep again"):
        store_at("kafka:startpoints", SERVERS)
