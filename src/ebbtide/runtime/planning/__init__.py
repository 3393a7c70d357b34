"""Which plan a pass runs by."""
