"""Copies one stream to another, with any retention: modes of sourcing, a receiver, a bridge. Knows no platform."""
