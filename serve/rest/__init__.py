"""The gateway: the Open Inference Protocol over HTTP, in a process of its own.

It owns the HTTP port, forwards inference and model control to the gRPC port, and fetches health,
metrics and the report from the main process over a private socket. So reading JSON takes no time of
the process that schedules. ``process`` starts it in the main process, ``run`` is its entry, and
``app`` has its paths.
"""
