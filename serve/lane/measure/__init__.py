"""Measure a loaded model: its signature, and what its runs take."""
