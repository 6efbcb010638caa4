"""From one stream to another, whatever their retention: modes of sourcing, a receiver, a bridge. Knows no platform."""
