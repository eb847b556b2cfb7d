"""The scheduler under a virtual clock: try policies without a machine."""
