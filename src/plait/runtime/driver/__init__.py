"""The driver's side of an epoch: its steps, its commit, its sources and sinks."""
