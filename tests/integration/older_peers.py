"""Peers without the newest version of a call: the same code, which negotiates the older version only."""

import copy

from pushrep.wire.calls import VOCABULARY, ApiKey, VersionRange


def without_beats():
    """A node of a version without beats, which leaders send each second."""
    spoken = copy.copy(VOCABULARY)
    spoken.versions = {key: versions for key, versions in VOCABULARY.versions.items() if key is not ApiKey.BEAT}
    return spoken


def of_version(newest):
    """The versions of these calls that an older node or leader supports."""
    spoken = copy.copy(VOCABULARY)
    capped = {key: VersionRange(0, newest) for key in (ApiKey.GRANT, ApiKey.DESCRIBE_LOG)}
    spoken.versions = {**VOCABULARY.versions, **capped}
    return spoken
