"""examples/web_api.py in this process: its answers with replicas, and without them."""

import contextlib
import importlib.util
from itertools import count
from pathlib import Path

import pytest

from pushrep.outbox import DeliveryFailed
from tests.integration.outboxes import WAIT_S, open_outbox, wait_for_all, wait_until

EXAMPLE = Path(__file__).parents[2] / "examples" / "web_api.py"


@pytest.fixture(scope="module")
def web_api():
    spec = importlib.util.spec_from_file_location("web_api", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_201_is_answered_when_enough_members_hold_it_and_503_says_that_nothing_was_taken(world, web_api):
    for index in (1, 2):
        world.node(index)
    with open_outbox(world, 1, 2, partitions=web_api.PARTITIONS, min_insync_replicas=3) as outbox:
        client = web_api.make_app(outbox, WAIT_S).test_client()
        assert client.get("/health").status_code == 200
        answer = client.post("/orders/ada", json={"item": "book"})
        partition = web_api.partition_of("ada")
        assert (answer.status_code, answer.json) == (201, {"partition": partition, "offset": 0})
        for index in (1, 2):
            assert world.replica(index, partition).log.log_end_offset == 1
        wait_for_all(outbox)
        hasty = web_api.make_app(outbox, 0.01).test_client()
        world.nodes[2].stop()
        perhaps, numbers = [], count()

        def is_refused():
            item = f"late {next(numbers)}"
            answer = hasty.post("/orders/ada", json={"item": item})
            assert answer.status_code == 503
            if answer.json["taken"] == "no":
                return True
            assert answer.json["taken"] == "perhaps"
            perhaps.append({"item": item})
            return False

        wait_until(is_refused, "refused, once the replica counts as gone; before, nobody knows")
        assert client.get("/health").status_code == 503
        assert b"pushrep_outbox_under_min_insync_partitions{" in client.get("/metrics").data
        assert client.get("/orders/ada").json == [{"item": "book"}], "what is safe, and no more"
        world.node(2)
        wait_until(lambda: client.get("/health").status_code == 200, "back")
        with contextlib.suppress(DeliveryFailed):  # what waited for the disk while the replica left is refused, too
            outbox.flush()
        answer = client.post("/orders/ada", json={"item": "in time"})
        first, *late, last = client.get("/orders/ada").json
        assert (answer.status_code, answer.json["offset"]) == (201, len(late) + 1)
        assert (first, last) == ({"item": "book"}, {"item": "in time"})
        assert late == [one for one in perhaps if one in late], "in order, each once, and nothing of what was refused"
