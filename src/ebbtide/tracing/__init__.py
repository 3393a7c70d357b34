"""Observers that write records: live from an iteration that runs, symbolic from one that is only imagined."""
