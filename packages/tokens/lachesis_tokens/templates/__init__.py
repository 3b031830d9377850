"""Chat templates: rendering, validation, and where the turns of a conversation begin."""
