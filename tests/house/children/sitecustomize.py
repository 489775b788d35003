"""Python imports this where it starts, once it stands on PYTHONPATH: the programs that tests start note, too, which
lines they execute, each under the test that runs when it starts, or when it is forked. mutants.py makes its map so.

What a killed program executed is not noted.
"""

import atexit
import contextlib
import os
from pathlib import Path

import coverage

TREE_OF, SETTINGS, NOW = "PUSHREP_MUTANTS_TREE", "PUSHREP_MUTANTS_SETTINGS", "PUSHREP_MUTANTS_NOW"
"""Environment variables: the tree, coverage's settings, and the file that holds the id of the test that runs; without
the last one this process runs tests, or orders others to.
"""
_exit = os._exit
_running = []


def begin():
    """Note lines from here on, under the test of now."""
    while _running:  # inherited by a fork, and the parent's to save
        _running.pop().stop()
    test = Path(os.environ[NOW]).read_text(encoding="utf-8")
    with contextlib.chdir(os.environ[TREE_OF]):  # names of files are noted relative to it
        now = coverage.Coverage(config_file=os.environ[SETTINGS], data_suffix=True, context=f"{test}|program")
        now.start()
    _running.append(now)


def end():
    """Save what was noted."""
    while _running:
        now = _running.pop()
        now.stop()
        now.save()


def exit_at_once(code):
    """`os._exit`, which leaves no time for atexit."""
    end()
    _exit(code)


if NOW in os.environ:
    begin()
    atexit.register(end)
    os.register_at_fork(after_in_child=begin)
    os._exit = exit_at_once
