"""Communication between main process and lane processes: packets, shared memory, stop word."""
