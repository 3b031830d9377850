"""Modules of the package `environments` that only old code imports."""
