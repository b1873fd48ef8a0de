"""What the switches of both frameworks replace the original code by."""
