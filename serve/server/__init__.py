"""The live server's engine: threads, lanes and shared memory around the pure scheduler."""
