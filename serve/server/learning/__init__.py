"""Learning from runs: the time of a request alone, and the slowdown beside others."""
