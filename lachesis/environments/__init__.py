"""Environments that are installed with Lachesis.

The scripts in the top-level folder `environments/` start them. Their code is here because a user's own folder
`environments/` shadows that name, and `lachesis demo` has to work there too.
"""
