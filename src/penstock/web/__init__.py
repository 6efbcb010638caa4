"""Serving HTTP: listeners, connections and TLS."""
