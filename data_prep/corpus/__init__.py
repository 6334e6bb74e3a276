"""A corpus, of text or of events, as a stream of lines."""
