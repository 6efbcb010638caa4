"""The declared platform: model, load, lint, plan, apply, verify."""
