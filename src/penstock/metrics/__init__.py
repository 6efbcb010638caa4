"""Numbers for Prometheus, and the HTTP endpoint that serves them together with health."""
