"""Words from distributions: log-probabilities, exact top-k and top-p, sampling."""
