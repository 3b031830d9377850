"""Programs that task folders carry into sandboxes. They run on Python 3.6 or later."""
