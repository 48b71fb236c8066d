"""A run in production: health file, metrics, MQTT, annotated video, published models; many streams."""
