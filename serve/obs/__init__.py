"""Observability for operators: request records, the report, metrics, the log and the journal."""
