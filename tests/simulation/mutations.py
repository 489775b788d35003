"""Mutations of the log's code: each breaks one line, and a test has to fail.

A mutation names a function, or the class or module around it, and replaces a piece of its source that must occur
exactly once: a mutation that does not fit the code any more is an error, not skipped.
"""

import inspect
import textwrap
from collections.abc import Callable
from contextlib import contextmanager
from types import ModuleType
from typing import NamedTuple


class Mutation(NamedTuple):
    where: Callable | ModuleType
    old: str
    new: str


@contextmanager
def mutated(*mutations):
    """Inside the `with` the functions have the broken code, in all modules that have imported them."""
    before = []
    try:
        for mutation in mutations:
            function = _function_of(mutation)
            made = _made(function, mutation)
            before.append((function, function.__code__))
            function.__code__ = made.__code__
        yield
    finally:
        for function, code in reversed(before):
            function.__code__ = code


def _function_of(mutation):
    """The one that has the piece."""
    having = {one: _source(one).count(mutation.old) for one in _functions_of(mutation.where)}
    found = sum(having.values())
    assert found == 1, f"{mutation.where.__name__} has {mutation.old!r} {found} times: it has to follow the code"
    return next(one for one, count in having.items() if count)


def _functions_of(where):
    if not isinstance(where, type | ModuleType):
        return {_bare(where)}
    module = where.__name__ if isinstance(where, ModuleType) else where.__module__
    own = [one for one in map(_bare, vars(where).values()) if getattr(one, "__module__", None) == module]
    inner = [_functions_of(one) for one in own if isinstance(one, type)]
    return set().union({one for one in own if inspect.isfunction(one)}, *inner)


def _source(function):
    return textwrap.dedent(inspect.getsource(function))


def _made(function, mutation):
    source = _source(function)
    namespace = dict(function.__globals__)
    exec(compile(source.replace(mutation.old, mutation.new), function.__code__.co_filename, "exec"), namespace)
    return _bare(namespace[function.__name__])


def _bare(function):
    """Without what a decorator or a class put around it."""
    return inspect.unwrap(getattr(function, "__func__", function))
