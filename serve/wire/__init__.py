"""Bytes to values and back, for both ends of the wire."""
