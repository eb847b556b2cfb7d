"""CUDA: its memory, its streams, and whether there is any. Nothing here knows of requests."""
