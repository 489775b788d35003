"""Kafka's own classes read the directory's files, and we read what they write: Kafka's jars, asked over py4j."""

import os
import shutil
from pathlib import Path
from uuid import UUID

import pytest
from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway

from pushrep.log.directory_files import (
    LEADER_EPOCHS_NAME,
    PARTITION_METADATA_NAME,
    CheckpointFile,
    decode_leader_epochs,
    read_checkpoint,
    read_partition_metadata,
    write_checkpoint,
    write_leader_epochs,
    write_partition_metadata,
)
from pushrep.records.leader_epochs import LeaderEpochs

pytestmark = pytest.mark.java

JARS = Path(__file__).parents[2] / ".cache" / "kafka" / "libs"
TOPIC_ID = UUID("d4acf4a9-2f56-4570-ba91-5d85d21d2ff2")
OFFSETS = {"orders-0": 1042, "orders-1": 0, "a.b_c-d-7": 2**63 - 1}


@pytest.fixture(scope="module")
def java():
    """A Java machine with Kafka's classes."""
    if shutil.which("java") is None or not (JARS / ".done").exists():
        why = f"Java or Kafka's jars are missing: install Java 17 and run `make jars` (looked for {JARS.name}/.done)"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(why)
    port, process = launch_gateway(classpath=f"{JARS}/*", die_on_exit=True, return_proc=True, javaopts=["-Xmx256m"])
    gateway = JavaGateway(gateway_parameters=GatewayParameters(port=port))
    yield gateway
    gateway.shutdown()
    process.stdin.close()
    process.wait(timeout=60)
    if process.stdout is not None:
        process.stdout.close()


@pytest.fixture
def kafka(java):
    return java.jvm.org.apache.kafka.storage.internals.checkpoint


def file(java, path):
    return java.jvm.java.io.File(str(path))


@pytest.mark.parametrize("checkpoint", list(CheckpointFile))
def test_kafka_reads_a_checkpoint_and_finds_every_partition(java, kafka, tmp_path, checkpoint):
    write_checkpoint(tmp_path, checkpoint, OFFSETS)
    found = kafka.OffsetCheckpointFile(file(java, tmp_path / checkpoint.value), None).read()
    partition = java.jvm.org.apache.kafka.common.TopicPartition
    assert found.get(partition("orders", 0)) == 1042
    assert found.get(partition("orders", 1)) == 0
    assert found.get(partition("a.b_c-d", 7)) == 2**63 - 1
    assert found.get(partition("orders", 2)) is None
    topic = java.jvm.org.apache.kafka.common.internals.Topic
    strange = [entry for entry in found.keySet() if not topic.isValid(entry.topic())]
    assert len(strange) == len(found) - len(OFFSETS) == 1, "the CRC is an entry that no broker can hold"


def test_we_read_a_checkpoint_that_kafka_wrote(java, kafka, tmp_path):
    partition = java.jvm.org.apache.kafka.common.TopicPartition
    offsets = java.jvm.java.util.HashMap()
    for topic, number, offset in (("orders", 0, 2**40), ("a.b_c-d", 7, 2**63 - 1)):
        offsets.put(partition(topic, number), offset)  # above 2**31, so that py4j makes it a Long
    kafka.OffsetCheckpointFile(file(java, tmp_path / CheckpointFile.RECOVERY_POINT.value), None).write(offsets)
    assert read_checkpoint(tmp_path, CheckpointFile.RECOVERY_POINT) == {"orders-0": 2**40, "a.b_c-d-7": 2**63 - 1}


def test_leader_epochs_in_both_directions(java, kafka, tmp_path):
    epochs = LeaderEpochs(((3, 10), (5, 40), (6, 2**63 - 1)))
    write_leader_epochs(tmp_path, epochs)
    kafkas = kafka.LeaderEpochCheckpointFile(file(java, tmp_path / LEADER_EPOCHS_NAME), None)
    found = kafkas.read()
    assert tuple((entry.epoch(), entry.startOffset()) for entry in found) == epochs.entries
    kafkas.write(found)
    assert decode_leader_epochs((tmp_path / LEADER_EPOCHS_NAME).read_bytes()) == epochs


def test_partition_metadata_in_both_directions(java, kafka, tmp_path):
    write_partition_metadata(tmp_path, TOPIC_ID)
    kafkas = kafka.PartitionMetadataFile(file(java, tmp_path / PARTITION_METADATA_NAME), None)
    found = kafkas.read().topicId()
    assert found.toString() == "1Kz0qS9WRXC6kV2F0h0v8g"
    (tmp_path / PARTITION_METADATA_NAME).unlink()
    kafkas.record(found)
    kafkas.maybeFlush()
    assert read_partition_metadata(tmp_path) == TOPIC_ID
