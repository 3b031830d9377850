"""Training data in files: exports, batches of prompts, compression, checks and figures of files."""
