"""Traces of requests for OpenTelemetry, exported by a process of their own."""
