"""Load generator: open loop over gRPC, with Locust's statistics and web UI or from compiled code.

    options → plan (trace + encoded requests) → loop → samples → summary → table or JSON

`open_loop` sends with gRPC's Python library on gevent, `native` from compiled code. `patched` makes
the process use gevent and must be imported before any module that opens a channel; `open_loop`,
`native_green`, `run`, `users` and `locustfile` need it, the others do not.
"""
