"""Tiny text-to-image worlds with an exact judge and small shipped checkpoints."""
