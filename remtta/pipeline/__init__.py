"""Detect without labels that adaptation does harm, and undo it."""
