"""The network's small rules: which text is an address, and what a socket and a poller of ours leave behind."""

import gc
import os
import socket
import ssl
import threading
from contextlib import closing

import pytest

from pushrep.env import REAL_NETWORK
from pushrep.env.network import Address, tune
from pushrep.errors import BadArgument
from pushrep.replay.node_connection import NodeAccess, NodeConnection, NodeUnreachable


@pytest.mark.parametrize(
    ("text", "address", "is_loopback"),
    [
        ("localhost:0", ("localhost", 0), True),
        ("127.0.0.2:65535", ("127.0.0.2", 65_535), True),
        ("[::1]:9300", ("::1", 9300), True),
        ("[2001:db8::1]:9300", ("2001:db8::1", 9300), False),
        ("0.0.0.0:1", ("0.0.0.0", 1), False),
        ("replica-1.example:9300", ("replica-1.example", 9300), False),
    ],
)
def test_an_address_is_read_and_shown_as_the_same_text(text, address, is_loopback):
    found = Address.parse(text)
    assert (found, str(found), found.is_loopback) == (address, text, is_loopback)


@pytest.mark.parametrize("text", ["", "host", ":9300", "host:", "host:x", "host:-1", "9300", "host:65536"])
def test_what_is_no_address_is_refused(text):
    with pytest.raises(BadArgument):
        Address.parse(text)


def test_a_peer_that_is_lost_without_a_word_is_noticed_after_40_seconds():
    with socket.socket() as one:
        tune(one)
        tcp = socket.IPPROTO_TCP
        idle_s, interval_s, count = (
            one.getsockopt(tcp, option) for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert (one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE), idle_s + interval_s * count) == (1, 40)
        assert one.getsockopt(tcp, socket.TCP_NODELAY), "a small frame waits for no other"


def test_a_server_that_hung_up_and_starts_again_gets_its_port():
    with closing(REAL_NETWORK.listen(("127.0.0.1", 0))) as listener:
        address = listener.getsockname()
        with closing(REAL_NETWORK.connect(address, 10)) as client:
            accepted, _ = listener.accept()
            accepted.close()
            assert client.recv_into(memoryview(bytearray(1))) == 0
    REAL_NETWORK.listen(address).close()


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_poller_leaves_no_descriptor_whether_it_is_closed_or_dropped(is_closed):
    gc.collect()
    before = sorted(os.listdir("/proc/self/fd"))
    poller = REAL_NETWORK.poller()
    if is_closed:
        poller.close()
    del poller
    assert sorted(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("tls", "why"),
    [(None, "perhaps it wants TLS"), (ssl.create_default_context(), "TLS handshake")],
    ids=["plain", "TLS"],
)
def test_who_is_hung_up_on_hears_what_that_may_mean(tls, why):
    with closing(REAL_NETWORK.listen(("127.0.0.1", 0))) as listener:

        def hang_up():
            accepted, _ = listener.accept()
            accepted.close()

        peer = threading.Thread(target=hang_up)
        peer.start()
        with pytest.raises(NodeUnreachable, match=f"hung up.*{why}"):
            NodeConnection(Address(*listener.getsockname()), NodeAccess(tls=tls))
        peer.join()
