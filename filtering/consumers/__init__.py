"""Kafka consumers that yield each record once: shells around a client, `filtering.consumers.confluent` and `.aiokafka`.

group_member.py and assignment.py decide, and know no client; import the shell of the client that you have.
"""

from filtering.consumers.commits import CommitFailed, MarksTooLarge

__all__ = ["CommitFailed", "MarksTooLarge"]
