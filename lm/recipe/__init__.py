"""Recipes that `lm new` writes: for a text, and for a table of events."""
