"""Graphs to serve and to load with: reading archives, generating, cutting subgraphs. NumPy only."""
