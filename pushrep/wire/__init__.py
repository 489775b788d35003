"""The wire between leaders, replicas and readers, sans-IO: frames, Avro headers, record batches as they are.

    client.py, server.py     the two ends of a connection: who asks numbers and matches, who answers does so once
    calls.py                 which calls there are: key, request, answer, events
    push_messages.py, replay_messages.py     what they say: frozen dataclasses that refuse impossible values (values.py)
    schemas/, schema_files.py                their Avro schemas, a file a version, checked against the classes
    vocabulary.py            message <-> frame in every version, and which version both sides speak
    codec.py                 message <-> Avro header, derived from class and schema
    frames.py                bytes <-> frames, and the memory of their bodies
    error_codes.py           code, name, whether to try again, meaning          errors.py    what a peer can break

The bytes: docs/formats/protocol.md.
"""
