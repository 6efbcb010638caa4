"""Workers of a group: identity, lease, assignment, claims, handoff, migration."""
