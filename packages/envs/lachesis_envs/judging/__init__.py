"""A test suite as the judge of code that runs in its own interpreter."""
