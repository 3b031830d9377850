"""The other way: our environments as servers of other standards, one module each. See docs/serving-others.md."""
