"""The reference backend, in torch, for any device."""
