"""The old package `atropos`: its backends are the package `backends`."""
