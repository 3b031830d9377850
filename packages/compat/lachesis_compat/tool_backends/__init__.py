"""The tool backends of the removed Hermes stack, over the pools of today."""
