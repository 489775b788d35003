"""The wire between leaders, replicas and readers, sans-IO: frames, Avro headers, record batches as they are.

    connection.py            its two ends: the client numbers and matches, the server answers each call once
    calls.py                 which calls there are, and message <-> frame in every version that both sides speak
    push_messages.py, replay_messages.py     what they say: frozen dataclasses that refuse impossible values (values.py)
    codec.py, schemas/       message <-> Avro header, derived from class and schema; a schema is a file a version
    frames.py                bytes <-> frames, and the memory of their bodies; what a peer can break
    error_codes.py           code, name, whether to try again, meaning

The bytes: docs/internals/formats/protocol.md.
"""
