"""Pure planning: no device, no clock, no I/O."""
