"""Which sessions read which log, so that news of a log wakes them and nobody else."""

from collections.abc import Iterator
from contextlib import suppress

from pushrep.errors import PushrepError
from pushrep.node.replay_session import ServedSession
from pushrep.replay.model import LogFacts
from pushrep.topic_id_partition import TopicIdPartition


class Watched:
    """Logs and their sessions. For the server's thread, but for `has` and `note`."""

    def __init__(self) -> None:
        self._sessions: dict[TopicIdPartition, dict[int, ServedSession]] = {}
        self._log_of: dict[int, TopicIdPartition] = {}
        self._facts: dict[TopicIdPartition, LogFacts] = {}
        self._changed: set[TopicIdPartition] = set()

    def has(self, tp: TopicIdPartition) -> bool:
        """Whether anybody reads it. Any thread."""
        return tp in self._sessions

    def note(self, tp: TopicIdPartition) -> bool:
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
            self._facts.pop(tp, None)

    def of(self, tp: TopicIdPartition) -> list[ServedSession]:
        """Who reads it."""
        return list(self._sessions.get(tp, {}).values())

    def news(self) -> Iterator[ServedSession]:
        """The sessions of logs that were noted since the last call."""
        while self._changed:
            yield from self.of(self._changed.pop())  # taken off before anybody looks: what comes then is noted anew

    def moved(self) -> Iterator[ServedSession]:
        """The sessions of logs that look different from the last call, and those that wait for a log's stop."""
        for tp, sessions in list(self._sessions.items()):
            facts = self._facts.get(tp)
            with suppress(PushrepError, OSError):  # their next turn meets it, too
                facts = next(iter(sessions.values())).source.facts(with_liveness=False)
            is_news = facts is None or facts != self._facts.get(tp)
            if facts is not None:
                self._facts[tp] = facts
            for served in list(sessions.values()):
                if is_news or served.session.wants_liveness:
                    yield served
