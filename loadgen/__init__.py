"""Load generator: open loop over gRPC, with Locust's statistics and web UI.

    options → plan (trace + encoded requests) → open loop → samples → summary → table or JSON

`patched` makes the process use gevent and must be imported before any module that opens a channel.
`options`, `inputs`, `plan`, `measure` and `show` do not need gevent.
"""
