"""Which version of a model answers a request that names none: pure decisions."""
