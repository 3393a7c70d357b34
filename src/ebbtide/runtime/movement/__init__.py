"""What is brought to the device, what leaves it, and where optimizer state lives."""
