"""Examples of programs that use trained models."""
