"""docs/settings.md, made from the code: python -m tests.house.settings_page > docs/settings.md"""

import sys
from enum import Enum

from pushrep.outbox.configured import all_settings
from pushrep.replicate.settings import PushSettings
from pushrep.settings import DURATION_MAX_S, settings_of

HEAD = """\
# Settings

Made from the code by `python -m tests.house.settings_page`; a test holds it true. Change the code, not this page.

A service gives its settings as arguments, or keeps them in a TOML file and in variables of the environment, which win
over the file:

```python
from pathlib import Path
from pushrep import Outbox
from pushrep.outbox.configured import outbox_settings

Path("billing.toml").write_text('''
[outbox]
directory = "billing-outbox"
topic = "orders"
partitions = 4
producer = "billing"
durability = "flushed"
[log]
segment_bytes = 67108864
''')
with Outbox.open(**outbox_settings("billing.toml", {"PUSHREP_LINGER_MS": "1"})) as outbox:
    assert outbox.identity.partitions == 4
```

Values are spelled as in the code; words as `flushed` in any case; lists with commas in a variable. **Secrets by file:**
each text setting takes `<name>_file` (`PUSHREP_KAFKA_SASL_PASSWORD_FILE`), a file whose content is the value.
A misspelt name in the file is refused with the nearest one, and so is a variable that is nearly a setting's.

Each option of a command has a variable, too, named as the option is written: `PUSHREP_REPLAY_FROM` of
`pushrep replay --from`. `pushrep --log-format json --log-level info COMMAND` logs one JSON object a line.
What is called dynamic is changed in an open outbox, too, by `pushrep outbox set`:
[disk.md](disk.md#changing-it-while-the-service-runs).
"""
TITLES = {
    "outbox": "`[outbox]`: arguments of `Outbox.open`, then fields of `OutboxConfig`",
    "log": "`[log]`: `LogConfig`, files and disk",
    "kafka": "`[kafka]`: `KafkaDestination`",
    "health": "`[health]`: `HealthSettings`",
}
PUSH = """
## `PushSettings`: connections to replicas

Given in code, with `tls`, as `OutboxConfig(push=PushSettings(...))`: [access.md](access.md#a-trial).
"""


def page():
    """The whole page."""
    parts = [HEAD]
    settings = all_settings().values()
    for section, title in TITLES.items():
        mine = [one for one in settings if one.section == section]
        parts += [f"\n## {title}\n", "| setting | variable | default | range | |", "|---|---|---|---|---|"]
        for one in mine:
            cells = f"`{one.setting.name}`", f"`{one.variable}`", default_of(one.setting), range_of(one.setting)
            parts.append(f"| {' | '.join(cells)} | {text_of(one.setting)} |")
    parts += [PUSH, "| setting | default | range | |", "|---|---|---|---|"]
    for one in settings_of(PushSettings).values():
        if one.is_plain:
            parts.append(f"| `{one.name}` | {default_of(one)} | {range_of(one)} | {text_of(one)} |")
    return "\n".join(parts) + "\n"


def text_of(setting):
    """Its text, as a cell."""
    return setting.text.replace("|", "\\|") + (" **Dynamic.**" if setting.is_dynamic else "")


def default_of(setting):
    """The default as a user writes it."""
    default = setting.default
    if setting.is_needed:
        return "has to be given"
    if isinstance(default, Enum):
        return f"`{default.name.lower()}`"
    return "" if default in (None, ()) else f"`{str(default).lower() if isinstance(default, bool) else default}`"


def range_of(setting):
    """The range of a number, or the words, as a user writes them."""
    if setting.within is not None:
        least, most = setting.within
        is_limited = most is not None and most < DURATION_MAX_S
        return f"{least} to {most}" if is_limited else f"from {least}"
    words = next((list(kind.__members__) for kind in setting.kinds if hasattr(kind, "__members__")), None)
    return ", ".join(setting.words or [word.lower() for word in words or ()])


if __name__ == "__main__":
    sys.stdout.write(page())
