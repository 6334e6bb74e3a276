"""Words to classes."""
