"""Text: lines of local files and of datasets."""
