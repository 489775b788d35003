"""Settings, each described once: by the annotation of a field of a frozen dataclass, and an entry of its docstring.

    flush_ms: Annotated[int, Between(1, DURATION_MAX_MS)] = 1000     type, range and default
    codec: Codec = Codec.NONE                                       a word in a file: codec = "zstd"
    '''flush_ms: a flush begins this time after ...'''              its text in docs/settings.md

`check` holds an object to the description; `Setting.value_of` reads a setting's value from a file, a variable of the
environment, or NAME=VALUE of an option.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from difflib import get_close_matches
from enum import Enum
from functools import wraps
from types import NoneType, UnionType
from typing import Annotated, Any, Final, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from pushrep.errors import BadArgument

DURATION_MAX_MS = 1 << 40
"""34 years. The operating system's waits fail for a few centuries or more."""
DURATION_MAX_S = DURATION_MAX_MS // 1000

REASON_CHARACTERS_MAX = 2000

DYNAMIC: Final = object()
"""In an annotation: the setting can be changed while what has it is open. The word is Kafka's."""

_ENTRY = re.compile(r"^([a-z_]+(?:, [a-z_]+)*): (.*)$")
_NOTHING = {"none", "never"}
_Made = TypeVar("_Made")
_KNOWN: "dict[object, Mapping[str, Setting]]" = {}


class Between(NamedTuple):
    """The range of a number, both ends in. most None: no upper limit."""

    least: float
    most: float | None = None


class OneOf(NamedTuple):
    """The words that a text may be."""

    words: Sequence[str]


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting. kinds: the types of its values; default: MISSING if it has to be given; a secret appears in no
    message.
    """

    name: str
    kinds: tuple[Any, ...]
    default: object
    within: Between | None
    words: Sequence[str]
    text: str
    is_secret: bool
    is_dynamic: bool = False

    @property
    def is_needed(self) -> bool:
        """Whether there is no default."""
        return self.default is MISSING

    @property
    def is_text(self) -> bool:
        """Whether its value is a text, which a file may hold."""
        return str in self.kinds

    @property
    def is_plain(self) -> bool:
        """Whether a file or a variable can hold its value."""
        return any(kind in {int, float, bool, str} or _is_enum(kind) or _is_list(kind) for kind in self.kinds)

    def check(self, value: object, prefix: str = "") -> None:
        """Raise BadArgument for a value of another type, or out of its range."""
        if not self._takes(value):
            raise self._refused(value, prefix)

    def value_of(self, given: object) -> object:
        """The value that `given` spells. A value that is no text is returned as it is. Raises BadArgument."""
        enum = next((kind for kind in self.kinds if _is_enum(kind)), None)
        if not isinstance(given, str) or (self.is_text and enum is None):
            if enum is not None and not isinstance(given, enum):
                raise self._refused(given, is_spelled=True)
            return given
        text = given.lower()
        if NoneType in self.kinds and text in _NOTHING:
            return None
        if enum is not None:
            if given.upper() not in enum.__members__:
                raise self._refused(given, is_spelled=True)
            return enum.__members__[given.upper()]
        if any(_is_list(kind) for kind in self.kinds):
            return [one.strip() for one in given.split(",") if one.strip()]
        if bool in self.kinds:
            if text not in {"true", "false"}:
                raise BadArgument(self.name, f"give true or false, not {given!r}")
            return text == "true"
        try:
            return float(given) if float in self.kinds else int(given)
        except ValueError:
            raise self._refused(given) from None

    def _refused(self, value: object, prefix: str = "", *, is_spelled: bool = False) -> BadArgument:
        """is_spelled: the value comes from a file, a variable or an option."""
        shown = repr(value) if self.is_plain and not self.is_secret else type(value).__name__
        return BadArgument(prefix + self.name, f"give {self._wanted(is_spelled=is_spelled)}, not {shown}")

    def _takes(self, value: object) -> bool:
        if not any(_is_kind(value, kind) for kind in self.kinds):
            return False
        if self.within is not None and isinstance(value, int | float):
            return self.within.least <= value and (self.within.most is None or value <= self.within.most)
        return not self.words or not isinstance(value, str) or value in self.words

    def _wanted(self, *, is_spelled: bool) -> str:
        return " or ".join(self._named(kind, is_spelled=is_spelled) for kind in self.kinds)

    def _named(self, kind: Any, *, is_spelled: bool) -> str:
        if kind in {int, float}:
            number = "a whole number" if kind is int else "a number"
            if self.within is None:
                return number
            least, most = self.within
            return f"{number} of at least {least}" if most is None else f"{number} between {least} and {most}"
        if kind is str:
            return f"one of {', '.join(self.words)}" if self.words else "a text"
        if _is_enum(kind) and is_spelled:
            return f"one of {', '.join(kind.__members__).lower()}"
        if _is_enum(kind):
            return " or ".join(f"{kind.__name__}.{name}" for name in kind.__members__)
        names = {bool: "True or False", NoneType: "None"}
        return names.get(kind) or ("a list of texts" if _is_list(kind) else f"a {getattr(kind, '__name__', kind)}")


def settings_of(made: Callable[..., object]) -> Mapping[str, Setting]:
    """The settings of a dataclass, or the arguments of a function, by their names, in the order of the code."""
    if (known := _KNOWN.get(made)) is not None:
        return known
    texts = _texts_of(made)
    found: dict[str, Setting] = {}
    for name, hint, default, is_secret in _fields_of(made) if is_dataclass(made) else _parameters_of(made):
        bare, *extras = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        kinds = get_args(bare) if get_origin(bare) in {Union, UnionType} else (bare,)
        words = next((extra.words for extra in extras if isinstance(extra, OneOf)), ())
        within = next((extra for extra in extras if isinstance(extra, Between)), None)
        is_dynamic = DYNAMIC in extras
        found[name] = Setting(name, kinds, default, within, words, texts.get(name, ""), is_secret, is_dynamic)
    _KNOWN[made] = found
    return found


def check(settings: object, prefix: str = "") -> None:
    """Check every field of a dataclass's object. Raises BadArgument, which names the field, after `prefix`."""
    for name, setting in settings_of(type(settings)).items():
        if (value := getattr(settings, name)) is not setting.default:
            setting.check(value, prefix)


def checked(found: _Made) -> _Made:
    """The object, made of what a file holds, if its fields have their types. Raises BadArgument."""
    check(found)
    return found


def with_near_names(made: type[_Made]) -> type[_Made]:
    """Have a dataclass refuse an unknown name by BadArgument with the nearest one, as a file's is refused."""
    shown: Any = made
    init = shown.__init__

    @wraps(init)
    def checked(self: _Made, *unnamed: object, **given: object) -> None:
        for name in given:
            if name not in settings_of(made):
                raise BadArgument(name, f"is no setting of {made.__name__}{did_you_mean(name, settings_of(made))}")
        init(self, *unnamed, **given)

    shown.__init__ = checked
    return made


def whole_number(argument: str, value: object, least: int = 0, most: int | None = None) -> int:
    """A number that a caller gave as an argument. Raises BadArgument."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        wanted = f"of at least {least}" if most is None else f"between {least} and {most}"
        raise BadArgument(argument, f"give a whole number {wanted}, not {value!r}")
    return value


def printable_text(argument: str, value: object, characters_max: int = REASON_CHARACTERS_MAX) -> str:
    """A name or a reason that a caller gave: others will read it on terminals. Raises BadArgument."""
    if not isinstance(value, str) or not value.strip() or len(value) > characters_max or not value.isprintable():
        raise BadArgument(argument, f"give a text of 1 to {characters_max} printable characters, not {value!r:.100}")
    return value


def did_you_mean(name: str, names: Iterable[str], cutoff: float = 0.6) -> str:
    """A question that ends a message and names the nearest of the names, or nothing."""
    near = get_close_matches(name, list(names), 1, cutoff)
    return f"; did you mean {near[0]}?" if near else ""


def _fields_of(made: Any) -> Iterator[tuple[str, Any, object, bool]]:
    hints = get_type_hints(made, include_extras=True)
    for field in fields(made):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        yield field.name, hints[field.name], default, not field.repr


def _parameters_of(function: Callable[..., object]) -> Iterator[tuple[str, Any, object, bool]]:
    for name, parameter in inspect.signature(function).parameters.items():
        yield name, parameter.annotation, MISSING if parameter.default is parameter.empty else parameter.default, False


def _is_enum(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Enum)


def _is_list(kind: Any) -> bool:
    return get_origin(kind) is Sequence


def _is_kind(value: object, kind: Any) -> bool:
    if kind is Any or getattr(kind, "_is_protocol", False):
        return True
    if kind is Callable or get_origin(kind) is Callable:
        return callable(value)
    if _is_list(kind):
        return isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(one, str) for one in value)
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else get_origin(kind) or kind)


def _texts_of(made: object) -> dict[str, str]:
    """{name: its text in the docstring}. An entry for several names is given to each."""
    found: dict[str, str] = {}
    names: tuple[str, ...] = ()
    for line in (inspect.getdoc(made) or "").splitlines():
        if (entry := _ENTRY.match(line)) is not None:
            names = tuple(entry[1].split(", "))
            found |= dict.fromkeys(names, entry[2])
        elif line.startswith("    ") and names:
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
        else:
            names = ()
    return found
