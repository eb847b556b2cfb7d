"""Patches the standard library and gRPC for gevent; import it before any channel is opened.

The process must not use `grpc.aio` afterwards, which does not work with gevent.
"""

# isort: off
import locust  # noqa: F401  (patches the standard library when imported)
import grpc.experimental.gevent

# isort: on

grpc.experimental.gevent.init_gevent()
