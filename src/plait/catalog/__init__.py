"""2 WHICH QUERIES LIVE: what a checkpoint was made for."""
