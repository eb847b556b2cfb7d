"""Several machines as one service: pure decisions, of the standard library alone."""
