"""Evaluate methods on labelled domains: datasets, scenarios, metrics, tables and plots."""
