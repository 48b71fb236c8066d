"""The interface between methods and models, and its implementations for timm's architectures."""
