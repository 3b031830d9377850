"""Settings of environments and model servers: fields, flags, class attributes, files."""
