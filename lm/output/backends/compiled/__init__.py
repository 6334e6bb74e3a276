"""The backend for CPUs: loops over nodes, compiled by numba."""
