"""docs/settings.md, made from the code: python -m tests.house.settings_page > docs/settings.md"""

import inspect
import re
import sys
import tomllib
from enum import Enum
from importlib.metadata import EntryPoint
from pathlib import Path

import click

from pushrep.cli.main import GROUP, PREFIX, cli, give_variables
from pushrep.health import HealthSettings
from pushrep.kafka.destination import KafkaDestination
from pushrep.log import LogConfig
from pushrep.outbox import Outbox
from pushrep.outbox.configured import all_settings

_ENTRY = re.compile(r"^([a-z_]+(?:, [a-z_]+)*): (.*)$")
HEAD = """\
# Settings

Made from the code by `python -m tests.house.settings_page`; a test holds it true. Change the docstrings, not this page.

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

`pushrep --config FILE COMMAND` takes a command's options from the table of its name (`[append]`, `[replica.serve]`),
and each option has a variable. Both are named as the option is written: of `pushrep read --from`, `from` and
`PUSHREP_READ_FROM`. `pushrep --log-format json --log-level info COMMAND` logs one JSON object a line.
"""
TITLES = {
    "outbox": ("Outbox.open", "[outbox]", Outbox.open),
    "log": ("LogConfig: files and disk", "[log]", LogConfig),
    "kafka": ("KafkaDestination", "[kafka]", KafkaDestination),
    "health": ("HealthSettings", "[health]", HealthSettings),
}


def page():
    """The whole page."""
    parts = [HEAD]
    settings = all_settings()
    for section, (title, table, documented) in TITLES.items():
        texts = texts_of(documented)
        parts += [f"\n## {title}, `{table}`\n", "| setting | variable | default | |", "|---|---|---|---|"]
        parts += [
            f"| `{one.name}` | `{one.variable}` | {default_of(one.default)} | {texts.get(one.name, '')} |"
            for one in settings
            if one.section == section
        ]
    parts += ["\n## Options of the commands\n", "| option | variable | |", "|---|---|---|"]
    parts += options_of(cli, ())
    for name, place in sorted(commands().items()):
        command = EntryPoint(name, place, GROUP).load()
        give_variables(command, f"{PREFIX}_{name}")
        parts += options_of(command, (name,))
    return "\n".join(parts) + "\n"


def commands():
    """{name: where it is} by the project's own file: an editable installation may be older."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    return project["entry-points"][GROUP]


def texts_of(documented):
    """{name: its description in the docstring}. An entry for several names is given to each."""
    found, names = {}, ()
    for line in inspect.getdoc(documented).splitlines():
        if (entry := _ENTRY.match(line)) is not None:
            names = tuple(entry[1].split(", "))
            found |= dict.fromkeys(names, entry[2])
        elif line.startswith("    ") and names:
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
        else:
            names = ()
    return {name: text.replace("|", "\\|") for name, text in found.items()}


def default_of(default):
    """The default as a user writes it."""
    if default is inspect.Parameter.empty:
        return "has to be given"
    if isinstance(default, Enum):
        return f"`{default.name.lower()}`"
    return "" if default in (None, ()) else f"`{str(default).lower() if isinstance(default, bool) else default}`"


def options_of(command, path):
    """A row for each option of the command and those below it."""
    rows = []
    for parameter in command.params:
        if isinstance(parameter, click.Option) and parameter.name not in {"help", "version"}:
            variable = parameter.envvar or "_".join(("PUSHREP", *path, parameter.name)).upper().replace("-", "_")
            names = " ".join(("pushrep", *path, max(parameter.opts, key=len)))
            text = " ".join((parameter.help or "").split()).replace("|", "\\|")
            rows.append(f"| `{names}` | `{variable}` | {text} |")
    if path and isinstance(command, click.Group):
        for name in sorted(command.commands):
            rows += options_of(command.commands[name], (*path, name))
    return rows


if __name__ == "__main__":
    sys.stdout.write(page())
