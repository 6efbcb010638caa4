"""Generated from proto/penstock/facts/v1/facts.proto by `scripts/generate-gateway`; do not edit."""
