"""The gRPC transport: the standard inference service, our own, health and reflection.

Everything below it is reached through ``serve.server.api``; everything it sends is described in
`protos/`. Start at ``server.GrpcServer``.
"""
