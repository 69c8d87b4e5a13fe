"""The protocol without I/O: messages, codec, array frames, the state of a connection."""
