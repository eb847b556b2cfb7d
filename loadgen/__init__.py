"""Load generator: Locust over gRPC, open loop.

    options → plan (trace + encoded requests) → open loop → samples → summary → table or JSON

`patched` makes the process cooperative and must be imported before anything that opens a channel;
`options`, `inputs`, `plan`, `measure` and `show` are plain and can be imported anywhere.
"""
