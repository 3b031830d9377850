"""Commands of people at a terminal, and the checks of environments that they show."""
