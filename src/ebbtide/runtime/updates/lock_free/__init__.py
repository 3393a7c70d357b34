"""Updates that passes do not wait for: a policy of the update queue."""
