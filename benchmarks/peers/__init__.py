"""The same conversations played by Lachesis and by its peers, each by its own command, in one run."""
