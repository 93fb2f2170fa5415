"""The first example may compile a kernel, so examples have no deadline here."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("compiling", deadline=None)
settings.load_profile("compiling")
