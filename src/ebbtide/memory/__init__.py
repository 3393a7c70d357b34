"""Where bytes are: reservations by tag, chunks with their copies and moves."""
