"""Load models into a lane, and join several requests into one run."""
