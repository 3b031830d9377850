"""Files of trajectories: formats, conversion, validation, figures."""
