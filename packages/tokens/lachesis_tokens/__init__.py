"""Token-exact model servers: prompts, engines, `ManagedServer`, samples and the recording endpoint."""
