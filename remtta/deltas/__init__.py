"""Delta files: what adaptation changed, with where it comes from."""

DELTA = "delta.safetensors"
"""What a run calls the delta in its folder."""
