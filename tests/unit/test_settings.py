"""Settings from a file and from variables, secrets by file, what the commands take so, and how they log."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pushrep import Acks, Durability, KafkaDestination, LogConfig, OutboxConfig
from pushrep.cli import main
from pushrep.errors import BadArgument
from pushrep.outbox import Outbox
from pushrep.outbox.configured import all_settings, outbox_settings
from pushrep.replay.plan import ReplaySettings
from pushrep.replicate.settings import PushSettings
from pushrep.settings import settings_of
from tests.house import settings_page

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"

FILE = """
[outbox]
directory = "o"
topic = "orders"
partitions = 2
producer = "billing"
durability = "buffered"
replicas = ["a:1", "b:2"]
[log]
segment_bytes = 1000000
codec = "zstd"
[kafka]
bootstrap_servers = "broker:9092"
sasl_mechanism = "PLAIN"
security_protocol = "SASL_SSL"
sasl_username = "me"
sasl_password_file = "secret"
[somebody_else]
x = 1
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret").write_text("hush\n")
    path = tmp_path / "service.toml"
    path.write_text(FILE)
    return path


def test_a_variable_wins_over_the_file_and_secrets_come_from_files(file):
    found = outbox_settings(
        file,
        {
            "PUSHREP_PARTITIONS": "3", "PUSHREP_REPLICAS": "c:3, d:4", "PUSHREP_ACKS": "all", "PUSHREP_CREATE": "false",
            "PUSHREP_OPEN_TIMEOUT_S": "0.5", "PUSHREP_LOG_DISK_REFUSE_PERCENT": "95",
            "PUSHREP_KAFKA_SASL_USERNAME_FILE": "secret", "PUSHREP_TORTURE": "1", "PATH": "/bin",
        },
    )  # fmt: skip
    config, kafka = found.pop("config"), found.pop("kafka")
    assert found == {
        "directory": "o", "topic": "orders", "partitions": 3, "producer": "billing", "durability": Durability.BUFFERED,
        "replicas": ["c:3", "d:4"], "acks": Acks.ALL,
    }  # fmt: skip
    assert (config.create, config.open_timeout_s, config.linger_ms) == (False, 0.5, 5)
    config = config.log_config
    assert (config.segment_bytes, config.codec.name, config.disk_refuse_percent) == (1_000_000, "ZSTD", 95)
    assert (kafka.sasl_username, kafka.sasl_password) == ("hush", "hush")
    assert "hush" not in repr(kafka).replace("sasl_username='hush'", "")


def test_an_outbox_opens_by_variables_alone(tmp_path):
    variables = {"DIRECTORY": str(tmp_path / "o"), "TOPIC": "orders", "PARTITIONS": "2", "PRODUCER": "p"}
    with Outbox.open(
        **outbox_settings(None, {f"PUSHREP_{name}": value for name, value in variables.items()})
    ) as outbox:
        assert outbox.append(1, b"a").result(60) == 0


@pytest.mark.parametrize(
    ("text", "variables", "said"),
    [
        ("[outbox]\ntopc = 1", {}, "did you mean topic?"),
        ("[log]\nsegment_byte = 1", {}, "did you mean segment_bytes?"),
        ("outbox = 1", {}, "[outbox]"),
        ("[outbox", {}, "is no TOML"),
        ("[outbox]\ndurability = 'safe'", {}, "durability: give one of buffered, flushed"),
        ("[log]\nsegment_bytes = 'much'", {}, "segment_bytes: give a whole number"),
        ("[log]\ndisk_warn_percent = 101", {}, "disk_warn_percent"),
        ("[kafka]\ntopic = 't'", {}, "kafka.bootstrap_servers"),
        ("[health]\nplain = true", {}, "health.listen"),
        ("[health]\nlisten = '0.0.0.0:1'", {}, "health.listen"),
        ("", {"PUSHREP_PARTITION": "4"}, "did you mean PUSHREP_PARTITIONS?"),
        ("", {"PUSHREP_PARTITIONS": "four"}, "partitions: give a whole number"),
        ("", {"PUSHREP_CREATE": "maybe"}, "create: give true or false"),
        ("", {"PUSHREP_LOG_SEGMENT_BYTES_FILE": "x"}, "PUSHREP_LOG_SEGMENT_BYTES_FILE"),
    ],
)
def test_what_can_t_be_is_refused_by_name(tmp_path, text, variables, said):
    (tmp_path / "f.toml").write_text(text)
    with pytest.raises((BadArgument, BadArgument)) as refused:
        outbox_settings(tmp_path / "f.toml", variables)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: OutboxConfig(linger=5), "linger: is no setting of OutboxConfig; did you mean linger_ms?"),
        (lambda: LogConfig(retention_mss=5), "did you mean retention_ms?"),
        (lambda: KafkaDestination(bootstrap_server="a:1"), "did you mean bootstrap_servers?"),
    ],
)
def test_a_misspelt_name_in_the_code_is_refused_with_the_nearest(make, said):
    with pytest.raises(BadArgument) as refused:
        make()
    assert said in str(refused.value)


def test_code_file_and_variables_set_one_config(tmp_path):
    """Each setting wins over the one before it, not over the others."""
    (tmp_path / "f.toml").write_text("[outbox]\nlinger_ms = 7\n[log]\nflush_ms = 70\n")
    config = OutboxConfig(linger_ms=1, block_ms=2, log_config=LogConfig(flush_ms=3, retention_ms=4))
    found = outbox_settings(
        tmp_path / "f.toml", {"PUSHREP_LOG_RETENTION_MS": "none"},
        directory="d", topic="t", partitions=1, producer="p", config=config,
    )["config"]  # fmt: skip
    assert found == OutboxConfig(linger_ms=7, block_ms=2, log_config=LogConfig(flush_ms=70, retention_ms=None))


@pytest.mark.parametrize("made", [OutboxConfig, LogConfig, KafkaDestination, PushSettings, ReplaySettings])
def test_each_number_is_refused_just_outside_its_range_and_taken_at_its_ends(made):
    needed = {"bootstrap_servers": "a:1"} if made is KafkaDestination else {}
    for name, setting in settings_of(made).items():
        if setting.within is None:
            continue
        setting.check(setting.within.least)
        least, most = setting.within
        for wrong in (least - 1, True, "1", *([] if most is None else [most + 1])):
            with pytest.raises(BadArgument, match=f"^{name}: give "):
                made(**needed, **{name: wrong})


def test_the_page_is_made_from_the_code():
    assert PAGE.read_text() == settings_page.page(), "python -m tests.house.settings_page > docs/settings.md"
    shown = PAGE.read_text()
    texts = {place: place.setting.text for place in all_settings().values()}
    assert all(texts.values()), "each setting says what it is"
    assert len(set(texts.values())) == len(texts), "and none says it for another"
    assert all(f"`{place.variable}`" in shown for place in texts)


def run(*command, cwd, **variables):
    return subprocess.run(
        [sys.executable, "-m", "pushrep.cli.main", *command],
        cwd=cwd,
        env={"PATH": "/usr/bin:/bin", **variables},
        input="a\nb\n",
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_command_takes_its_options_from_variables(tmp_path):
    done = run("append", "out", "t", "-", cwd=tmp_path, PUSHREP_APPEND_PARTITIONS="3")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "out" / "outbox.json").read_text())["partitions"] == 3


def test_variables_are_named_as_the_options_are_written(tmp_path, monkeypatch, capfd):
    """click would take them as the code spells them: format_, from_, as_json."""
    monkeypatch.chdir(tmp_path)
    with Outbox.open("out", "t", 1, "p") as outbox:
        outbox.append_many(0, [b"a", b"b", b"c"]).result(60)
    monkeypatch.setenv("PUSHREP_REPLAY_FORMAT", "raw")
    monkeypatch.setenv("PUSHREP_REPLAY_FROM", "2")
    monkeypatch.setenv("PUSHREP_LOG_DUMP_JSON", "1")
    assert main.run(["replay", "out", "t"]) == 0
    assert capfd.readouterr().out == "c\n"
    assert main.run(["log", "dump", "out", "t-0"]) == 0
    assert capfd.readouterr().out.startswith("{")


def test_commands_log_time_level_and_logger_or_json(tmp_path):
    text = run("--log-level", "info", "append", "out", "t", "-", cwd=tmp_path).stderr
    (line,) = (line for line in text.splitlines() if "a new outbox was made" in line)
    assert " INFO pushrep.outbox: a new outbox" in line
    assert line[:4].isdecimal(), "the time comes first"
    done = run("append", "more", "t", "-", cwd=tmp_path, PUSHREP_LOG_FORMAT="json", PUSHREP_LOG_LEVEL="info")
    said = [json.loads(line) for line in done.stderr.splitlines()]
    made = next(one for one in said if "a new outbox was made" in one["message"])
    assert (made["level"], made["logger"]) == ("INFO", "pushrep.outbox")
    assert made["time"].endswith("+00:00")
