"""A row carries the context of the request that added it, unchanged into its record; the relay's span links to it."""

from sqlalchemy import MetaData
from sqlalchemy.orm import Session

from pushrep.tables import OutboxTable, TableRelay
from tests.support.spans import Spans, context_carried, ids_of
from tests.tables.conftest import OrderPlaced, open_outbox
from tests.unit.gated_disk import until


def test_the_request_s_context_is_in_the_row_and_the_batch_links_to_it(dsn, engine, tmp_path):
    spans, table = Spans(), OutboxTable(MetaData())
    orders = table.topic("orders", OrderPlaced, partitions=2, key=lambda one: one.customer)
    for one in table.tables:
        if one is not None:
            one.metadata.create_all(engine)
    with spans.traced(), open_outbox(tmp_path) as outbox:
        with spans.tracer.start_as_current_span("request") as request, Session(engine) as session, session.begin():
            orders.add(session, OrderPlaced(1, "c"), headers=[("mine", b"1")])
            orders.add(session, OrderPlaced(2, "c"))
        with TableRelay(outbox, dsn, poll_ms=1):
            until(lambda: spans.named("relay orders"), "the batch is relayed")
        records = [record for n in range(2) for record in outbox.log(n).records(0)]
    assert [dict(record.headers).get("mine") for record in records] == [b"1", None]
    for record in records:
        assert [name for name, _ in record.headers].count("traceparent") == 1
        assert context_carried(record) == ids_of(request.get_span_context())
    [span] = spans.named("relay orders")
    assert [ids_of(link.context) for link in span.links] == [ids_of(request.get_span_context())]
    assert span.attributes["messaging.batch.message_count"] == 2
