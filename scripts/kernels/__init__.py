"""What builds, emulates, scans, models and tunes GPU kernels; README.md has a table of contents."""
