"""`lachesis audit`: what is wrong with an environment, found without a model."""
