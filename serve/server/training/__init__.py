"""Training jobs of the live server: their files, their processes, and what is told of them."""
