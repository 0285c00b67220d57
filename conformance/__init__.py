"""The judge: compares an engine's trace with the reference per tensor, per layer and per token."""
