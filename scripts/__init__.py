"""Commands around the application, and its benchmarks."""
