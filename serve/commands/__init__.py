"""The commands of `gnnserve`, one module each; ``serve.cli`` parses their arguments.

``configured`` and ``steps`` are what they share. `gnnserve report` is ``serve.obs.cli_report``, and
`gnnserve load` is the package ``loadgen``, which runs as a process of its own.
"""
