"""Viewers of a run: health file, metrics, MQTT broker, video."""
