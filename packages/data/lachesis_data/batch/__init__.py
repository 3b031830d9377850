"""Offline data: a file of prompts becomes ShareGPT files, as often as the run is killed and started again."""
