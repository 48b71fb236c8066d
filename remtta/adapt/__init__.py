"""Adapt a model to one stream, or to many."""
