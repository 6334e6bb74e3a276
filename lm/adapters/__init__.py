"""Trained models in other programs, which are imported only when they are used."""
