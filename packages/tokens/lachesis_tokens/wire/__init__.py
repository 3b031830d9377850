"""Bodies of the native routes of model servers."""
