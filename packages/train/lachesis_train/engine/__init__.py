"""The embedded engine: a server that speaks Tinker's wire over torch, transformers and peft, on the CPU or one GPU.

`start_engine` runs it as a subprocess; only that process imports torch.
"""

from lachesis_train.engine.child import start_engine

__all__ = ["start_engine"]
