"""The environment of the scripts, and what others would install."""
