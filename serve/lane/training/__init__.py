"""Training of a model on a whole graph, in a process that stands still whenever it must."""
