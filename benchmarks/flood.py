"""`python -m benchmarks.flood [--seconds 20]`: what a flood of connections costs a service, a node and a console (N4).

    server   a process with `ulimit -n 1024`: an outbox that appends and has a health port; a node; a console
    flood    a process that holds 2,000 connections and opens 500 a second: silent, dribbling, half a handshake or
             request, without a certificate, with one that no rule names; what is closed is opened again
    here     a leader that appends to the node with Acks.ALL, and a well-behaved client, from the flood's address

A row: appends that failed, the longest wait of one and of the well-behaved client's answers, and descriptors, threads
and memory before, at most during, and ten seconds after.
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
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import click

from benchmarks.harness import scratch
from pushrep import Outbox, OutboxConfig
from pushrep.console.access import ConsoleAccess
from pushrep.console.watch import PlaceWatch
from pushrep.console.web import ConsoleServer, ConsoleSettings
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


def flood(port: int, tls: Path | None) -> None:
    """The flood's process, until its input ends."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (HELD + 500, HELD + 500))
    hello = ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        context = ssl.create_default_context()
        context.wrap_bio(ssl.MemoryBIO(), hello, server_hostname="127.0.0.1").do_handshake()
    begun = hello.read()[:200]
    versions = b"".join(map(bytes, encode(ApiVersionsRequest(), 1)))
    first = (b"", begun[:1], begun, versions, versions[:5], REQUEST[:30])
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    if tls is not None:  # a whole handshake costs the flood as much as the server: fewer of these
        for name in ("", "stranger", "stranger", ""):
            threading.Thread(target=_handshakes, args=(port, tls, name, versions, over), daemon=True).start()
    held: dict[int, socket.socket] = {}
    selector, due = selectors.DefaultSelector(), time.monotonic()
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
            held[sock.fileno()] = sock
            selector.register(sock, selectors.EVENT_READ)
            sock.send(random.choice(first))
        for one in random.sample(list(held.values()), min(5, len(held))):
            with suppress(OSError):
                one.send(b"\x16")


def _drop(selector: selectors.BaseSelector, held: dict[int, socket.socket], fd: int) -> None:
    sock = held.pop(fd)
    selector.unregister(sock)
    sock.close()


def _handshakes(port: int, tls: Path, name: str, versions: bytes, over: threading.Event) -> None:
    """Whole handshakes, without a certificate or with one that no rule names, which are held as long as they can be."""
    context = ssl.create_default_context(cafile=tls / "ca.pem")
    if name:
        context.load_cert_chain(*files(tls, name)[:2])
    kept: list[ssl.SSLSocket] = []
    while not over.wait(0.05):
        with suppress(OSError):
            sock = context.wrap_socket(socket.create_connection(("127.0.0.1", port), 5), server_hostname="127.0.0.1")
            sock.send(versions)
            kept = [*kept[-50:], sock]


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


def measure(target: str, tls: Path | None, seconds: float, root: Path) -> str:
    with ExitStack() as stack:
        server = stack.enter_context(child("--serve", target, "--root", root, *(("--tls", tls) if tls else ())))
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

        def once() -> None:
            if target == "node":
                with ReplicaClient(Address("127.0.0.1", port), push) as well:
                    well.ask(ListLogsRequest(), ListLogsResponse)
                return
            with socket.create_connection(("127.0.0.1", port), 5) as plain:
                sock = plain if context is None else context.wrap_socket(plain, server_hostname="127.0.0.1")
                sock.sendall(REQUEST)
                if not sock.recv(12).startswith(b"HTTP/1."):
                    raise ConnectionError("closed")

        time.sleep(1)
        before = ask(server)
        during, longest_s, count = dict(before), 0.0, 0
        with child("--flood", port, *(("--tls", tls) if tls else ())) as flooding:
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                longest_s, count = max(longest_s, answered_s(once)), count + 1
                during = {name: max(value, during[name]) for name, value in ask(server).items()}
            assert flooding.poll() is None, "the flood went on"
        time.sleep(10)
        after = ask(server)
        appends = (
            leader.told()
            if leader is not None
            else {name: after.get(name, 0) for name in ("made", "failed", "longest_s")}
        )
        shown = [f"{before[name]} / {during[name]} / {after[name]}" for name in ("descriptors", "threads", "rss_mb")]
        made = f"{appends['failed']} of {appends['made'] + appends['failed']:,}" if appends["made"] else "-"
        waits = (f"{appends['longest_s']:.2f}" if appends["made"] else "-", f"{longest_s:.2f} ({count})")
        return " | ".join((target, "TLS" if tls else "plain", made, *waits, *shown))


@click.command(help=__doc__)
@click.option("--seconds", default=20.0, show_default=True, type=click.FloatRange(1, 60))
@click.option("--serve", "serve_", type=click.Choice(TARGETS), hidden=True)
@click.option("--flood", "flooded", type=int, hidden=True)
@click.option("--root", type=click.Path(path_type=Path), hidden=True)
@click.option("--tls", type=click.Path(path_type=Path), hidden=True)
def main(seconds: float, serve_: str | None, flooded: int | None, root: Path | None, tls: Path | None) -> None:
    if serve_ is not None and root is not None:
        serve(serve_, root, tls)
    elif flooded is not None:
        flood(flooded, tls)
    else:
        print("| target | | appends failed | longest append, s | longest answer, s (asked) "
              "| descriptors | threads | memory, MiB |")  # fmt: skip
        print("|---|---|--:|--:|--:|--:|--:|--:|")
        with scratch("flood") as home:
            script = Path(__file__).parents[1] / "examples" / "certificates.sh"
            subprocess.run([script, home / "tls", "127.0.0.1", "owner", "stranger"], check=True, capture_output=True)
            for target in TARGETS:
                for chosen in (None, home / "tls"):
                    place = home / f"{target}-{chosen is not None}"
                    place.mkdir()
                    print(f"| {measure(target, chosen, seconds, place)} |", flush=True)


if __name__ == "__main__":
    main()
