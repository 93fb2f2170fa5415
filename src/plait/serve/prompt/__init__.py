"""`plait sql`: the prompt and its statements."""
