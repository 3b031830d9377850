"""Messages as an immutable graph, with the tokens that were sampled."""
