"""gnnserve: an inference server for graph neural networks that keeps a promise per request.

Import-light on purpose: clients and load generators import ``serve.client`` and ``serve.pb``
through this package and must not pay for torch or for the server.
"""

__version__ = "0.1.0"
