"""Faults: a run is killed, its disk is full, loses power or returns other bytes; see `__main__`."""
