"""What training will be like: simulated, measured, and said in words."""
