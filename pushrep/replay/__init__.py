"""Replay: any part of any log again, bounded or following, from an offset or a time.

    ReplayRequest ──▶ plan_replay ──▶ ReplaySession (events in, effects out) ──▶ blocks of whole batches ──▶ subscriber

The table of states is states.py, the refusals plan.py, the arithmetic limits.py; docs/replay.md tells all of it.
"""
