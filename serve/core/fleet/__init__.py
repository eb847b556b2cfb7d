"""Several devices: which task goes where, and when it moves."""
