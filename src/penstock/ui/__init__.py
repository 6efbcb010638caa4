"""`penstock ui`: streams, readers and what flows between them, in a browser."""
