"""Model servers that track tokens."""
