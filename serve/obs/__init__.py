"""What happened, for operators: request records, the report, metrics and the log."""
