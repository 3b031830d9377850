"""Tools of servers of the Model Context Protocol, which run in the sandbox of a rollout."""
