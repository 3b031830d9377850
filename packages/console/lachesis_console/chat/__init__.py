"""`lachesis chat`: a person in a rollout, beside the model, in its place, or after a recording."""
