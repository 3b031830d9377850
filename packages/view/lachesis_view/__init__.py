"""`lachesis view`: a folder of runs in a browser, while it grows."""
