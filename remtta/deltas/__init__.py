"""Delta files: the weight changes of an adaptation, and their origin."""

DELTA = "delta.safetensors"
"""Name of the delta in a run's folder."""
