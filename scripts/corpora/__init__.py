"""Writers of corpora: synthetic, of repositories, and the text of the demonstration."""
