"""Statistics: what is where, how far behind, and what is stuck."""
