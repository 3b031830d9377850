"""Model APIs over HTTP, from the side of a server: what a request asks, and how answers and errors are written."""
