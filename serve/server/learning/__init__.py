"""What the server learns from its own runs: the cost of a request alone and beside others."""
