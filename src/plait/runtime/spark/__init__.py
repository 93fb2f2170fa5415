"""Spark itself: the session, its Python workers, and its failures."""
