"""Dead letters: what they carry."""
