"""What a method may ask of a model, and the architectures that answer."""
