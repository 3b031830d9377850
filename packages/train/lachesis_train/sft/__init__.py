"""Supervised fine-tuning on what `process` wrote: ShareGPT lines, samples, and groups with samples."""
