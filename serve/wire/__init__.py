"""Encoding and decoding of messages, for both ends of the wire."""
