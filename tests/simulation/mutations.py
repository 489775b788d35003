"""Mutations of the log's code: each breaks one line, and a test has to fail.

A mutation names a function and replaces a piece of its source that must occur exactly once: a mutation that does not
fit the code any more is an error, not skipped.
"""

import inspect
import textwrap
from collections.abc import Callable
from contextlib import contextmanager
from typing import NamedTuple


class Mutation(NamedTuple):
    function: Callable
    old: str
    new: str


@contextmanager
def mutated(*mutations):
    """Inside the `with` the functions have the broken code, in all modules that have imported them."""
    before = []
    try:
        for mutation in mutations:
            function = _bare(mutation.function)
            made = _made(function, mutation)
            before.append((function, function.__code__))
            function.__code__ = made.__code__
        yield
    finally:
        for function, code in reversed(before):
            function.__code__ = code


def _made(function, mutation):
    source = textwrap.dedent(inspect.getsource(function))
    found = source.count(mutation.old)
    assert found == 1, f"{function.__qualname__} has {mutation.old!r} {found} times: it has to follow the code"
    namespace = dict(function.__globals__)
    exec(compile(source.replace(mutation.old, mutation.new), function.__code__.co_filename, "exec"), namespace)
    return _bare(namespace[function.__name__])


def _bare(function):
    """Without what a decorator or a class put around it."""
    return inspect.unwrap(getattr(function, "__func__", function))
