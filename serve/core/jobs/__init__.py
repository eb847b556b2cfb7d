"""Training jobs beside requests: what may run of what requests leave, and when it gives way."""
