"""9 PEOPLE: command line, demo, progress."""
