"""The gRPC transport: the standard inference service, our own service, health and reflection.

It reaches the engine through ``serve.server.api`` alone; `protos/` describes its messages. Start
reading at ``server.GrpcServer``.
"""
