"""`python -m benchmarks.flood [--write] [TARGET ...]`: what a flood costs a service, a node and a console (N4).

    server   a process with `ulimit -n 1024`: an outbox that appends and has a health port; a node; a console
    flood    a process that holds up to 2,000 connections of one kind and opens 500 a second, or as many handshakes as
             the machine can make: silent, a byte in four seconds, half a request or handshake, a whole handshake
             without a certificate, with one that no rule names
    here     a leader that appends to the node with Acks.ALL, and two well-behaved clients, one from the flood's address

A row: what was opened, appends that failed, the longest wait of one and of each client's answers, and descriptors,
threads and memory before, at most during, and ten seconds after.
"""

import json
import random
import resource
import selectors
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, cast

import click

from benchmarks.__main__ import replace_section
from benchmarks.harness import machine, scratch
from pushrep import Outbox, OutboxConfig
from pushrep.console.access import ConsoleAccess
from pushrep.console.watch import PlaceWatch
from pushrep.console.web import ConsoleServer, ConsoleSettings
from pushrep.env import REAL_NETWORK
from pushrep.env.network import HostPort, Socket
from pushrep.errors import PushrepError
from pushrep.health import HealthSettings
from pushrep.replicate.certificates import CertificateFiles, mutual_tls
from pushrep.replicate.connecting import ReplicaClient
from pushrep.replicate.node_settings import NodeSettings
from pushrep.replicate.replica_node import ReplicaNode
from pushrep.replicate.settings import PushSettings
from pushrep.replicate.sockets import Address
from pushrep.wire.calls import encode
from pushrep.wire.push_messages import ApiVersionsRequest, ListLogsRequest, ListLogsResponse

DESCRIPTORS, HELD, A_SECOND = 1024, 2000, 500
TARGETS = ("service", "node", "console")
KINDS, WITH_TLS = ("silent", "dribbling", "half-open"), ("no certificate", "no role")
WHAT = (
    "Of the server: before / at most during / ten seconds after the flood. A client that is closed asks again "
    "([notes](../docs/internals/benchmark-notes.md#a-flood-of-connections))."
)
ELSEWHERE = "127.0.0.2"
HERE = Address("127.0.0.1", 0)
REQUEST = b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


def files(tls: Path, name: str) -> tuple[Path, Path, Path]:
    return tls / f"{name}.pem", tls / f"{name}.key", tls / "ca.pem"


class Appends:
    """Appends one record after the other in a thread, and notes failures and the longest wait."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox, self._stop = outbox, threading.Event()
        self.made = self.failed = 0
        self.longest_s = 0.0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(0.01):
            began = time.monotonic()
            try:
                self._outbox.append(0, b"x" * 1000).result(60)
                self.made += 1
            except (PushrepError, TimeoutError):
                self.failed += 1
            self.longest_s = max(self.longest_s, time.monotonic() - began)

    def told(self) -> dict[str, Any]:
        return {"made": self.made, "failed": self.failed, "longest_s": self.longest_s}

    def end(self) -> None:
        self._stop.set()
        self._thread.join()


def serve(target: str, root: Path, tls: Path | None) -> None:
    """The server's process: prints its port, then its figures for each line that it reads."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    own = None if tls is None else files(tls, "127.0.0.1")
    appends = None
    with ExitStack() as stack:
        if target == "node":
            certificates = None if own is None else CertificateFiles(*own)
            allow = frozenset({"any"} if own is None else {"owner", "reader=*:list"})
            settings = NodeSettings(address=HERE, allow=allow, certificates=certificates)
            port = stack.enter_context(ReplicaNode(root / "node", settings)).address.port
        elif target == "console":
            made = ConsoleSettings(access=ConsoleAccess(listen=HERE), certificate=None if own is None else own[:2])
            port = stack.enter_context(ConsoleServer(PlaceWatch([str(root)]), made)).address.port
        else:
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            names = {} if own is None else dict(zip(("cert", "key", "ca"), map(str, own), strict=True))
            health = HealthSettings(listen=f"127.0.0.1:{port}", **names)
            outbox = stack.enter_context(Outbox.open(root / "outbox", "orders", 1, "billing", health=health))
            appends = Appends(outbox)
            stack.callback(appends.end)
        print(port, flush=True)
        for _ in sys.stdin:
            status = Path("/proc/self/status").read_text(encoding="ascii")
            told: dict[str, Any] = {
                "descriptors": len(list(Path("/proc/self/fd").iterdir())),
                "threads": threading.active_count(),
                "rss_mb": int(status.split("VmRSS:")[1].split()[0]) >> 10,
            }
            print(json.dumps(told | (appends.told() if appends else {})), flush=True)


def flood(port: int, kind: str, tls: Path | None, *, is_web: bool) -> None:
    """The flood's process, until its input ends. It prints a line when it begins, and then how many it opened."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (HELD + 500, HELD + 500))
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    versions = b"".join(map(bytes, encode(ApiVersionsRequest(), 1)))
    whole = REQUEST if is_web else versions
    print(flush=True)
    if kind in WITH_TLS:
        assert tls is not None, "these make handshakes"
        opened = _handshakes(port, tls, "stranger" if kind == "no role" else "", whole[:-1] if is_web else whole, over)
    else:
        opened = _connections(port, kind, whole if tls is None else _hello(), over)
    print(opened, flush=True)


def _hello() -> bytes:
    hello = ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        context = ssl.create_default_context()
        context.wrap_bio(ssl.MemoryBIO(), hello, server_hostname="127.0.0.1").do_handshake()
    return hello.read()


def _connections(port: int, kind: str, whole: bytes, over: threading.Event) -> int:
    """HELD at a time, A_SECOND new ones; what is closed is opened again. A dribble is a byte in four seconds."""
    held: dict[int, socket.socket] = {}
    said: dict[int, int] = {}
    selector, due, opened = selectors.DefaultSelector(), time.monotonic(), 0
    while not over.is_set():
        for key, _ in selector.select(0):
            _drop(selector, held, key.fd)
        while (now := time.monotonic()) < due:
            time.sleep(min(0.002, due - now))
        due += 1 / A_SECOND
        if len(held) >= HELD:
            _drop(selector, held, random.choice(list(held)))
        with suppress(OSError):
            sock = socket.create_connection(("127.0.0.1", port), 5)
            sock.setblocking(False)
            held[sock.fileno()], said[sock.fileno()] = sock, 0
            selector.register(sock, selectors.EVENT_READ)
            opened += 1
            sock.send({"silent": b"", "dribbling": b"", "half-open": whole[: len(whole) // 2]}[kind])
        if kind == "dribbling":
            for fd in random.sample(list(held), min(1 + len(held) // (4 * A_SECOND), len(held))):
                with suppress(OSError):
                    held[fd].send(whole[said[fd] : said[fd] + 1])
                    said[fd] += 1
    return opened


def _drop(selector: selectors.BaseSelector, held: dict[int, socket.socket], fd: int) -> None:
    sock = held.pop(fd)
    selector.unregister(sock)
    sock.close()


def _handshakes(port: int, tls: Path, name: str, said: bytes, over: threading.Event) -> int:
    """Whole handshakes, by eight threads, each held as long as it can be: as many as the machine can make."""
    context = ssl.create_default_context(cafile=tls / "ca.pem")
    if name:
        context.load_cert_chain(*files(tls, name)[:2])
    opened = [0] * 8

    def make(number: int) -> None:
        kept: list[ssl.SSLSocket] = []
        while not over.is_set():
            with suppress(OSError):
                sock = context.wrap_socket(
                    socket.create_connection(("127.0.0.1", port), 5), server_hostname="127.0.0.1"
                )
                opened[number] += 1
                sock.send(said)
                kept = [*kept[-HELD // len(opened) :], sock]

    threads = [threading.Thread(target=make, args=(number,), daemon=True) for number in range(len(opened))]
    for thread in threads:
        thread.start()
    over.wait()
    return sum(opened)


@contextmanager
def child(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "benchmarks.flood", *map(str, arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def ask(server: subprocess.Popen[str]) -> dict[str, Any]:
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write("\n")
    server.stdin.flush()
    found: dict[str, Any] = json.loads(server.stdout.readline())
    return found


def answered_s(once: Callable[[], object]) -> float:
    """How long it takes until it is answered; one that made room for others tries again."""
    began = time.monotonic()
    while time.monotonic() - began < 60:
        with suppress(OSError, PushrepError):
            once()
            break
    return time.monotonic() - began


class From:
    """The system's network, from an address of its own: another one than the flood's."""

    threads, listen, poller = REAL_NETWORK.threads, REAL_NETWORK.listen, REAL_NETWORK.poller

    def connect(self, address: HostPort, timeout_s: float) -> Socket:
        return socket.create_connection(address, timeout_s, (ELSEWHERE, 0))


def ask_once(target: str, port: int, push: PushSettings) -> None:
    """A well-behaved client's question, over a connection of its own."""
    if target == "node":
        with ReplicaClient(Address("127.0.0.1", port), push) as well:
            well.ask(ListLogsRequest(), ListLogsResponse)
        return
    with cast("socket.socket", push.network.connect(Address("127.0.0.1", port), 5)) as plain:
        sock = plain if push.tls is None else push.tls.wrap_socket(plain, server_hostname="127.0.0.1")
        sock.sendall(REQUEST)
        if not sock.recv(12).startswith(b"HTTP/1."):
            raise ConnectionError("closed")


def measure(target: str, kind: str, tls: Path | None, seconds: float, root: Path) -> str:
    """A row of the table."""
    with ExitStack() as stack:
        own = ("--tls", tls) if tls else ()
        server = stack.enter_context(child("--serve", target, "--root", root, *own))
        assert server.stdout is not None
        port = int(server.stdout.readline())
        context = (
            None if tls is None else mutual_tls(**dict(zip(("cert", "key", "ca"), files(tls, "owner"), strict=True)))
        )
        push = PushSettings(tls=context)
        leader = None
        if target == "node":
            outbox = Outbox.open(
                root / "leader", "orders", 1, "billing", replicas=[f"127.0.0.1:{port}"], config=OutboxConfig(push=push)
            )
            leader = Appends(stack.enter_context(outbox))
            stack.callback(leader.end)
        time.sleep(1)
        before = ask(server)
        during, clients = dict(before), (push, replace(push, network=From()))
        longest_s = [0.0, 0.0]
        with child("--flood", port, "--kind", kind, "--serve", target, *own) as flooding:
            assert flooding.stdout is not None
            flooding.stdout.readline()
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                for number, client in enumerate(clients):
                    answered = answered_s(partial(ask_once, target, port, client))
                    longest_s[number] = max(longest_s[number], answered)
                during = {name: max(value, during[name]) for name, value in ask(server).items()}
            assert flooding.poll() is None, "the flood went on"
            opened, _ = flooding.communicate()
        time.sleep(10)
        after = ask(server)
        told = leader.told() if leader is not None else after
        shown = [f"{before[name]} / {during[name]} / {after[name]}" for name in ("descriptors", "threads", "rss_mb")]
        made = f"{told['failed']} of {told['made'] + told['failed']:,}" if "made" in told else "-"
        waits = (f"{told['longest_s']:.2f}" if "made" in told else "-", *(f"{one:.2f}" for one in longest_s))
        return " | ".join((target, "TLS" if tls else "plain", kind, f"{int(opened):,}", made, *waits, *shown))


def results(targets: Sequence[str], seconds: float, home: Path) -> Iterator[str]:
    """The table's lines."""
    yield (
        "| target | | flood | opened | appends failed | longest append, s | answer, s | from elsewhere, s "
        "| descriptors | threads | memory, MiB |"
    )
    yield "|---|---|---|--:|--:|--:|--:|--:|--:|--:|--:|"
    script = Path(__file__).parents[1] / "examples" / "certificates.sh"
    subprocess.run([script, home / "tls", "127.0.0.1", "owner", "stranger"], check=True, capture_output=True)
    for target, tls in product(targets or TARGETS, (None, home / "tls")):
        for kind in KINDS if tls is None else (*KINDS, *WITH_TLS):
            place = home / f"{target} {tls is not None} {kind}"
            place.mkdir()
            yield f"| {measure(target, kind, tls, seconds, place)} |"


@click.command(help=__doc__)
@click.argument("targets", nargs=-1, metavar="[TARGET ...]", type=click.Choice(TARGETS))
@click.option("--seconds", default=12.0, show_default=True, type=click.FloatRange(1, 60))
@click.option("--write", is_flag=True, help="Put the table into benchmarks/RESULTS.md, with command and machine.")
@click.option("--serve", "serve_", type=click.Choice(TARGETS), hidden=True)
@click.option("--flood", "flooded", type=int, hidden=True)
@click.option("--kind", type=click.Choice((*KINDS, *WITH_TLS)), hidden=True)
@click.option("--root", type=click.Path(path_type=Path), hidden=True)
@click.option("--tls", type=click.Path(path_type=Path), hidden=True)
def main(  # noqa: PLR0917 - what its own processes are told
    targets: Sequence[str],
    seconds: float,
    write: bool,  # noqa: FBT001 - a switch of the command
    serve_: str | None,
    flooded: int | None,
    kind: str | None,
    root: Path | None,
    tls: Path | None,
) -> None:
    if flooded is not None and kind is not None:
        flood(flooded, kind, tls, is_web=serve_ != "node")
    elif serve_ is not None and root is not None:
        serve(serve_, root, tls)
    else:
        lines = []
        with scratch("flood") as home:
            for line in results(targets, seconds, home):
                print(line, flush=True)
                lines.append(line)
        if write:
            host = machine()
            place = f"{host['processors']} processors ({host['processor']}), {host['memory_gib']} GiB, {host['system']}"
            text = f"`python -m benchmarks.flood --seconds {seconds:g}` on {place}, Python {host['python']}.\n{WHAT}"
            replace_section(Path(__file__).parent / "RESULTS.md", "flood", "\n".join((text, "", *lines)))


if __name__ == "__main__":
    main()
