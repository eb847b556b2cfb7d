"""The model repository on disk, calibrations kept in a cache, and the demo's small models."""
