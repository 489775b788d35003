"""Which version of each call both sides speak: asked once, at the start of a connection.

The client asks ApiVersions in its newest version. A server that does not know it answers in version 0 with
UNSUPPORTED_VERSION and what it speaks; the client asks again in a version that both know (Kafka's KIP-511).
"""

from collections.abc import Mapping

from pushrep.wire.calls import ApiKey
from pushrep.wire.error_codes import ErrorCode
from pushrep.wire.errors import NoCommonVersion
from pushrep.wire.push_messages import ApiVersion, ApiVersionsResponse
from pushrep.wire.vocabulary import VersionRange, Vocabulary


def versions_answer(vocabulary: Vocabulary, error_code: ErrorCode = ErrorCode.NONE) -> ApiVersionsResponse:
    """What a server that speaks `vocabulary` answers."""
    spoken = (
        ApiVersion(api_key=key, min_version=versions.oldest, max_version=versions.newest)
        for key, versions in vocabulary.versions.items()
    )
    return ApiVersionsResponse(error_code=error_code, api_versions=tuple(spoken))


class AgreedVersions:
    """The newest version that both sides speak, call by call."""

    def __init__(self, ours: Mapping[ApiKey, VersionRange], theirs: ApiVersionsResponse) -> None:
        self._ours = ours
        self._theirs = {
            entry.api_key: VersionRange(entry.min_version, entry.max_version) for entry in theirs.api_versions
        }

    def version_of(self, key: ApiKey) -> int:
        """Raises NoCommonVersion if there is none: the peer is too old, too new, or does not know the call."""
        ours, theirs = self._ours[key], self._theirs.get(key)
        if theirs is None or max(ours.oldest, theirs.oldest) > min(ours.newest, theirs.newest):
            raise NoCommonVersion(key.name, ours, theirs)
        return min(ours.newest, theirs.newest)

    def speaks(self, key: ApiKey) -> bool:
        """Whether there is one."""
        try:
            self.version_of(key)
        except NoCommonVersion:
            return False
        return True
