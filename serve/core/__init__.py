"""The pure core: what to run next, decided without clock, I/O, threads, torch or grpc."""
