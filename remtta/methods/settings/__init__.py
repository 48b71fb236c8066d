"""Settings of methods. Imports no torch."""
