"""The log's own code with one line broken, to see that the tests see it.

A mutation names a function and replaces a piece of its source, which must stand there just once: a mutation that no
longer fits the code fails, and is not passed over.
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
    """The functions have the broken code meanwhile, whoever has imported them by whatever name."""
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
