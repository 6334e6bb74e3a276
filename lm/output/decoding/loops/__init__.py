"""Search and draws as loops over nodes, compiled by numba: best-first expansion of nodes."""
