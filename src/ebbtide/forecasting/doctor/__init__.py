"""What this machine is worth: measured, written as a machine file, and said in words."""
