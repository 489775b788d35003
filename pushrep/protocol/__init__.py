"""The wire between leaders, replicas and readers, sans-IO: frames, Avro headers, record batches as they are.

    frames.py        the 20 bytes before a header; FrameReader takes a stream however it is cut
    calls.py         which calls there are: key, request, answer, events
    push_messages.py, replay_messages.py        what they say: frozen dataclasses that refuse impossible values
    schemas/, schema_files.py                   their Avro schemas, a file per version, checked against the classes
    vocabulary.py    message <-> frame in every version; structs.py, hot_roads.py: how fast
    error_codes.py   code, name, whether to try again, meaning          errors.py    what a peer can break

The bytes: docs/formats/protocol.md.
"""
