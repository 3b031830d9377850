"""Several processes as one: started in order, watched, started again, and ended together."""
