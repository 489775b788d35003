"""PYSPARK_PYTHON of the tests' Sparks: a Python that is forked with its libraries imported, instead of started.

    JVM ── worker_python -m module ──▶ the JVM's fork server ── fork ──▶ runs the module, with the caller's 0, 1 and 2
                                       has imported pyspark, pandas, pyarrow and our jobs

Spark starts a Python for each run of a streaming query, and a daemon whose forks import all again: more than half of
the processor time of the streaming tests was imports. And it waits for 10 s at most until that Python connects, which a
busy machine may need for the imports alone. The first Python that a JVM starts begins the fork server, in the JVM's own
session and process group; it ends with the JVM. Where none can be, Python starts as always.

`pushrep` in the examples of the docs (house/programs/) is forked in the same way: of a server that has imported the
commands and ends with who runs the examples. `worker_forks.py --commands-of PID -m pushrep.cli.main ARGUMENTS`
"""

import _socket  # Python's own `socket` above it takes as long to import as all else that a caller does
import marshal
import os
import sys
import zlib

_PRELOADED = (
    *("pyspark.worker", "pyspark.sql.worker.plan_data_source_read", "pandas", "pyarrow.compute", "pyarrow.dataset"),
    *("pyspark.sql.streaming.stateful_processor_api_client", "spark_jobs.keyed_state", "spark_jobs.sources.datasource"),
    *os.environ.get("PUSHREP_TESTS_PRELOADED", "").split(),
)
_COMMANDS, _MARKS = "pushrep.cli.main", "spark_jobs.marks_command"
_SPARKS_ZIPS = "/python/lib/"
_SIZE, _FD_SIZE = 8, 4


def main():
    if sys.argv[1:2] == ["--serve"]:
        sys.path[0] = ""  # as with -m; ours is tests/
        kind, parent, name, ready = sys.argv[2:]
        if listener := _listener(name, int(ready)):
            run(**serve(kind, int(parent), listener))
        return
    kind, parent = "workers", os.getppid()
    if sys.argv[1:2] == ["--commands-of"]:
        kind, parent = "commands", int(sys.argv[2])
        del sys.argv[1:3]
    if sys.platform == "linux" and sys.argv[1:2] == ["-m"] and parent > 1:
        ask(kind, parent)
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])


def ask(kind, parent):
    """Have the module run by a fork, and end as that ends. Returns if nobody forks."""
    with open(f"/proc/{parent}/stat") as stat:  # noqa: PTH123 - importing pathlib takes longer than all the rest
        began = stat.read().rpartition(")")[2].split()[19]
    # Some of Spark's Pythons have the same places twice in it: the second is never looked at. And a zip of Spark's own
    # is read anew by each fork and compiled by each server: the same modules are installed here.
    places = dict.fromkeys(os.environ.get("PYTHONPATH", "").split(os.pathsep))
    places = os.pathsep.join(place for place in places if _SPARKS_ZIPS not in place)
    os.environ["PYTHONPATH"] = places
    name = f"pushrep-tests-{kind}-{parent}-{began}-{zlib.crc32(places.encode())}"
    request = marshal.dumps({"argv": sys.argv[2:], "cwd": os.getcwd(), "environment": dict(os.environ)})  # noqa: PTH109
    server = _socket.socket(_socket.AF_UNIX)
    try:
        server.connect("\0" + name)
    except ConnectionRefusedError:
        _begin_server(kind, parent, name)
        try:
            server.connect("\0" + name)
        except ConnectionRefusedError:  # the server of another has the name and does not listen yet, or has ended
            return
    streams = b"".join(stream.to_bytes(_FD_SIZE, sys.byteorder) for stream in (0, 1, 2))
    try:
        server.sendmsg([len(request).to_bytes(_SIZE)], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, streams)])
        server.sendall(request)
        if not server.recv(1):
            return
    except ConnectionError:  # it could not import
        return
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):  # the module's alone: their ends must be seen when it ends
        os.dup2(null, stream)
    code = int.from_bytes(server.recv(_SIZE) or b"\1", signed=True)
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)


def _begin_server(kind, parent, name):
    """Returns once it listens, or knows that another does."""
    read, write = os.pipe()
    os.set_inheritable(write, True)
    streams = [(os.POSIX_SPAWN_OPEN, stream, os.devnull, os.O_RDWR, 0) for stream in range(3)]
    command = [sys.executable, __file__, "--serve", kind, str(parent), name, str(write)]
    os.posix_spawn(sys.executable, command, os.environ, file_actions=streams)
    os.close(write)
    os.read(read, 1)
    os.close(read)


def _listener(name, ready):
    import socket

    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind("\0" + name)
    except OSError:
        return None  # another was faster
    listener.listen(256)
    os.close(ready)
    return listener


class Forks:
    """Which process requested which child, by the descriptors that poll returns."""

    def __init__(self):
        self.callers, self.children = {}, {}

    def begin(self, poll, caller, pid):
        child = os.pidfd_open(pid)
        self.callers[caller.fileno()] = self.children[child] = (caller, pid)
        poll.register(child)
        poll.register(caller, 0)  # that it hangs up is always told
        caller.sendall(b"+")

    def end(self, poll, child):
        caller, pid = self.children.pop(child)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        poll.unregister(child)
        os.close(child)
        if self.callers.pop(caller.fileno(), None):
            poll.unregister(caller)
            caller.sendall(code.to_bytes(_SIZE, signed=True))
        caller.close()

    def hung_up(self, poll, caller):
        """Spark ends a Python by ending what it started."""
        import signal

        poll.unregister(caller)
        os.kill(self.callers.pop(caller)[1], signal.SIGTERM)


def _imported(kind):
    """The modules that are imported before the forks."""
    if kind == "workers":
        return _PRELOADED
    import pkgutil

    import pushrep.cli

    return (*(f"pushrep.cli.{found.name}" for found in pkgutil.iter_modules(pushrep.cli.__path__)), _MARKS)


def serve(kind, parent, listener):
    """Fork for whoever asks, and end when the parent does. Returns only in a fork: what it is to run."""
    import contextlib
    import gc
    import importlib
    import select
    import socket

    parent_ends, poll, forks = os.pidfd_open(parent), select.poll(), Forks()
    for module in _imported(kind):
        with contextlib.suppress(ModuleNotFoundError):  # other releases of Spark lack some
            importlib.import_module(module)
    gc.collect()
    gc.freeze()  # or each fork's first collection would copy all
    os.chdir("/")  # the first caller's directory may be a file system that is to be unmounted
    poll.register(parent_ends, select.POLLIN)
    poll.register(listener, select.POLLIN)
    while True:
        for ready, _ in poll.poll():
            if ready == parent_ends:
                os._exit(0)
            elif ready in forks.children:
                forks.end(poll, ready)
            elif ready in forks.callers:
                forks.hung_up(poll, ready)
            elif ready == listener.fileno():
                caller, _ = listener.accept()
                head, streams, _, _ = socket.recv_fds(caller, _SIZE, 3)
                with caller.makefile("rb") as body:
                    request = marshal.loads(body.read(int.from_bytes(head)))
                if (pid := os.fork()) == 0:
                    for number, stream in enumerate(streams):
                        os.dup2(stream, number)
                    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
                    return request
                for stream in streams:
                    os.close(stream)
                forks.begin(poll, caller, pid)


def run(argv, cwd, environment):
    """Run the module as `python -m` would have, and end as the forks of Spark's daemon do, without taking all apart."""
    import runpy
    import traceback

    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.argv = argv
    code = 0
    try:
        if argv[0] == _COMMANDS:  # as the console script does
            sys.modules[_COMMANDS].main()
        runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:  # noqa: BLE001 - whatever it is, this is the end
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
