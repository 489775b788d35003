"""The wire between leaders, replicas and readers, sans-IO: frames, Avro headers, record batches as they are.

    client.py, server.py     the two ends of a connection: one numbers and matches, the other answers each call once
    calls.py                 which calls there are, and message <-> frame in every version that both sides speak
    push_messages.py, replay_messages.py     what they say: frozen dataclasses that refuse impossible values (values.py)
    codec.py, schemas/       message <-> Avro header, derived from class and schema; a schema is a file a version
    frames.py                bytes <-> frames, and the memory of their bodies
    error_codes.py           code, name, whether to try again, meaning          errors.py    what a peer can break

The bytes: docs/internals/formats/protocol.md.
"""
