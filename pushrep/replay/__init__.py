"""Replay: read any part of a log again, bounded or following, from an offset or a time.

    ReplayRequest ──▶ plan_replay ──▶ ReplaySession (events in, effects out) ──▶ blocks of whole batches ──▶ subscriber

    ReplayClient(directory).replay(ReplayRequest("orders-0", position=AtTime(ms), length=TO_END))

The table of states is in events.py, refusals and limits in plan.py; docs/replay.md has all of it.
"""

from pushrep.replay.catalogue import Catalogue, CatalogueEntry, FoundLog, read_catalogue
from pushrep.replay.client import ReplayClient
from pushrep.replay.node_connection import NodeAccess, NodeUnreachable
from pushrep.replay.plan import (
    FOLLOW,
    MAX_TIMESTAMP,
    TO_END,
    AtTime,
    Length,
    RecordingInfo,
    ReplayRefused,
    ReplayRequest,
    ReplaySettings,
)
from pushrep.replay.replay import Replay, ReplayBatches, ReplayedBatch, ReplayFailed, ReplayTruncated
from pushrep.wire.replay_messages import RecordingState, ReplayEndReason

__all__ = [
    "FOLLOW",
    "MAX_TIMESTAMP",
    "TO_END",
    "AtTime",
    "Catalogue",
    "CatalogueEntry",
    "FoundLog",
    "Length",
    "NodeAccess",
    "NodeUnreachable",
    "RecordingInfo",
    "RecordingState",
    "Replay",
    "ReplayBatches",
    "ReplayClient",
    "ReplayEndReason",
    "ReplayFailed",
    "ReplayRefused",
    "ReplayRequest",
    "ReplaySettings",
    "ReplayTruncated",
    "ReplayedBatch",
    "read_catalogue",
]
