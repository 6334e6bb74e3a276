"""What compiles and checks GPU kernels; README.md has a table of contents."""
