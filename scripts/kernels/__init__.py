"""What compiles and checks GPU kernels."""
