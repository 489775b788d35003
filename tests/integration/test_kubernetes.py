"""examples/statefulset.yaml: by Kubernetes' schemas, by the settings that members need, by pushrep's own options."""

import re
from pathlib import Path

import click
import pytest
from ruamel.yaml import YAML

from pushrep.cli.main import cli
from pushrep.outbox.settings import OutboxConfig
from tests.integration.certificates import make_certificates

FILE = Path(__file__).parents[2] / "examples" / "statefulset.yaml"
VERSION = "1.31"


@pytest.fixture(scope="module")
def manifests():
    return {(one["kind"], one["metadata"]["name"]): one for one in YAML(typ="safe").load_all(FILE.read_text())}


def test_each_manifest_is_one_by_kubernetes_own_schemas(manifests):
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for manifest in manifests.values():
        kubernetes_validate.validate(manifest, VERSION, strict=True)


def test_members_find_each_other_and_have_time_to_close(manifests):
    members = manifests["StatefulSet", "orders"]["spec"]
    assert members["podManagementPolicy"] == "Parallel"
    assert manifests["Service", members["serviceName"]]["spec"]["publishNotReadyAddresses"]
    assert members["template"]["spec"]["terminationGracePeriodSeconds"] > OutboxConfig().close_timeout_s + 10


def test_its_commands_and_probes_are_those_that_there_are(manifests, tmp_path):
    made = make_certificates(tmp_path)
    files = {"/tls/tls.crt": made / "node.pem", "/tls/tls.key": made / "node.key", "/tls/ca.crt": made / "ca.pem"}
    for container in manifests["StatefulSet", "orders"]["spec"]["template"]["spec"]["containers"]:
        program, *words = [*container["command"], *container["args"]]
        assert program == "pushrep"
        command, context = cli, click.Context(cli)
        while isinstance(command, click.Group):
            command = command.get_command(context, words.pop(0))
        given = [re.sub("/tls/.*", lambda found: str(files[found[0]]), word) for word in words]
        parsed = command.make_context(command.name, given).params
        listening = {container_port["name"]: container_port["containerPort"] for container_port in container["ports"]}
        health = str(parsed.get("health") or parsed.get("metrics")).rpartition(":")[2]
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            get = container[probe]["httpGet"]
            assert str(listening[get["port"]]) == health
            assert get["path"] == ("/readyz" if probe == "readinessProbe" else "/livez")
