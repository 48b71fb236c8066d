"""Adaptation methods, one short file each. Importing this package loads no torch."""
