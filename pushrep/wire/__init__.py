"""The wire between leaders, replicas and readers, sans-IO: frames, Avro headers, record batches as they are.

    client.py, server.py     the two ends of a connection: who asks numbers and matches, who answers does so once
    versions.py              which version of each call both speak
    vocabulary.py            message <-> frame in every version; structs.py, fast_path*.py: how fast
    calls.py                 which calls there are: key, request, answer, events
    push_messages.py, replay_messages.py, values.py     what they say: frozen dataclasses that refuse impossible values
    push_messages.py, replay_messages.py, values.py    what they say: frozen dataclasses that refuse impossible values
    schemas/, schema_files.py                          their Avro schemas, a file a version, checked against the classes
    error_codes.py           code, name, whether to try again, meaning          errors.py    what a peer can break

The bytes: docs/formats/protocol.md.
"""
