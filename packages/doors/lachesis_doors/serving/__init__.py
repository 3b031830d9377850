"""The other way: our environments as servers of other standards, one module each. See docs/doors.md."""
