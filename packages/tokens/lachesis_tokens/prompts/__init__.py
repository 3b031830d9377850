"""Prompts as token ids: tokenizers, their proof, images, the files of models."""
