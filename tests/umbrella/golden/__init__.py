"""What an upgrade must not break: files that the first version wrote, and names that its users write down.

`files.tar.xz` holds runs that Lachesis wrote before it became several packages: `process` with and without tokens,
`eval`, `batch`, and the database of a rollout API with four groups that no trainer has taken.
"""
