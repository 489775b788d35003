"""Peers from before a call had its newest version: the same code, which speaks only the older one."""

import copy

from pushrep.protocol.calls import ApiKey
from pushrep.protocol.vocabulary import VOCABULARY, VersionRange


def of_version(newest):
    """What a node or a leader from before spoke of these calls."""
    spoken = copy.copy(VOCABULARY)
    capped = {key: VersionRange(0, newest) for key in (ApiKey.GRANT, ApiKey.DESCRIBE_LOG)}
    spoken.versions = {**VOCABULARY.versions, **capped}
    return spoken
