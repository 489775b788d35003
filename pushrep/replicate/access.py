"""Authorisation on a node: a table decides by identity, call and outbox, before anything is read or written.

    certificate ─ identity_in ─▶ identity ─┐
    --allow NAME=PATTERN:role,role ─ Rule ─┼─▶ Policy: roles of an identity on an outbox ─ ROLES_OF[call] ─▶ yes │ no
    owner.json of the outbox, its topic,   │                                  no: UNAUTHORISED, counted, logged
    the members that its grant names ──────┘

Everything above `Access` is pure, except `read_rules`. `Access` caches owners and decisions; `Access.reload` reads the
rules again.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from enum import Enum
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from uuid import UUID

from pushrep.env import Clock, Filesystem
from pushrep.env.checked_json import write_checked_json
from pushrep.errors import BadArgument
from pushrep.replicate.election_state import NODE_FILE_VERSION, read_node_file
from pushrep.replicate.errors import Refusal
from pushrep.wire.calls import ApiKey
from pushrep.wire.error_codes import ErrorCode
from pushrep.wire.values import Struct

_LOG = logging.getLogger("pushrep.node")
AUDIT = logging.getLogger("pushrep.node.audit")
"""Gets a line for each operator's call that changes something: the identity and the arguments."""
LOCAL, ANONYMOUS, ANYBODY = "local", "anonymous", "any"
UNPROVEN = frozenset({LOCAL, ANONYMOUS})
"""Identities without a certificate. The first identity with a certificate that may own their outbox gets it."""
OWNER_NAME = "owner.json"
_RESERVED = frozenset({LOCAL, ANONYMOUS, ANYBODY, "*"})
_LOG_EVERY_MS = 60_000
_COUNTED_MAX = 1000
_ANSWERS_MAX = 10_000
_NAMED_MS = 1000
_CLAIMED_MS = 60_000


class Role(Enum):
    """The roles of an identity on an outbox."""

    CREATE = "create"
    LEAD = "lead"
    READ = "read"
    KEEP = "keep"
    LIST = "list"


ALL = frozenset(Role)
_READS, _SEES = frozenset({Role.READ, Role.LEAD}), frozenset({Role.LIST, Role.READ, Role.LEAD, Role.KEEP})
_LEADS, _KEEPS, _NOBODY, _EVERYBODY = frozenset({Role.LEAD}), frozenset({Role.KEEP}), frozenset[Role](), ALL

ROLES_OF: Mapping[ApiKey, frozenset[Role]] = MappingProxyType(
    {
        ApiKey.API_VERSIONS: _EVERYBODY,  # version numbers only, exchanged first
        ApiKey.DESCRIBE_LOG: _LEADS,
        ApiKey.APPEND_RECORDS: _LEADS,
        ApiKey.END_OFFSET_FOR_EPOCH: _LEADS,
        ApiKey.GRANT: _LEADS,
        ApiKey.FETCH_RECORDS: _READS,
        ApiKey.LIST_LOGS: frozenset({Role.LIST}),
        ApiKey.BEAT: _LEADS,
        ApiKey.DESCRIBE_DAMAGE: _LEADS,
        ApiKey.REPAIR_RECORDS: _LEADS,
        ApiKey.DESCRIBE_NODE: frozenset({Role.LIST}),  # on every outbox: the answer describes all of them
        # A leader has the records already, by FetchRecords and on its own disk.
        ApiKey.START_REPLAY: _READS,
        ApiKey.ATTACH: _READS,
        ApiKey.CREDIT: _READS,
        ApiKey.STOP_REPLAY: _READS | _KEEPS,  # the identity's own session; KEEP for others'
        ApiKey.DESCRIBE_RECORDINGS: _SEES,
        ApiKey.EXTEND: _KEEPS,
        ApiKey.TRUNCATE: _KEEPS,
        ApiKey.PURGE: _KEEPS,
        ApiKey.DELETE: _KEEPS,
        # Events that the node sends after a call that was allowed.
        ApiKey.REPLAY_DATA: _NOBODY,
        ApiKey.REPLAY_END: _NOBODY,
        ApiKey.DELETE_DONE: _NOBODY,
    }
)
"""The roles that allow a call; any one of them on the outbox is enough."""
assert ROLES_OF.keys() == set(ApiKey), "every call has its roles"
OWN = frozenset({Role.LEAD, Role.LIST})
"""The roles of an identity on an outbox that it created, and on one whose grant names it."""
CREATES = frozenset({ApiKey.DESCRIBE_LOG, ApiKey.GRANT, ApiKey.APPEND_RECORDS, ApiKey.END_OFFSET_FOR_EPOCH})
"""Calls that may create an outbox on the node; if it is not here yet, `create` is enough."""


@dataclass(frozen=True, slots=True)
class Rule:
    """`name` (`*`: everybody) has `roles` on outboxes whose id, or each topic, matches `pattern` (as by fnmatch).

    is_bare: it is a name without a pattern, so it gives no topic that another identity created.
    """

    name: str
    pattern: str
    roles: frozenset[Role]
    is_bare: bool = False

    def covers(self, identity: str) -> bool:
        """Whether the rule is for this identity."""
        return self.name in {"*", identity}


@dataclass(frozen=True, slots=True)
class Place:
    """The facts of an outbox for a decision. topics: those of its logs here. is_here: whether it has an owner or logs
    here. members: the identities that its grant names.
    """

    outbox_id: UUID
    owner: str | None = None
    topics: frozenset[str] = frozenset()
    is_here: bool = False
    members: frozenset[str] = frozenset()

    def fits(self, pattern: str) -> bool:
        """Whether a rule's pattern matches it."""
        if pattern == "*" or fnmatchcase(str(self.outbox_id), pattern):
            return True
        return bool(self.topics) and all(fnmatchcase(topic, pattern) for topic in self.topics)


@dataclass(frozen=True, slots=True)
class Policy:
    """All rules. A call that no rule allows is refused."""

    rules: tuple[Rule, ...] = ()

    @classmethod
    def of(cls, texts: Iterable[str]) -> "Policy":
        """Parse the values of `--allow`, or the lines of a file. Raises BadArgument."""
        return cls(tuple(parse_rule(text) for text in texts))

    def roles(self, identity: str, place: Place) -> frozenset[Role]:
        """All roles of this identity on this outbox."""
        mine = [rule for rule in self.rules if rule.covers(identity)]
        roles = frozenset(role for rule in mine if place.fits(rule.pattern) for role in rule.roles)
        if place.owner == identity and any(Role.CREATE in rule.roles for rule in mine):
            roles |= OWN
        return roles | OWN if identity in place.members - UNPROVEN else roles

    def may(self, identity: str, call: ApiKey, place: Place, *, begins: bool = False) -> bool:
        """Whether it may make this call about this outbox. begins: the call creates the outbox if it is not here."""
        roles = self.roles(identity, place)
        if not place.is_here and call in CREATES and Role.CREATE in roles:
            return True
        return bool(roles & ROLES_OF[call]) and (place.is_here or not begins)

    def is_first_leader(self, identity: str, call: ApiKey, place: Place) -> bool:
        """Whether this call makes the identity the owner of an outbox without one.

        A leader that only a rule for everybody (`*`) allows does not become the owner.
        """
        is_free = place.owner is None or (place.owner in UNPROVEN and identity not in UNPROVEN)
        roles = self.roles(identity, place)
        is_own = Role.LEAD not in roles or self.creates_by_name(identity)
        return is_free and call in CREATES and Role.CREATE in roles and is_own

    def creates_by_name(self, identity: str) -> bool:
        """Whether a rule that names this identity allows it to create outboxes, which it then owns."""
        return any(rule.name == identity and Role.CREATE in rule.roles for rule in self.rules)

    def creates_beside_others(self, identity: str, place: Place) -> bool:
        """Whether it may create an outbox of topics that another identity created here."""
        mine = [rule for rule in self.rules if rule.covers(identity) and not rule.is_bare]
        return any(Role.CREATE in rule.roles and place.fits(rule.pattern) for rule in mine)

    def could(self, identity: str, call: ApiKey) -> bool:
        """Whether there may be an outbox about which it may make this call."""
        given = frozenset(role for rule in self.rules if rule.covers(identity) for role in rule.roles)
        if Role.CREATE in given:
            given |= OWN
        return bool(given & ROLES_OF[call])

    def everywhere(self, identity: str, call: ApiKey) -> bool:
        """Whether it may make this call about every outbox, also one that is not here."""
        return any(rule.covers(identity) and rule.pattern == "*" and rule.roles & ROLES_OF[call] for rule in self.rules)


def parse_rule(text: str) -> Rule:
    """Parse a rule: `NAME=PATTERN:role,role`; `NAME`, the role create; an outbox's id, all roles on it for everybody;
    `any`, all roles on every outbox for everybody. Raises BadArgument.
    """
    text = text.strip()
    if text == ANYBODY:
        return Rule("*", "*", ALL)
    name, equals, rest = text.rpartition("=")
    if not equals:
        if not text or text == "*":
            raise BadArgument("allow", f"{text!r} names nobody")
        try:
            return Rule("*", str(UUID(text)), ALL)
        except ValueError:
            return Rule(text, "*", frozenset({Role.CREATE}), is_bare=True)
    pattern, colon, words = rest.rpartition(":")
    known = {role.value: role for role in Role}
    roles = [word.strip() for word in words.split(",")]
    if not (name and colon and pattern) or any(role not in known for role in roles):
        raise BadArgument("allow", f"{text!r} is not NAME=PATTERN:role,role with roles of {', '.join(known)}")
    return Rule(name, pattern, frozenset(known[role] for role in roles))


def read_rules(path: Path) -> list[str]:
    """The lines of an allow list, without empty lines and comments (#). Raises BadArgument, which names the file."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadArgument("allow_file", f"{path} can't be read: {error}") from error
    return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]


def identity_in(certificate: Mapping[str, Any]) -> str:
    """The identity in a certificate: its first URI, else its first DNS name, else its common name, else `anonymous`.

    certificate: a result of `ssl.SSLSocket.getpeercert`. A name that is a keyword of the rules gives `anonymous`, too.
    """
    names: dict[str, str] = {}
    for kind, name in certificate.get("subjectAltName", ()):
        names.setdefault(kind, name)
    for part in certificate.get("subject", ()):
        for field in part:
            if len(field) == 2:
                names.setdefault(*field)
    found = next((names[kind] for kind in ("URI", "DNS", "commonName") if names.get(kind)), ANONYMOUS)
    return ANONYMOUS if found in _RESERVED else found


def unauthorised(identity: str, call: ApiKey, outbox_id: UUID | None = None) -> Refusal:
    """This identity may not make the call. The text names the roles that would allow it, and nothing about the data."""
    roles = " or ".join(sorted(role.value for role in ROLES_OF[call]))
    what = "any outbox" if outbox_id is None else f"outbox {outbox_id}"
    return Refusal(
        ErrorCode.UNAUTHORISED, f"{identity!r} may not call {call.name} of {what}: it needs the role {roles} (--allow)"
    )


class Kept(NamedTuple):
    """The facts of an outbox on disk. members: the identities that its grant names. is_led_here: whether this
    directory leads it; then another process may write the next grant, so these facts are not cached.
    """

    directory: Path
    topics: frozenset[str]
    members: frozenset[str] = frozenset()
    is_led_here: bool = False


class Access:
    """The authorisation of a running node. Thread-safe.

    rules: returns the texts of the rules, called at the start and at each `reload`. look: reads the facts of an outbox.
    named: returns the identities that the grants of all outboxes here name. listed: returns the ids of all outboxes
    here. Raises BadArgument.
    """

    def __init__(  # noqa: PLR0913 - the rules, and what is asked of the store
        self,
        rules: Callable[[], Iterable[str]],
        look: Callable[[UUID], Kept],
        filesystem: Filesystem,
        clock: Clock,
        *,
        named: Callable[[], frozenset[str]] = frozenset,
        listed: Callable[[], Iterable[UUID]] = tuple,
    ) -> None:
        self._rules, self._look, self._filesystem, self._clock = rules, look, filesystem, clock
        self._policy, self._listed = Policy.of(rules()), listed
        self._claimed: dict[str, tuple[str, int]] = {}  # whose topics are being made, and when that began
        self._lock = threading.RLock()
        self._places: dict[UUID, Place] = {}
        self._answers: dict[tuple[str, ApiKey, UUID | None], bool] = {}  # None: about any outbox, of `could`
        self._named_by, self._named, self._named_ms = named, frozenset[str](), clock.monotonic_ms() - _NAMED_MS
        self._refused: Counter[tuple[str, str]] = Counter()
        self._logged: dict[tuple[str, str], tuple[int, int]] = {}
        if not self._policy.rules:
            _LOG.warning("nobody may use this node: it was given no --allow")

    def reload(self) -> None:
        """Read the rules again. If they can't be read, the old rules stay and BadArgument is raised."""
        policy = Policy.of(self._rules())
        with self._lock:
            self._policy = policy
            self._answers.clear()

    def check(
        self, identity: str, call: ApiKey, outbox_id: UUID, topics: Iterable[str] = (), *, begins: bool = False
    ) -> None:
        """Raise Refusal unless the identity may make this call about this outbox.

        topics: the topics in a call that may create the outbox. begins: the call creates or leads the outbox; if the
        outbox has no owner, this identity may become its owner, which is on disk when this returns. Raises
        CorruptFile, OSError, too.
        """
        topics = frozenset(topics)
        if begins and topics:
            self._check_topics(identity, call, outbox_id, topics)
        if not self._judge(identity, call, outbox_id, topics, begins=begins):
            raise self.refused(identity, call, outbox_id)

    def owner_of(self, outbox_id: UUID) -> str:
        """The identity that created it here; empty if nobody is known to. Raises CorruptFile, OSError."""
        return self._place(outbox_id).owner or ""

    def may(self, identity: str, call: ApiKey, outbox_id: UUID | None, *, begins: bool = False) -> bool:
        """As `check`, but return the decision and count no refusal. outbox_id None: an unknown outbox, so all outboxes
        have to be allowed. Raises CorruptFile, OSError.
        """
        if outbox_id is None:
            return self._policy.everywhere(identity, call)
        return self._judge(identity, call, outbox_id, frozenset(), begins=begins)

    def could(self, identity: str, call: ApiKey) -> bool:
        """Whether there may be an outbox about which it may make this call; cheap, asked before any look-up."""
        known = self._answers.get((identity, call, None))
        if known is None:
            with self._lock:  # `reload` clears the decisions of the old rules
                known = self._keep_answer(identity, call, None, may=self._policy.could(identity, call))
        return known or (bool(OWN & ROLES_OF[call]) and self._is_named(identity))

    def has_role(self, identity: str) -> bool:
        """Whether there may be an outbox on which it has any role."""
        return self.could(identity, ApiKey.API_VERSIONS)

    def _is_named(self, identity: str) -> bool:
        """Whether the grant of any outbox here names it. For an unknown identity all grants are read again, but only
        once in `_NAMED_MS`.
        """
        with self._lock:
            now_ms = self._clock.monotonic_ms()
            if identity not in self._named and now_ms - self._named_ms >= _NAMED_MS:
                self._named, self._named_ms = self._named_by() - UNPROVEN, now_ms
            return identity in self._named

    def refused(self, identity: str, call: ApiKey, outbox_id: UUID | None = None) -> Refusal:
        """Count a refusal; log it at most once a minute for each call and identity. Returns the error."""
        error, now_ms = unauthorised(identity, call, outbox_id), self._clock.monotonic_ms()
        with self._lock:
            key = (call.name, identity)
            if key not in self._refused and len(self._refused) >= _COUNTED_MAX:
                key = (call.name, "others")
            self._refused[key] += 1
            count, (logged_ms, logged_count) = self._refused[key], self._logged.get(key, (-_LOG_EVERY_MS, 0))
            is_due = now_ms - logged_ms >= _LOG_EVERY_MS
            if is_due:
                self._logged[key] = (now_ms, count)
        if is_due:
            _LOG.warning("UNAUTHORISED (%d since the last such line): %s", count - logged_count, error)
        return error

    def refusals(self) -> Mapping[tuple[str, str], int]:
        """The refusals by (call, identity) since the node started; beyond 1,000 pairs new ones count as "others"."""
        with self._lock:
            return dict(self._refused)

    def forget(self, outbox_id: UUID) -> None:
        """Drop the cached facts and decisions of an outbox, because it has changed."""
        with self._lock:
            self._places.pop(outbox_id, None)
            self._named_ms = self._clock.monotonic_ms() - _NAMED_MS
            for key in [key for key in self._answers if key[2] == outbox_id]:
                del self._answers[key]

    def _judge(self, identity: str, call: ApiKey, outbox_id: UUID, topics: frozenset[str], *, begins: bool) -> bool:
        known = self._answers.get((identity, call, outbox_id))
        if known is not None:
            return known
        with self._lock:
            policy = self._policy
            if policy.everywhere(identity, call):
                if not policy.creates_by_name(identity):
                    return self._keep_answer(identity, call, outbox_id, may=True)
                if not begins:
                    return True
            place = self._place(outbox_id)
            seen = place if place.is_here else Place(outbox_id, None, topics)
            is_first = policy.is_first_leader(identity, call, seen)
            may = policy.may(identity, call, seen, begins=begins) or is_first
            if is_first and begins:
                self._bind(place, identity)
                seen = self._place(outbox_id)
            # A decision that an owner would change is not cached.
            lasts = outbox_id in self._places and not is_first
            return self._keep_answer(identity, call, outbox_id, may=may) if lasts else may

    def _check_topics(self, identity: str, call: ApiKey, outbox_id: UUID, topics: frozenset[str]) -> None:
        """A topic's name here is its first creator's. Raises Refusal."""
        if self._policy.creates_beside_others(identity, Place(outbox_id, None, topics)):
            return
        with self._lock:
            new, now_ms = topics - self._place(outbox_id).topics, self._clock.monotonic_ms()
            if not new:
                return
            owners: dict[str, set[str]] = {topic: set() for topic in new}
            for topic, (by, since_ms) in self._claimed.items():
                if topic in new and now_ms - since_ms < _CLAIMED_MS:
                    owners[topic].add(by)
            for place in [self._place(other) for other in self._listed() if other != outbox_id]:
                if place.owner is not None:
                    for topic in new & place.topics:
                        owners[topic].add(place.owner)
            taken = frozenset(topic for topic, found in owners.items() if found and identity not in found)
            if taken and not self._policy.creates_beside_others(identity, Place(outbox_id, None, taken)):
                self.refused(identity, call, outbox_id)
                what = f"another identity created {', '.join(sorted(taken))} here"
                why = f"{identity!r} may not call {call.name} of outbox {outbox_id}: {what}, so it needs a rule with a "
                raise Refusal(ErrorCode.UNAUTHORISED, f"{why}pattern and the role create (--allow NAME=PATTERN:create)")
            if self._policy.creates_by_name(identity):
                self._claimed |= dict.fromkeys(new - taken, (identity, now_ms))

    def _keep_answer(self, identity: str, call: ApiKey, outbox_id: UUID | None, *, may: bool) -> bool:
        if len(self._answers) < _ANSWERS_MAX:
            self._answers[identity, call, outbox_id] = may
        return may

    def _place(self, outbox_id: UUID) -> Place:
        with self._lock:
            place = self._places.get(outbox_id)
            if place is None:
                kept = self._look(outbox_id)
                owner = read_owner(kept.directory, self._filesystem)
                place = Place(outbox_id, owner, kept.topics, owner is not None or bool(kept.topics), kept.members)
                if place.topics and not kept.is_led_here:
                    self._places[outbox_id] = place
            return place

    def _bind(self, place: Place, identity: str) -> None:
        directory = self._look(place.outbox_id).directory
        self._filesystem.make_directory(directory)
        write_owner(directory, identity, self._filesystem)
        self.forget(place.outbox_id)
        if place.is_here:
            _LOG.warning("outbox %s had no owner: it is %r from now on, its first leader", place.outbox_id, identity)


def audit(identity: str, request: Struct, call: ApiKey) -> None:
    """Write an operator's allowed call to the audit log: on one line, values cut at 200 characters."""
    columns = fields(type(request))  # type: ignore[arg-type]  # every message is a dataclass
    arguments = ", ".join(f"{one.name}={str(getattr(request, one.name))[:200]!r}" for one in columns)
    AUDIT.info("audit: %r calls %s: %s", identity, call.name, arguments)


def read_owner(directory: Path, filesystem: Filesystem) -> str | None:
    """The owner of the outbox in this directory; None if it has none. Raises CorruptFile, OSError."""
    return read_node_file(directory / OWNER_NAME, filesystem, _owner_of)


def _owner_of(fields: Mapping[str, Any]) -> str:
    owner = fields["owner"]
    if not isinstance(owner, str) or not owner:
        raise ValueError(f"its owner is {owner!r}")
    return owner


def write_owner(directory: Path, owner: str, filesystem: Filesystem) -> None:
    """Store the owner of the outbox in this directory. It is on disk when this returns. Raises OSError."""
    write_checked_json(filesystem, directory / OWNER_NAME, {"owner": owner}, NODE_FILE_VERSION)
