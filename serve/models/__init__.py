"""The model repository on disk, the cache of calibrations, and the demo's small models."""
