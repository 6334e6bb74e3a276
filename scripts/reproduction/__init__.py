"""Training runs behind the tables of results, their logs, and the pages generated from logs."""
