"""Makes the standard library and gRPC cooperative. Import before any channel is opened.

From then on this process must not use `grpc.aio`, which gevent cannot drive.
"""

# isort: off
import locust  # noqa: F401  (patches the standard library when imported)
import grpc.experimental.gevent

# isort: on

grpc.experimental.gevent.init_gevent()
