"""What leaves the device between forward and backward."""
