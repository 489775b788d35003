"""Which sessions read which log, so that news of a log wakes them and nobody else."""

from collections.abc import Iterator
from contextlib import suppress
from typing import TypeAlias

from pushrep.errors import PushrepError
from pushrep.node.replay_recordings import Marker
from pushrep.node.replay_session import ServedSession
from pushrep.replay.limits import LOG_BOUNDS, tip_of
from pushrep.replay.model import LogSnapshot
from pushrep.replay.session import ReplaySession
from pushrep.topic_id_partition import TopicIdPartition

Looks: TypeAlias = tuple[LogSnapshot, Marker]
"""What readers see of a log, and whether it is the same one."""


class Watched:
    """Logs and their sessions. For the server's thread, but for `has` and `note`."""

    def __init__(self) -> None:
        self._sessions: dict[TopicIdPartition, dict[int, ServedSession]] = {}
        self._log_of: dict[int, TopicIdPartition] = {}
        self._looks: dict[TopicIdPartition, Looks] = {}
        self._changed: set[TopicIdPartition] = set()

    def has(self, tp: TopicIdPartition) -> bool:
        """Whether anybody reads it. Any thread."""
        return tp in self._sessions

    def mark_changed(self, tp: TopicIdPartition) -> bool:
        """It has changed; False if that is known. Any thread."""
        if tp in self._changed:
            return False
        self._changed.add(tp)
        return True

    def add(self, tp: TopicIdPartition, served: ServedSession) -> None:
        """`served` reads it from now on."""
        self._sessions.setdefault(tp, {})[served.session.id] = served
        self._log_of[served.session.id] = tp

    def remove(self, served: ServedSession) -> None:
        """It reads nothing any more."""
        tp = self._log_of.pop(served.session.id, None)
        if tp is None:
            return
        self._sessions[tp].pop(served.session.id, None)
        if not self._sessions[tp]:
            del self._sessions[tp]
            self._looks.pop(tp, None)

    def of(self, tp: TopicIdPartition) -> list[ServedSession]:
        """Who reads it."""
        return list(self._sessions.get(tp, {}).values())

    def news(self) -> Iterator[ServedSession]:
        """The sessions of logs that were noted since the last call."""
        while self._changed:
            yield from self._moved(self._changed.pop())  # taken off before anybody looks: what comes then is noted anew

    def moved(self) -> Iterator[ServedSession]:
        """The sessions of logs that look different from the last call, and those that wait for a log's stop."""
        for tp in list(self._sessions):
            yield from self._moved(tp)

    def _moved(self, tp: TopicIdPartition) -> Iterator[ServedSession]:
        sessions = self.of(tp)
        if not sessions:
            return
        looks = None
        with suppress(PushrepError, OSError):  # their next turn meets it, too
            source = sessions[0].source
            looks = (source.facts(with_liveness=False), source.marker())
        before = self._looks.get(tp)
        if looks is not None:
            self._looks[tp] = looks
        is_all_news = looks is None or before is None or not _has_only_grown(before, looks)
        facts = looks[0] if looks is not None and looks != before else None
        for served in sessions:
            if is_all_news or _is_for(served.session, facts):
                yield served


def _is_for(session: ReplaySession, facts: LogSnapshot | None) -> bool:
    """Whether it may read further in a log that is so now (None: as before), or that can't be told from here."""
    bound = session.plan.bound
    if bound not in LOG_BOUNDS or session.wants_liveness:  # a counter moves by itself, and so does a writer's life
        return True
    return facts is not None and tip_of(facts, bound, None).bound != session.tip


def _has_only_grown(before: Looks, now: Looks) -> bool:
    """Then who is told is who may read further: of each append some hear twice, and only one of the two is for them."""
    (facts, marker), (facts_now, marker_now) = before, now
    return marker == marker_now and facts.start == facts_now.start and facts.written <= facts_now.written
