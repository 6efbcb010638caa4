"""Dead letters: capture, inspection, replay and audit."""
